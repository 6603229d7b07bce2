"""What must be set before numpy is imported (tests run in parallel processes, and small products are slower on many threads),
and fixtures of several files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from headless import Page, browsing

if TYPE_CHECKING:
    from flashsim.sim.explore import Row

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# In a fresh checkout some test compiles the engine; what commands print must not depend on which.
logging.getLogger("flashsim.sim.compiled").disabled = True


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Page]:
    """One tab of a headless Chromium; the test is skipped where there is none."""
    with browsing(tmp_path) as page:
        yield page


@pytest.fixture(scope="module")
def grid() -> list[Row]:
    """The rows of ``small_sweeps.GRID``, whatever computes them."""
    from small_sweeps import GRID, rows_of, sweep_of

    return rows_of(sweep_of(*GRID))
