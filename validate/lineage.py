"""The table of generations: predicted beside published, and what binds each.

Published rows come from ``validate/data/published.csv`` and the H200 files; a generation's row names the one it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..model.attention import Attention
from ..model.gpu import load_gpu
from ..model.schedules import get_schedule
from ..sim.predict import simulate


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row: a generation on the chip and shape its authors measured. ``published``: TFLOP/s in the paper's convention."""

    generation: str
    schedule: str
    gpu: str
    attention: Attention
    published: float | None
    clock: float | str
    source: str
    speedup_over: str | None = None
    switches: tuple[tuple[str, Any], ...] = ()


_FA1_SHAPE = Attention(batch=16, heads_q=8, seqlen_q=4096, head_dim=64, dtype="fp16")
_LONG = Attention(batch=1, heads_q=16, seqlen_q=16384, head_dim=128)
_H200 = Attention(batch=4, heads_q=16, seqlen_q=4096, head_dim=128)

ENTRIES = (
    Entry(
        generation="standard attention",
        schedule="standard",
        gpu="a100-40gb",
        attention=_FA1_SHAPE,
        published=33.38,
        clock="power",
        source="FA1 paper, table 18",
    ),
    Entry(
        generation="FlashAttention-1",
        schedule="fa1",
        gpu="a100-40gb",
        attention=_FA1_SHAPE,
        published=65.29,
        clock="power",
        source="FA1 paper, table 18",
        speedup_over="standard attention",
    ),
    Entry(
        generation="FlashAttention-2",
        schedule="fa2",
        gpu="a100-40gb",
        attention=_FA1_SHAPE,
        published=None,
        clock="power",
        source="not published at this shape",
        speedup_over="FlashAttention-1",
    ),
    Entry(
        generation="FlashAttention-2, A100 80 GB",
        schedule="fa2",
        gpu="a100-80gb",
        attention=_LONG,
        published=230.0,
        clock="power",
        source="FA2 paper: up to 230 TFLOP/s (best shape)",
        switches=(("build", "flash-attn"),),
    ),
    Entry(
        generation="FlashAttention-2, H100 at 1830 MHz",
        schedule="fa2",
        gpu="h100",
        attention=_LONG,
        published=370.0,
        clock=1830.0,
        source="FA3 paper, figure 5",
        switches=(("build", "flash-attn"),),
    ),
    Entry(
        generation="FlashAttention-2, H200",
        schedule="fa2",
        gpu="h200",
        attention=_H200,
        published=345.2,
        clock="power",
        source="measured, data/h200_timed.csv",
    ),
    Entry(
        generation="FlashAttention-3, H100 at 1830 MHz",
        schedule="fa3",
        gpu="h100",
        attention=replace(_LONG, dtype="fp16"),
        published=648.0,
        clock=1830.0,
        source="FA3 paper, figure 5",
        speedup_over="FlashAttention-2, H100 at 1830 MHz",
    ),
    Entry(
        generation="FlashAttention-3 FP8, H100 at 1830 MHz",
        schedule="fa3",
        gpu="h100",
        attention=Attention(batch=1, heads_q=16, seqlen_q=16896, head_dim=128, dtype="fp8"),
        published=1008.0,
        clock=1830.0,
        source="FA3 paper, figure 7",
        switches=(("persistent", False),),
        speedup_over="FlashAttention-3, H100 at 1830 MHz",
    ),
    Entry(
        generation="FlashAttention-3, H200",
        schedule="fa3",
        gpu="h200",
        attention=_H200,
        published=629.5,
        clock="power",
        source="measured, data/h200_timed.csv",
        speedup_over="FlashAttention-2, H200",
    ),
    Entry(
        generation="FlashAttention-4, B200",
        schedule="fa4",
        gpu="b200",
        attention=Attention(batch=1, heads_q=16, seqlen_q=32768, head_dim=128),
        published=1613.0,
        clock=1850.0,
        source="FA4 paper, figure 4",
    ),
    Entry(
        generation="FlashAttention-4 causal, B200",
        schedule="fa4",
        gpu="b200",
        attention=Attention(batch=1, heads_q=16, seqlen_q=32768, head_dim=128, causal=True),
        published=1576.0,
        clock=1850.0,
        source="FA4 paper, figure 5",
    ),
)


def lineage() -> list[dict[str, Any]]:
    """One dict a row: generation, gpu, shape, predicted and published TFLOP/s, error in %, clock, limiter and speed-up."""
    rows: list[dict[str, Any]] = []
    times: dict[str, float] = {}
    for entry in ENTRIES:
        schedule = get_schedule(entry.schedule, **dict(entry.switches))
        result = simulate(schedule, load_gpu(entry.gpu), entry.attention, clock=entry.clock)
        times[entry.generation] = result.ms
        over = entry.speedup_over
        rows.append(
            {
                "generation": entry.generation,
                "schedule": entry.schedule,
                "gpu": entry.gpu,
                "shape": entry.attention.label,
                "predicted_tflops": result.tflops,
                "published_tflops": entry.published,
                "error_pct": 100 * (entry.published / result.tflops - 1) if entry.published else None,
                "predicted_ms": result.ms,
                "utilization": result.utilization,
                "clock_mhz": result.clock_mhz,
                "hbm_gb": (result.bytes["hbm_read"] + result.bytes["hbm_write"]) / 1e9,
                "limiter": result.limiter,
                "speedup": times[over] / result.ms if over else None,
                "speedup_over": over,
                "source": entry.source,
            }
        )
    return rows
