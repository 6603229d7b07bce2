"""From activity to clock: what a busy chip's clock is, and what two limits leave of it.

A chip has a clock that its driver asks for and reports, and a slower one that its SMs run at: while tensor cores work, the clock
generator stretches cycles, and SMs run at ``tensor_stretch`` of what was asked for, whatever power and data are. Voltage goes
with the clock asked for. A set clock caps the one that SMs run at: stretching was measured where the driver is free to choose,
and published times at a set clock agree with SMs at that clock. No chip runs busy tensor cores above ``tensor_stretch`` of its
boost clock, nor above the clock of its datasheet's tensor peak.

Power = rest + events a second x energy + bytes beyond the SMs a second x energy. An event's energy scales with voltage squared,
and the voltage falls about linearly with the clock asked for, from 1 at boost through ``voltage_floor`` at half of it; L2 and HBM
have their own supply. The clock is the highest at which power stays under what the board's regulator holds.

The regulator takes some tens of milliseconds: for the first ``hold_ms`` after a rest only what the SMs' own supply gives holds a
load back (``peak_core_w``). A benchmark that rests, launches a kernel some times and takes the mean sees both (``repeats``).
Energies are measured on streams of one instruction, never on attention (``power`` sections of the chip files).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS, Instruction, Path

#: FLOPs of one mma.sync m16n8k16, of one column of a warpgroup product's warp (m16, k16; FP8 counts half of its FLOPs, as the
#: tensor cores' cycles do), and the share of peak from which tensor cores count as busy (GEMM-like work).
MMA_FLOP = 2 * 16 * 8 * 16
COLUMN_FLOP = 2 * 16 * 16
TENSOR_ACTIVE = 0.05


@dataclass(frozen=True, kw_only=True)
class Clock:
    """``mhz`` of the SMs with the rule that gave it in words, and the power drawn at it by this model once it has settled."""

    mhz: float
    rule: str
    watts: float


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Picojoules of a launch: of events on the SMs at boost voltage, and of bytes beyond the SMs, at any clock."""

    core: float
    memory: float


def picojoules(gpu: GPU, counts: Mapping[str, int], bytes_: Mapping[str, int], *, fp16: bool = False) -> Energy:
    """Energy of a launch from its instruction counts and bytes (l2_sm, hbm); what comes from L2 lands in an SM's memory.

    ``fp16``: whether what products of 16-bit numbers multiply is FP16, whose longer mantissas cost more than BF16's.
    """
    power = gpu.power
    each_of = {"tensor": power.hmma_fp16_pj if fp16 else power.hmma_pj, "mufu": power.ex2_pj}
    core = bytes_.get("l2_sm", 0) * float(power.smem_write_pj_per_byte)
    for name, n in counts.items():
        kind = INSTRUCTIONS[name]
        if kind.path != Path.GLOBAL_TO_SMEM:
            core += n * kind.smem_bytes * float(power.smem_pj_per_byte)
        product = gpu.wgmma or gpu.tcgen05
        if kind.columns and product is not None:
            sixteen = product.pj_per_column_fp16 if fp16 else product.pj_per_column
            core += n * kind.columns * float(product.pj_per_column_fp8 if kind.fp8 else sixteen)
            continue
        if kind.counter == "none":
            continue
        core += n * float(each_of.get(kind.pipe, power.vector_pj))
    memory = bytes_.get("l2_sm", 0) * float(power.l2_pj_per_byte) + bytes_.get("hbm", 0) * float(power.hbm_pj_per_byte)
    return Energy(core=core, memory=memory)


