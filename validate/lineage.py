"""The table of generations: predicted beside published, and what binds each.

Published numbers are the papers' (rows of ``validate/data/published.csv``, headlines of their texts) and this project's H200
times; a generation's row names those it is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..model.attention import Attention
from ..model.gpu import load_gpu
from ..model.schedules import get_schedule
from ..sim.predict import simulate
from .protocol import first_fa3, repeats_of

#: W: no power limit.
UNLIMITED_W = 1e5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: a generation on the chip and shape its authors measured. ``published``: TFLOP/s in the paper's convention.

    ``over``: rows it is compared with, each with the published speed-up (least, most), None where it follows from the two rows.
    ``power_limited``: whether the card's power limit holds below ``clock``.
    """

    generation: str
    schedule: str
    gpu: str
    attention: Attention
    published: float | None
    clock: float | str
    source: str
    over: tuple[tuple[str, tuple[float, float] | None], ...] = ()
    switches: tuple[tuple[str, Any], ...] = ()
    power_limited: bool = True


_FA1_SHAPE = Attention(batch=16, heads_q=8, seqlen_q=4096, head_dim=64, dtype="fp16")
_LONG = Attention(batch=1, heads_q=16, seqlen_q=16384, head_dim=128)
_WIDE = Attention(batch=1, heads_q=8, seqlen_q=16384, head_dim=256, dtype="fp16")
_H200 = Attention(batch=4, heads_q=16, seqlen_q=4096, head_dim=128)
_B200 = Attention(batch=1, heads_q=16, seqlen_q=32768, head_dim=128)
_NARROW = Attention(batch=2, heads_q=32, seqlen_q=8192, head_dim=64)
_NOT_EMULATED = (("exp2_emulation", 0.0),)
_FP8_AS_MERGED = (*_NOT_EMULATED, ("rescale_threshold", 4.0))
_PACKAGE = (("build", "flash-attn"),)
_FA3_PAPER, _FP8_PAPER = (tuple(first_fa3("128", fp8=fp8, causal=False).items()) for fp8 in (False, True))
_FIRST_RELEASE = (("build", "flash-attn-2.0"),)

