"""The shipped schedules, each a frozen dataclass whose fields are its tile and its switches."""

from __future__ import annotations

from typing import Any

from ..named import guess
from ..schedule import Schedule
from .cudnn import CuDNN
from .fa1 import FA1
from .fa2 import FA2
from .fa3 import FA3
from .fa4 import FA4
from .gluon import Gluon
from .standard import Standard
from .triton import Triton

SCHEDULES: dict[str, type[Any]] = {
    "standard": Standard, "fa1": FA1, "fa2": FA2, "fa3": FA3, "fa4": FA4, "triton": Triton, "cudnn": CuDNN,
    "gluon": Gluon,
}  # fmt: skip


def get_schedule(name: str, **fields: Any) -> Schedule:
    """The schedule of that name with ``fields`` set. Raises ValueError with the nearest known name or field."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown{guess(name, SCHEDULES)} Known are {', '.join(SCHEDULES)}")
    cls = SCHEDULES[name]
    for field in fields:
        if field not in cls.__dataclass_fields__:
            known = cls.__dataclass_fields__
            raise ValueError(f"{name} has no field {field!r}{guess(field, known)} Its fields are {', '.join(known)}")
    schedule = cls(**fields)
    assert isinstance(schedule, Schedule)
    return schedule
