"""How long a simulation will take, from one of a small part of it on this machine: ``forecast(schedule, gpu, attention)``.

SM scope simulates the SM that works longest, so its cost grows with the chip's own time: a batch that a chip works on for minutes
takes hours here.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.schedule import Schedule, check_size
from .predict import peak_flops, simulate

LONG_CHIP_MS = 40.0  # at the tensor peak: some 20 s of simulation
PROBE_CHIP_MS = 0.5


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """``seconds``: of the simulation, None where no part of the problem is small; ``chip_ms``: of the chip, at its peak."""

    seconds: float | None
    chip_ms: float

    @property
    def sentence(self) -> str:
        chip = f"the chip itself would work {self.chip_ms / 1e3:,.2g} s or longer"
        if self.seconds is None:
            return f"this simulation is long: {chip} on one head"
        return f"this simulation takes about {duration(self.seconds)}: {chip}; a smaller batch has nearly the same TFLOP/s"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, in two digits."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.2g} {unit}" if seconds < 100 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"


def forecast(schedule: Schedule, gpu: GPU, attention: Attention) -> Forecast | None:
    """None where the simulation is short. Else the time of a problem of fewer sequences or heads, times what was left out.

    Raises ValueError, as ``simulate`` does, where the schedule cannot run.
    """
    check_size(attention)
    chip_ms = 1e3 * attention.flops() / peak_flops(gpu, float(gpu.clock.boost_mhz))
    if chip_ms < LONG_CHIP_MS:
        return None
    group = attention.heads_q // attention.heads_kv
    share = PROBE_CHIP_MS / chip_ms
    batch = max(1, round(attention.batch * share))
    heads = max(1, min(attention.heads_kv, round(attention.batch * attention.heads_kv * share / batch)))
    times = attention.batch * attention.heads_kv / (batch * heads)
    if times < 2 or chip_ms / times > LONG_CHIP_MS:
        return Forecast(seconds=None, chip_ms=chip_ms)
    small = dataclasses.replace(attention, batch=batch, heads_q=heads * group, heads_kv=heads)
    simulate(schedule, gpu, small)  # the engine is loaded, or compiled
    began = time.perf_counter()
    simulate(schedule, gpu, small)
    return Forecast(seconds=times * (time.perf_counter() - began), chip_ms=chip_ms)
