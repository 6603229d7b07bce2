"""From activity to clock: two limits set how fast a busy chip may run.

A free-running chip with busy tensor cores stays below its tensor clock, by up to ``tensor_clock_slope_mhz``, even on zeros and
far below the power limit. Then the power limit:

Power = idle + sum of (events a second x energy), where an event's energy scales with voltage squared and the voltage falls
about linearly with the clock between VOLTAGE_FLOOR and 1. The clock is the highest at which power stays under the board's limit.
Energies are per chip (``power`` section), measured on streams of one instruction, never on attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS, Instruction

#: FLOPs of one mma.sync m16n8k16, of one column of a warpgroup product's warp (m16, k16; FP8 counts half of its FLOPs, as the
#: tensor cores' cycles do), and the share of peak from which tensor cores count as busy (GEMM-like work).
MMA_FLOP = 2 * 16 * 8 * 16
COLUMN_FLOP = 2 * 16 * 16
TENSOR_ACTIVE = 0.05


@dataclass(frozen=True, kw_only=True)
class Clock:
    """``mhz`` with the rule that gave it in words, and the power drawn at it by this model."""

    mhz: float
    rule: str
    watts: float


def picojoules(gpu: GPU, counts: Mapping[str, int], bytes_: Mapping[str, int]) -> float:
    """Energy of a launch at boost clock and voltage, from its instruction counts and bytes (smem, l2, hbm)."""
    power = gpu.power
    energy = 0.0
    for name, n in counts.items():
        kind = INSTRUCTIONS[name]
        product = gpu.wgmma or gpu.tcgen05
        if kind.columns and product is not None:
            energy += n * kind.columns * product.pj_per_column
            continue
        if kind.counter == "none":
            continue
        pipe = kind.pipe
        each = power.hmma_pj if pipe == "tensor" else power.ex2_pj if pipe == "mufu" else power.vector_pj
        energy += n * each
    return (
        energy
        + bytes_.get("smem", 0) * power.smem_pj_per_byte
        + bytes_.get("l2_sm", 0) * power.l2_pj_per_byte
        + bytes_.get("hbm", 0) * power.hbm_pj_per_byte
    )


def _flop(kind: Instruction) -> int:
    """Of one instruction on the tensor cores; a warp has 16 rows of its warpgroup's product, a CTA's product has its own."""
    if kind.pipe != "tensor":
        return 0
    return kind.columns * COLUMN_FLOP * max(1, kind.rows // 16) if kind.columns else MMA_FLOP


def voltage(gpu: GPU, mhz: float) -> float:
    """Core voltage relative to boost: a straight line through ``voltage_floor`` at half the boost clock, flat below."""
    floor = float(gpu.power.voltage_floor)
    return max(floor, floor + (1 - floor) * (2 * mhz / gpu.clock.boost_mhz - 1))


def sustained(gpu: GPU, *, cycles: float, counts: Mapping[str, int], bytes_: Mapping[str, int], cap_mhz: float) -> Clock:
    """The clock that a long run of this launch settles at: ``cap_mhz``, or less where tensor activity or power binds first.

    A cap at or below the tensor clock is a set clock, which tensor activity alone does not lower; power does. The rule is told
    behind the clock and names no other, but for a set cap that power holds it below.
    """
    per_cycle = picojoules(gpu, counts, bytes_) / max(1.0, cycles)
    limit = float(gpu.power.limit_w * gpu.power.regulated_share)

    def watts(mhz: float) -> float:
        scale = voltage(gpu, mhz) ** 2
        return float(gpu.power.idle_w + per_cycle * 1e-12 * mhz * 1e6 * scale)

    set_ = cap_mhz != gpu.clock.boost_mhz
    top, rule = cap_mhz, "as capped" if set_ else "the boost clock"
    flops = sum(n * _flop(INSTRUCTIONS[name]) for name, n in counts.items())
    share = flops / max(1.0, cycles) / float(gpu.sm.count * gpu.sm.tensor_flop_per_clk)
    if share > TENSOR_ACTIVE and cap_mhz > gpu.clock.tensor_peak_mhz:
        top = float(gpu.clock.tensor_peak_mhz - share * gpu.power.tensor_clock_slope_mhz)
        rule = f"tensor cores at {100 * share:.0f} % of peak lower a free clock"
    if watts(top) <= limit:
        return Clock(mhz=top, rule=f"{rule}; {watts(top):.0f} of {gpu.power.limit_w:.0f} W", watts=watts(top))
    low, high = 0.2 * top, top
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if watts(middle) <= limit else (low, middle)
    rule = f"power limit {gpu.power.limit_w:.0f} W{f'; cap {cap_mhz:.0f}' if set_ else ''}"
    return Clock(mhz=low, rule=rule, watts=watts(low))
