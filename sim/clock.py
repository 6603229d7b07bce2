"""From activity to clock: the power limit sets how fast a busy chip may run.

Power = idle + sum of (events a second x energy), where an event's energy scales with voltage squared and the voltage falls
about linearly with the clock between VOLTAGE_FLOOR and 1. The clock is the highest at which power stays under the board's limit.
Energies are per chip (``power`` section), measured on streams of one instruction, never on attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS


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
        pipe = INSTRUCTIONS[name].pipe
        each = power.hmma_pj if pipe == "tensor" else power.ex2_pj if pipe == "mufu" else power.vector_pj
        energy += n * each
    return (
        energy
        + bytes_.get("smem", 0) * power.smem_pj_per_byte
        + bytes_.get("l2", 0) * power.l2_pj_per_byte
        + bytes_.get("hbm", 0) * power.hbm_pj_per_byte
    )


def voltage(gpu: GPU, mhz: float) -> float:
    """Core voltage relative to boost: a straight line through ``voltage_floor`` at half the boost clock, flat below."""
    floor = float(gpu.power.voltage_floor)
    return max(floor, floor + (1 - floor) * (2 * mhz / gpu.clock.boost_mhz - 1))


def sustained(gpu: GPU, *, cycles: float, counts: Mapping[str, int], bytes_: Mapping[str, int], cap_mhz: float) -> Clock:
    """The clock that a long run of this launch settles at: ``cap_mhz``, or less where the power limit binds first."""
    per_cycle = picojoules(gpu, counts, bytes_) / max(1.0, cycles)

    def watts(mhz: float) -> float:
        scale = voltage(gpu, mhz) ** 2
        clocked = gpu.power.clock_w * (mhz / gpu.clock.boost_mhz) * scale
        return float(gpu.power.idle_w + clocked + per_cycle * 1e-12 * mhz * 1e6 * scale)

    if watts(cap_mhz) <= gpu.power.limit_w:
        return Clock(mhz=cap_mhz, rule=f"cap {cap_mhz:.0f} MHz, power limit not reached", watts=watts(cap_mhz))
    low, high = 0.2 * cap_mhz, cap_mhz
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if watts(middle) <= gpu.power.limit_w else (low, middle)
    return Clock(mhz=low, rule=f"power limit {gpu.power.limit_w:.0f} W under a cap of {cap_mhz:.0f} MHz", watts=watts(low))