ENTRIES = (
    Entry(
        generation="standard, A100", schedule="standard", gpu="a100-40gb", attention=_FA1_SHAPE, published=33.38, clock="power",
        source="FA1 paper, table 18",
    ),
    Entry(
        generation="FA1, A100", schedule="fa1", gpu="a100-40gb", attention=_FA1_SHAPE, published=65.29, clock="power",
        source="FA1 paper, table 18", over=(("standard, A100", None),),
    ),
    Entry(
        generation="FA2, A100", schedule="fa2", gpu="a100-40gb", attention=_FA1_SHAPE, published=None, clock="power",
        source="not published at this shape; speed-up: FA2 paper, abstract (over all shapes, with backward)", switches=_PACKAGE,
        over=(("FA1, A100", (1.7, 3.0)),),
    ),
    Entry(
        generation="FA2, best, A100", schedule="fa2", gpu="a100-80gb", attention=replace(_LONG, dtype="fp16"), published=230.0,
        clock="power", source="FA2 paper: up to 230 TFLOP/s, shape not given", switches=_FIRST_RELEASE,
    ),
    Entry(
        generation="FA2, H100", schedule="fa2", gpu="h100", attention=_LONG, published=370.0, clock=1830.0,
        source="FA3 paper, figure 5", switches=_PACKAGE,
    ),
    Entry(
        generation="Triton, H100", schedule="triton", gpu="h100", attention=replace(_LONG, dtype="fp16"), published=395.0,
        clock=1830.0, source="FA3 paper, figure 5",
    ),
    Entry(
        generation="cuDNN, H100", schedule="cudnn", gpu="h100", attention=replace(_LONG, dtype="fp16"), published=595.0,
        clock=1830.0, source="FA3 paper, figure 5; taken as FA3's pipeline",
    ),
    Entry(
        generation="FA3, H100", schedule="fa3", gpu="h100", attention=replace(_LONG, dtype="fp16"), published=648.0,
        clock=1830.0, source="FA3 paper, figure 5", switches=_FA3_PAPER,
        over=(("FA2, H100", None), ("Triton, H100", None), ("cuDNN, H100", None)),
    ),
    Entry(
        generation="FA3 FP8, H100", schedule="fa3", gpu="h100", published=1008.0, clock=1830.0,
        attention=Attention(batch=1, heads_q=16, seqlen_q=16896, head_dim=128, dtype="fp8"),
        source="FA3 paper, figure 7", switches=_FP8_PAPER, over=(("FA3, H100", None),),
    ),
    Entry(
        generation="FA3 D256, H100", schedule="fa3", gpu="h100", attention=_WIDE, published=756.0, clock=1830.0,
        source="FA3 paper, figure 5 (its text: up to 740)", switches=_FA3_PAPER,
    ),
    Entry(
        generation="FA3 D256, 1830 MHz kept", schedule="fa3", gpu="h100", attention=replace(_WIDE, dtype="bf16"), published=840.0,
        clock=1830.0, power_limited=False, source="FA3, later abstract: up to 840 TFLOP/s",
    ),
    Entry(
        generation="FA3 FP8 D256, 1830 MHz kept", schedule="fa3", gpu="h100", attention=replace(_WIDE, dtype="fp8"),
        published=1300.0, clock=1830.0, power_limited=False, source="FA3, later abstract: 1.3 PFLOP/s",
        switches=_FA3_PAPER,
    ),
    Entry(
        generation="FA2, H200", schedule="fa2", gpu="h200", attention=_H200, published=345.2, clock="power",
        source="measured, data/h200_timed.csv",
    ),
    Entry(
        generation="FA3, H200", schedule="fa3", gpu="h200", attention=_H200, published=629.5, clock="power",
        source="measured, data/h200_timed.csv", over=(("FA2, H200", None),),
    ),
    Entry(
        generation="FA2, B200", schedule="fa2", gpu="b200", attention=_B200, published=432.0, clock=1850.0,
        source="FA4 paper, figure 4", switches=_PACKAGE,
    ),
    Entry(
        generation="Triton, B200", schedule="triton", gpu="b200", attention=_B200, published=703.0, clock=1850.0,
        source="FA4 paper, figure 4",
    ),
    Entry(
        generation="cuDNN 9.13, B200", schedule="cudnn", gpu="b200", attention=_B200, published=1517.0, clock=1850.0,
        source="FA4 paper, figure 4; taken as FA4 without what FA4 added", switches=(("version", "9.13"),),
    ),
    Entry(
        generation="Gluon, B200", schedule="gluon", gpu="b200", attention=_B200, published=1250.0, clock=1850.0,
        source="FA4 paper, figure 4",
    ),
    Entry(
        generation="FA4, B200", schedule="fa4", gpu="b200", attention=_B200, published=1613.0, clock=1850.0,
        source="FA4 paper, figure 4",
        over=(("FA2, B200", None), ("Triton, B200", None), ("cuDNN 9.13, B200", None), ("Gluon, B200", None)),
    ),
    Entry(
        generation="FA4 causal, B200", schedule="fa4", gpu="b200", attention=replace(_B200, causal=True), published=1576.0,
        clock=1850.0, source="FA4 paper, figure 5",
    ),
    Entry(
        generation="FA4 D192/128 causal, B200", schedule="fa4", gpu="b200", published=1654.0, clock=1850.0,
        attention=replace(_B200, head_dim=192, causal=True), source="FA4 paper, figure 5 (DeepSeek's head dimensions)",
    ),
    Entry(
        generation="FA4 D64, B200", schedule="fa4", gpu="b200", attention=_NARROW, published=888.56, clock=1850.0,
        source="flash-attention, pull request 2109; its clock is not told", switches=_NOT_EMULATED,
    ),
    Entry(
        generation="FA4 FP8 D64, B200", schedule="fa4", gpu="b200", attention=replace(_NARROW, dtype="fp8"), published=903.13,
        clock=1850.0, source="flash-attention, pull request 2109; its clock is not told", switches=_FP8_AS_MERGED,
        over=(("FA4 D64, B200", None),),
    ),
)  # fmt: skip


def lineage(*, progress: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """One dict a row: generation, gpu, shape, switches, predicted and published TFLOP/s, error in %, clock, limiter, speed-ups.

    ``progress`` hears what is next.
    """
    rows: dict[str, dict[str, Any]] = {}
    for entry in ENTRIES:
        progress(entry.generation)
        rows[entry.generation] = _row(entry, rows)
    return list(rows.values())


def _row(entry: Entry, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    gpu = load_gpu(entry.gpu)
    if not entry.power_limited:
        gpu = gpu.replace_number("power.limit_w", UNLIMITED_W)
    how: dict[str, Any] = {"clock": entry.clock, "repeats": repeats_of(entry.source)}
    result = simulate(get_schedule(entry.schedule, **dict(entry.switches)), gpu, entry.attention, **how)
    steps = []
    for over, told in entry.over:
        before = rows[over]
        if told is None and entry.published and before["published_tflops"]:
            told = (entry.published / before["published_tflops"],) * 2
        steps.append({"over": over, "predicted": result.tflops / before["predicted_tflops"], "published": told})
    return {
        "generation": entry.generation,
        "schedule": entry.schedule,
        "gpu": entry.gpu,
        "shape": entry.attention.label,
        "switches": dict(entry.switches),
        "predicted_tflops": result.tflops,
        "published_tflops": entry.published,
        "error_pct": 100 * (entry.published / result.tflops - 1) if entry.published else None,
        "predicted_ms": result.ms,
        "utilization": result.utilization,
        "clock_mhz": result.clock_mhz,
        "hbm_gb": (result.bytes["hbm_read"] + result.bytes["hbm_write"]) / 1e9,
        "limiter": result.limiter,
        "speedups": steps,
        "repeats": how["repeats"],
        "source": entry.source,
    }
