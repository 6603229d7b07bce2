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

#: Files whose tests run no engine. In a fresh checkout one process compiles it while another has these to do: of two, the
#: second begins among the first file's many.
ENGINE_FREE = (
    "test_house", "test_sim_hazards_mutation", "test_sim_hazards", "test_sim_hazards_cluster", "test_sim_hazards_small",
    "test_sim_values", "test_sim_values_roles", "test_sim_residency", "test_model_reference", "test_model_lowprecision",
    "test_model_program", "test_model_placement", "test_model_triton", "test_model_fa3", "test_model_tiling", "test_model_gpu",
    "test_model_attention", "test_model_rows", "test_validate_calibrate", "test_validate_sass", "test_validate_waves",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run an engine first, then the others, file by file."""
    rank = {name: 1 + i for i, name in enumerate(ENGINE_FREE)}
    items.sort(key=lambda item: rank.get(item.path.stem, 0))


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
