"""Which shipped schedule runs on which shipped chip: said here by architecture, not asked of the code under test."""

from __future__ import annotations

from functools import cache

from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.schedules import SCHEDULES

#: Schedules whose instructions only some architectures have; every other schedule runs on every chip.
NEEDS: dict[str, frozenset[str]] = {
    "fa3": frozenset({"sm_90"}),  # wgmma
    "fa4": frozenset({"sm_100", "sm_103"}),  # tcgen05
    "gluon": frozenset({"sm_100", "sm_103"}),
}


@cache
def runs_on(schedule: str, gpu: str) -> bool:
    return load_gpu(gpu).architecture in NEEDS.get(schedule, {load_gpu(gpu).architecture})


#: The cross product of schedules and chips, and what it leaves out.
PAIRS = [(schedule, gpu) for schedule in SCHEDULES for gpu in GPUS if runs_on(schedule, gpu)]
REFUSED_PAIRS = [(schedule, gpu) for schedule in SCHEDULES for gpu in GPUS if not runs_on(schedule, gpu)]


def chip_for(schedule: str, preferred: str = "h200") -> str:
    """``preferred`` where it can run the schedule, else the first chip that can."""
    return preferred if runs_on(schedule, preferred) else next(gpu for gpu in GPUS if runs_on(schedule, gpu))
