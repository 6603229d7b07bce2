"""What each idea of the lineage is worth: a generation with it and without it, on its own chip and on its neighbours.

Every idea is a switch of a schedule (or the step from one schedule to another), and both sides are programs that run. Both count
instructions in the same way: the binary's where both sides have one, otherwise the algorithm's own. A claim is what the papers
print about the idea alone; ``tests/test_validate_ideas.py`` holds sign and order against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..model.attention import Attention
from ..model.gpu import GPU, load_gpu
from ..model.program import Program
from ..model.schedules import SCHEDULES, get_schedule
from ..sim.predict import Result, simulate

Switches = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Idea:
    """One switch. ``schedule`` with ``fields`` has the idea; with ``without`` on top, or as schedule ``against``, it has not.

    ``gpus``: its own chip first. ``loses``: times as long without it, as published (least, most); None: published by sign only or
    not at all. ``unmasked``: without it every block is computed, as in the same problem without its mask.
    """

    name: str
    generation: str
    schedule: str
    attention: Attention
    gpus: tuple[str, ...]
    claim: str
    source: str
    fields: Switches = ()
    without: Switches = ()
    against: str | None = None
    dtype_without: str | None = None
    unmasked: bool = False
    clock: float | str = "power"
    loses: tuple[float, float] | None = None

    @property
    def missing(self) -> tuple[str, ...]:
        """Fields that its schedules do not have."""
        sides = ((self.schedule, self.fields), (self.against or self.schedule, self.without))
        known = {kernel: SCHEDULES[kernel].__dataclass_fields__ for kernel, _ in sides}
        return tuple(name for kernel, switches in sides for name, _ in switches if name not in known[kernel])

    @property
    def problem_without(self) -> Attention:
        """What the side without it computes, that of the other side but for its format or mask."""
        changed = replace(self.attention, dtype=self.dtype_without or self.attention.dtype)
        return replace(changed, causal=False) if self.unmasked else changed


_A100, _HOPPER, _BLACKWELL = ("a100-80gb", "h100"), ("h100", "h200"), ("b200", "b300")
_ALGORITHM = (("counts", "ideal"),)
_FA1 = Attention(batch=16, heads_q=8, seqlen_q=4096, head_dim=64, dtype="fp16")
_FA2 = Attention(batch=4, heads_q=32, seqlen_q=2048, head_dim=64, dtype="fp16")
_FEW_HEADS = Attention(batch=1, heads_q=32, seqlen_q=8192, head_dim=64, dtype="fp16")
_FA3 = Attention(batch=4, heads_q=16, seqlen_q=8448, head_dim=128, dtype="fp16")
_FA4 = Attention(batch=4, heads_q=16, seqlen_q=8192, head_dim=128)
#: FA4 without its other ideas.
_AS_FA2: Switches = (("q_stages", 1), ("cta_pair", False), ("exp2_emulation", 0.0), ("rescale_rate", 1.0))
_AS_FA1: Switches = (("split", "k"), ("sequence_parallel", False), ("deferred_divide", False))

IDEAS = (
    Idea(
        name="tiling", generation="FA1", schedule="fa1", against="standard", attention=_FA1,
        gpus=("a100-40gb", "a100-80gb", "h100"),
        claim="2.0x at N=4096; HBM 40.3 -> 4.4 GB (forward and backward, GPT-2)", source="FA1 table 18, figure 2",
        loses=(1.9, 2.0),
    ),
    Idea(
        name="Q blocks outside", generation="FA2", schedule="fa2", against="fa1", attention=_FA2, gpus=_A100,
        fields=(*_ALGORITHM, *_AS_FA1), without=_ALGORITHM,
        claim="what lets a Q block be a CTA; alone no gain is claimed", source="FA2 section 3.2",
    ),
    Idea(
        name="split Q instead of K", generation="FA2", schedule="fa2", attention=_FA2, gpus=_A100,
        fields=_ALGORITHM, without=(("split", "k"),),
        claim="fewer shared-memory reads and writes; no ablation printed", source="FA2 section 3.3",
    ),
    Idea(
        name="sequence parallelism", generation="FA2", schedule="fa2", attention=_FEW_HEADS, gpus=_A100,
        fields=_ALGORITHM, without=(("sequence_parallel", False),),
        claim="one CTA a head fills the chip from about 80 heads on", source="FA2 section 3.2",
    ),
    Idea(
        name="deferred divide", generation="FA2", schedule="fa2", attention=_FA2, gpus=_A100,
        fields=_ALGORITHM, without=(("deferred_divide", False),),
        claim="a vector FLOP costs 16 matrix FLOPs; no ablation printed", source="FA2 section 3.1",
    ),
    Idea(
        name="causal blocks skipped", generation="FA2", schedule="fa2", gpus=_A100, unmasked=True,
        fields=(("build", "flash-attn"),),
        attention=Attention(batch=2, heads_q=16, seqlen_q=8192, head_dim=128, dtype="fp16", causal=True),
        claim="1.7 to 1.8x", source="FA2 section 3.1", loses=(1.7, 1.8),
    ),
    Idea(
        name="warp specialisation", generation="FA3", schedule="fa3", attention=_FA3, gpus=_HOPPER, clock=1830.0,
        fields=(("build", "2024-07"),), without=(("warp_specialization", False),),
        claim="661 -> 570 TFLOP/s without it", source="FA3 table 2", loses=(1.16, 1.16),
    ),
    Idea(
        name="ping-pong", generation="FA3", schedule="fa3", attention=_FA3, gpus=_HOPPER, clock=1830.0,
        fields=(("intra_overlap", False),), without=(("pingpong", False),),
        claim="570 -> 620-640 TFLOP/s, before the overlap within a warpgroup", source="FA3 section 3.1", loses=(1.088, 1.123),
    ),
    Idea(
        name="overlap in a warpgroup", generation="FA3", schedule="fa3", attention=_FA3, gpus=_HOPPER, clock=1830.0,
        without=(("intra_overlap", False),),
        claim="661 -> 582 TFLOP/s without it (620-640 -> 640-661 in the text)", source="FA3 table 2", loses=(1.03, 1.14),
    ),
    Idea(
        name="TMA multicast", generation="FA3", schedule="fa3", attention=_FA3, gpus=_HOPPER, clock=1830.0,
        fields=(("cluster", 2),), without=(("cluster", 1),),
        claim="two CTAs share K/V loads; no ablation printed", source="FA3 code",
    ),
    Idea(
        name="persistent CTAs", generation="FA3", schedule="fa3", attention=_FA3, gpus=_HOPPER, clock=1830.0,
        without=(("persistent", False),),
        claim="FP16 had them, FP8 not: its short and causal rows suffer", source="FA3 section 4.1, footnote",
    ),
    Idea(
        name="longest tiles first", generation="FA4", schedule="fa3", gpus=("h200", "h100"),
        attention=Attention(batch=4, heads_q=16, seqlen_q=4096, head_dim=128, causal=True), without=(("longest_first", False),),
        claim="4 to 8 % (measured on an H200)", source="FA4 section 3.3", loses=(1.04, 1.08),
    ),
    Idea(
        name="FP8", generation="FA3", schedule="fa3", gpus=_HOPPER, clock=1830.0, dtype_without="fp16",
        attention=Attention(batch=1, heads_q=16, seqlen_q=16896, head_dim=128, dtype="fp8"), fields=(("persistent", False),),
        claim="648 -> 1008 TFLOP/s", source="FA3 figures 5 and 7", loses=(1.5, 1.6),
    ),
    Idea(
        name="two Q tiles in flight", generation="FA4", schedule="fa4", attention=_FA4, gpus=_BLACKWELL,
        fields=(("cta_pair", False), *_ALGORITHM), without=(("q_stages", 1),),
        claim="ping-pong of two tiles of 128 rows; no ablation printed", source="FA4 section 3.1",
    ),
    Idea(
        name="accumulators in TMEM", generation="FA4", schedule="fa4", against="fa2", attention=_FA4, gpus=_BLACKWELL,
        fields=(*_ALGORITHM, *_AS_FA2), without=_ALGORITHM,
        claim="S and O leave the registers, products are one thread's (tcgen05, not mma.sync); no ablation printed",
        source="FA4 section 3.1",
    ),
    Idea(
        name="emulated exponentials", generation="FA4", schedule="fa4", attention=_FA4, gpus=_BLACKWELL,
        fields=_ALGORITHM, without=(("exp2_emulation", 0.0),),
        claim="10 to 25 % of them on the FMA pipe; B300, whose MUFU is twice as fast, emulates none",
        source="FA4 section 3.1, code",
    ),
    Idea(
        name="conditional rescale", generation="FA4", schedule="fa4", attention=_FA4, gpus=_BLACKWELL,
        fields=_ALGORITHM, without=(("rescale_rate", 1.0),),
        claim="O through registers only where a maximum grew much; rescales about ten times fewer; no ablation printed",
        source="FA4 section 3.1; ten times: Modal's write-up of the Hot Chips talk, not in the paper",
    ),
    Idea(
        name="rescale threshold", generation="FA4", schedule="fa4", attention=_FA4, gpus=_BLACKWELL,
        fields=_ALGORITHM, without=(("rescale_threshold", 0.0),),
        claim="maxima may lag by 2^8 before O is rescaled; no ablation printed", source="FA4 section 3.1",
    ),
    Idea(
        name="CTA pair", generation="FA4", schedule="fa4", attention=_FA4, gpus=_BLACKWELL,
        fields=_ALGORITHM, without=(("cta_pair", False),),
        claim="operand B in halves: less SMEM traffic", source="FA4 section 3.2, code",
    ),
)  # fmt: skip

#: What moves: key of Result.bytes, and what it is called.
BYTES = (("hbm", "HBM"), ("l2", "L2"), ("smem", "SMEM"))
#: A change below this share is no change worth a word.
TELLING = 0.03


def ideas(
    names: Iterable[str] = (), gpus: Iterable[str] = (), *, progress: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """One dict an idea and chip: both sides' cycles, ms, bytes, meetings and limiter, how many times as long it takes without it,
    and ``worth`` in words. An idea that cannot run there, or whose switch its schedule lacks, says so in ``reason``.

    ``names`` and ``gpus`` choose (none: all ideas, each on its own chips). ``progress`` hears what is next.
    """
    asked, chips = tuple(names), tuple(gpus)
    for name in asked:
        if name not in {idea.name for idea in IDEAS}:
            raise ValueError(f"idea {name!r} is unknown; known are {', '.join(idea.name for idea in IDEAS)}")
    known: dict[tuple[Any, ...], Result] = {}
    rows = []
    for idea in (each for each in IDEAS if not asked or each.name in asked):
        for gpu in chips or idea.gpus:
            progress(f"{idea.name} on {gpu}")
            rows.append(_row(idea, load_gpu(gpu), known))
    return rows


def _row(idea: Idea, gpu: GPU, known: dict[tuple[Any, ...], Result]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "idea": idea.name, "generation": idea.generation, "schedule": idea.schedule, "gpu": gpu.name,
        "shape": idea.attention.label, "with_it": in_words(idea.fields), "without_it": _switched(idea),
        "claim": idea.claim, "source": idea.source,
        "published_times": idea.loses, "reason": None,
    }  # fmt: skip
    if idea.missing:
        return row | {"reason": f"{idea.schedule} has no switch {', '.join(idea.missing)}"}
    base = dict(idea.fields)
    fields = dict(idea.without) if idea.against else base | dict(idea.without)
    try:
        having = _result(known, idea.schedule, base, gpu, idea.attention, idea.clock)
        lacking = _result(known, idea.against or idea.schedule, fields, gpu, idea.problem_without, idea.clock)
    except ValueError as error:
        return row | {"reason": str(error)}
    return row | {
        "with": _side(having), "without": _side(lacking), "times": lacking.ms / having.ms,
        "times_cycles": lacking.cycles / having.cycles, "worth": worth(having, lacking),
    }  # fmt: skip


def in_words(switches: Switches) -> str:
    """As ``--set`` takes them."""
    return ", ".join(f"{name}={str(value).lower()}" for name, value in switches)


def _switched(idea: Idea) -> str:
    if idea.against:
        return idea.against
    changes = [in_words(idea.without)] * bool(idea.without)
    changes += [f"dtype={idea.dtype_without}"] * bool(idea.dtype_without) + ["every block computed"] * idea.unmasked
    return ", ".join(changes)


def _result(
    known: dict[tuple[Any, ...], Result], name: str, fields: dict[str, Any], gpu: GPU, attention: Attention, clock: float | str
) -> Result:
    key = (name, tuple(sorted(fields.items())), gpu.name, attention, clock)
    if key not in known:
        cap = clock if isinstance(clock, str) else min(clock, float(gpu.clock.boost_mhz))  # a chip asked for may boost less
        known[key] = simulate(get_schedule(name, **fields), gpu, attention, clock=cap)
    return known[key]


def _side(result: Result) -> dict[str, Any]:
    return {
        "cycles": result.cycles, "ms": result.ms, "tflops": result.tflops, "clock_mhz": result.clock_mhz,
        **{f"{key}_bytes": _moved(result, key) for key, _ in BYTES},
        "meetings_per_block": meetings(result.launches[-1].program), "idle_sms": result.launches[-1].dispatch.idle_sms,
        "limiter": result.limiter,
    }  # fmt: skip


def _moved(result: Result, key: str) -> int:
    return result.bytes["hbm_read"] + result.bytes["hbm_write"] if key == "hbm" else result.bytes[key]


def meetings(program: Program) -> float:
    """Barriers at which a CTA's warps wait for each other, per K/V block: the role that meets most, in the longest tile."""
    most, names = 0.0, program.tiles.names
    tile = int(program.tiles.values[:, names.index("n_blocks")].argmax()) if "n_blocks" in names else 0
    for role in range(len(program.roles)):
        met = blocks = 0
        for s, _, _ in program.walk(tile, role):
            exchange = s.kind in ("cross_warp", "cross_warp_tile") and s.attrs.get("barrier", True)
            met += s.kind in ("barrier", "named_sync") or exchange
            blocks += bool(s.kind in ("mma", "wgmma", "umma") and s.attrs.get("transpose_b"))
        if blocks:
            most = max(most, met / blocks)
    return most


