"""flashsim: a simulation-first hardware model of attention kernels.

    from flashsim import Attention, get_schedule, load_gpu, simulate
    problem = Attention(batch=4, heads_q=16, seqlen_q=4096, head_dim=128)
    result = simulate(get_schedule("fa2"), load_gpu("h100"), problem)

Names are looked up on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .model.attention import Attention
    from .model.gpu import GPU, load_gpu
    from .model.schedules import SCHEDULES, get_schedule
    from .sim.predict import Result, simulate

__all__ = ["GPU", "SCHEDULES", "Attention", "Result", "get_schedule", "load_gpu", "simulate"]

_HOME = {
    "Attention": "model.attention", "GPU": "model.gpu", "load_gpu": "model.gpu", "SCHEDULES": "model.schedules",
    "get_schedule": "model.schedules", "Result": "sim.predict", "simulate": "sim.predict",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"flashsim has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
