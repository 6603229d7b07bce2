"""What a published number's source tells of its benchmark: which build, which arrays, how many launches after a rest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..model.schedules.fa3_tiles import TILES_2024

#: Sources that timed the flash-attn package; others are taken to have timed PyTorch's FlashAttention-2.
PACKAGE_SOURCE = re.compile(r"FA[1-4] (paper|blog|chart|README)")
#: The FA1 paper's tables of one attention call "on random vectors for Q, K, and V" (its appendix E.6): taken to be three arrays
#: (batch, row, head, dim), which eager attention copies and FA1 packs.
TABLES_OF_ARRAYS = re.compile(r"FA1 paper Table (9|1\d|20)\b")
LAYOUT_OF_ARRAYS = {"standard": "rows", "fa1": "separate"}
#: Sources -> launches after a rest whose mean they print. FA3: "repeat the benchmarks 100 times and take the average timing"
#: (paper, appendix on system and libraries); its released benchmark sleeps a second before each case.
REPEATS = ((re.compile(r"FA3 (paper|blog|chart)"), 100),)

#: triton.testing.do_bench writes 256 MiB before each launch, so that no launch finds its operands in L2.
DO_BENCH_FLUSH = 256 << 20


def first_fa3(head_dim: str, *, fp8: bool, causal: bool) -> dict[str, Any]:
    """Switches of FA3 as of July 2024, the time of its paper: that build where its kernel was read, else none in particular; FP8
    without persistent CTAs (section 4.1, footnote)."""
    _, with_mask, without = TILES_2024.get((int(head_dim) if head_dim.isdigit() else 0, fp8), (0, None, None))
    build = {"build": "2024-07"} if (with_mask if causal else without) else {}
    return build | ({"persistent": False} if fp8 else {})


def repeats_of(source: str) -> int:
    """Launches after a rest that a number of this source is the mean of; 0 where it is not known, for a load that has settled."""
    return next((repeats for pattern, repeats in REPEATS if pattern.match(source)), 0)


def repeats_in(cells: Mapping[str, str]) -> int:
    """The same for a row of a CSV file: its own column ``repeats`` goes first, and a profiler's cycles are of one launch.

    Raises ValueError where the column is no count.
    """
    told = cells.get("repeats")
    if not told:
        return 1 if cells.get("cycles") else repeats_of(cells.get("source") or "")
    if not told.isdigit():
        raise ValueError(f"repeats is {told!r}; it must be a whole number of launches, 0 for a load that has settled")
    return int(told)


def flush_in(cells: Mapping[str, str]) -> int:
    """Bytes that the benchmark of a row wrote to HBM before each launch, which it then timed by events around it; its note names
    do_bench, or nothing is known: a profiler's cycles and a loop's time are those of a launch in a stream without gaps."""
    return DO_BENCH_FLUSH if "do_bench" in (cells.get("note") or "") else 0


def clock_in(measured: Mapping[str, float | None]) -> float | None:
    """MHz of a row whose profiler tells both its cycles and its time in ns; None where one is blank."""
    cycles, ns = measured.get("cycles"), measured.get("time_ns")
    return 1e3 * cycles / ns if cycles and ns else None