def worth(having: Result, lacking: Result) -> str:
    """What is lost without it: time, clock where it moves, bytes, meetings, idle SMs, and what binds."""
    time = 100 * (lacking.ms / having.ms - 1)
    words = [f"{time:+.0f} % time" if abs(time) >= 0.5 else "the same time"]
    cycles = 100 * (lacking.cycles / having.cycles - 1)
    if abs(cycles - time) >= 2:
        taken = f"{cycles:+.0f} % cycles" if abs(cycles) >= 0.5 else "the same cycles"
        words[0] += f" ({taken}{'; the power limit gives the rest back' if cycles > time else ''})"
    for key, label in BYTES:
        before, after = _moved(having, key), _moved(lacking, key)
        if before and abs(after / before - 1) >= TELLING:
            words.append(f"{label} bytes {after / before:.2g}x")
    met, meet = (meetings(side.launches[-1].program) for side in (having, lacking))
    if abs(meet - met) >= 0.1:
        words.append(f"{meet:.2g} barriers a block, {met:.2g} with it")
    vector = [side.instructions["fma"] + side.instructions["alu"] + side.instructions["xu"] for side in (having, lacking)]
    if vector[0] and abs(vector[1] / vector[0] - 1) >= TELLING:
        words.append(f"vector instructions {vector[1] / vector[0]:.2g}x")
    idle, left = (side.launches[-1].dispatch.idle_sms for side in (having, lacking))
    if idle != left:
        words.append(f"{left} SMs idle, {idle} with it")
    return "; ".join(words)