def _flop(kind: Instruction) -> int:
    """Of one instruction on the tensor cores; a warp has 16 rows of its warpgroup's product, a CTA's product has its own."""
    if kind.pipe != "tensor":
        return 0
    return kind.columns * COLUMN_FLOP * max(1, kind.rows // 16) if kind.columns else MMA_FLOP


def voltage(gpu: GPU, mhz: float) -> float:
    """Core voltage relative to boost at a clock asked for: a line through ``voltage_floor`` at half of boost, flat below."""
    floor = float(gpu.power.voltage_floor)
    return max(floor, floor + (1 - floor) * (2 * mhz / gpu.clock.boost_mhz - 1))


def tensor_share(gpu: GPU, *, cycles: float, counts: Mapping[str, int]) -> float:
    """What the launch uses of the tensor cores' peak."""
    flops = sum(n * _flop(INSTRUCTIONS[name]) for name, n in counts.items())
    return flops / max(1.0, cycles) / float(gpu.sm.count * gpu.sm.tensor_flop_per_clk)


def _ceiling(gpu: GPU, cap_mhz: float, *, tensor: bool) -> tuple[float, float]:
    """The highest clock to ask for, and the share of it at which the SMs run, while tensor cores work or do not."""
    if not tensor:
        return cap_mhz, 1.0
    slower = float(gpu.power.tensor_stretch)
    return min(float(gpu.clock.boost_mhz), min(cap_mhz, float(gpu.clock.tensor_peak_mhz)) / slower), slower


def highest_mhz(gpu: GPU, cap_mhz: float, *, tensor: bool) -> float:
    """The highest clock of the SMs under this cap, whatever the power, while tensor cores work or do not."""
    asked, slower = _ceiling(gpu, cap_mhz, tensor=tensor)
    return min(cap_mhz, asked * slower)


def sustained(
    gpu: GPU,
    *,
    cycles: float,
    counts: Mapping[str, int],
    bytes_: Mapping[str, int],
    cap_mhz: float,
    repeats: int = 0,
    flush_bytes: int = 0,
    fp16: bool = False,
) -> Clock:
    """The SMs' clock in this launch, over and over: ``cap_mhz`` at most, and less where power binds. ``fp16``: its numbers are.

    ``repeats``: how many follow a rest, the mean over which is wanted; 0: as many as it takes to settle. ``flush_bytes``: what is
    written to HBM before each launch to empty L2, zeros, which draw less than most kernels and so leave them more. The rule is
    told behind the clock and names no other, but for a set cap, and for what a load that has not settled began and ended at.
    """
    energy = picojoules(gpu, counts, bytes_, fp16=fp16)
    limit = float(gpu.power.limit_w * gpu.power.regulated_share)
    set_ = cap_mhz != gpu.clock.boost_mhz
    cap, slower = _ceiling(gpu, cap_mhz, tensor=tensor_share(gpu, cycles=cycles, counts=counts) > TENSOR_ACTIVE)
    rule = "as capped" if set_ else "the boost clock"
    if cap * slower < cap_mhz:
        rule = f"tensor cores stretch cycles{f'; cap {cap_mhz:.0f}' if set_ else ''}"

    def core_watts(asked: float) -> float:
        return energy.core * voltage(gpu, asked) ** 2 / max(1.0, cycles) * asked * slower * 1e-6

    flush_us = flush_bytes / float(gpu.hbm.write_bytes_per_s) * 1e6
    memory = energy.memory + flush_bytes * float(gpu.power.zero_fill_pj_per_byte)

    def watts(asked: float) -> float:
        launch_us = max(1.0, cycles) / (asked * slower)
        share = launch_us / (launch_us + flush_us)
        return float(gpu.power.idle_w) + core_watts(asked) * share + memory * 1e-6 / (launch_us + flush_us)

    if watts(cap) <= limit:
        drawn = watts(cap)
        return Clock(mhz=min(cap_mhz, cap * slower), rule=f"{rule}; {drawn:.0f} of {gpu.power.limit_w:.0f} W", watts=drawn)
    asked = _highest(watts, limit, cap)
    mhz, rule = asked * slower, f"power limit {gpu.power.limit_w:.0f} W{f'; cap {cap_mhz:.0f}' if set_ else ''}"
    if repeats:
        first = _highest(core_watts, float(gpu.power.peak_core_w), cap) * slower
        rule += f"; {repeats} launches after a rest, {first:.0f} falling to {mhz:.0f}"
        mhz = _mean(gpu, first=first, settled=mhz, cycles=repeats * cycles)
    return Clock(mhz=mhz, rule=rule, watts=watts(asked))


def _highest(watts: Callable[[float], float], limit: float, cap_mhz: float) -> float:
    """The highest clock to ask for, ``cap_mhz`` at most, whose ``watts`` stay within ``limit``."""
    if watts(cap_mhz) <= limit:
        return cap_mhz
    low, high = 0.1 * cap_mhz, cap_mhz
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if watts(middle) <= limit else (low, middle)
    return low


def _mean(gpu: GPU, *, first: float, settled: float, cycles: float) -> float:
    """Mean clock of a load of so many cycles that runs at ``first`` until the regulator has seen it."""
    early = min(cycles, float(gpu.power.hold_ms) * first * 1e3)
    return cycles / (early / first + (cycles - early) / settled)
