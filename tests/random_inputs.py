"""Inputs that tests of the numpy interpreter share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def normal(*shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(9)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
