"""What a sweep's rows say: the best, the Pareto front, how much each field matters, and why candidates were pruned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from .explore import Row, candidate, column, loss
from .space import Value

NUMBER = re.compile(r"\d+(\.\d+)?")
FRONT = ("registers_per_thread", "smem_bytes_per_cta")  # what the Pareto front trades against time


class Swept(Protocol):
    """What rows are rows of: a Sweep, or the record of one in a file."""

    @property
    def objective(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def size(self) -> int: ...

    def identity(self) -> dict[str, Any]: ...


def ranked(objective: str, rows: Sequence[Row]) -> list[Row]:
    """Rows that ran, best first; of equal ones (bound by the host, say) that with fewer cycles, then the first."""
    ran = (row for row in rows if row["status"] == "ok")
    return sorted(ran, key=lambda row: (loss(objective, row), row["cycles"], candidate(row)))


def pareto(objective: str, rows: Sequence[Row]) -> list[Row]:
    """Rows that no other beats in time, registers and SMEM alike; best time first. Of equal ones the first."""
    front: list[Row] = []
    good = sorted(ranked(objective, rows), key=lambda row: (loss(objective, row), *(row[name] for name in FRONT)))
    for row in good:  # whoever could beat it comes before it
        if not any(all(kept[name] <= row[name] for name in FRONT) for kept in front):
            front.append(row)
    return front


def mixture(rows: Sequence[Row]) -> str:
    """A sentence where rows that ran count instructions in different ways, so that their order is not all the tiles' doing."""
    counted = Counter(row["counts_from"] for row in rows if row["status"] == "ok")
    if len(counted) < 2:
        return ""
    shares = ", ".join(f"{n:,} {name}" for name, n in counted.most_common())
    return (
        f"instruction counts are of {len(counted)} kinds ({shares}): only binary ones have all that a compiler adds, others are"
        " some per cent faster for that alone; --set counts=ideal compares all on the algorithm's own, where a schedule has it"
    )


def reasons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Why candidates did not run: sentences that differ in their numbers alone count together, under the first of them."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted((row for row in rows if row["status"] != "ok"), key=candidate):
        reason = row["reason"] or ""
        key = (row["status"], NUMBER.sub("#", reason))
        group = groups.setdefault(key, {"status": row["status"], "count": 0, "reason": reason, "first": candidate(row)})
        group["count"] += 1
    return sorted(groups.values(), key=lambda group: -group["count"])


def sensitivity(sweep: Swept, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each axis the best row of each value, in per cent above the best of all; the axis that matters most first.

    ``spread_pct``: how far the worst value's best row is above the best. Values without a row that ran are left out.
    """
    good = ranked(sweep.objective, rows)
    out = []
    for axis in sweep.names:
        name = column(axis)
        best: dict[tuple[type, Value], Row] = {}
        for row in good:
            best.setdefault((type(row[name]), row[name]), row)
        values = [
            {"value": value, "candidate": candidate(row), "ms": row["ms"], "tflops": row["tflops"],
             "above_best_pct": 100 * (loss(sweep.objective, row) / loss(sweep.objective, good[0]) - 1)}
            for (_, value), row in best.items()
        ]  # fmt: skip
        spread = max((v["above_best_pct"] for v in values), default=0.0)
        out.append({"axis": axis, "spread_pct": spread, "values": values})
    return sorted(out, key=lambda entry: -entry["spread_pct"])


def heat_map(sweep: Swept, rows: Sequence[Row], x: str, y: str) -> dict[str, Any]:
    """The best row of each pair of values of two axes, in per cent above the best of all (None: nothing ran there).

    ``cells[j][i]`` belongs to ``ys[j]`` and ``xs[i]``; only values that have rows appear, in the order of their axis.
    """
    cx, cy = column(x), column(y)
    best: dict[tuple[str, str], float] = {}
    good = ranked(sweep.objective, rows)
    for row in good:
        above = 100 * (loss(sweep.objective, row) / loss(sweep.objective, good[0]) - 1)
        best.setdefault((_key(row[cx]), _key(row[cy])), above)
    xs, ys = _order(rows, cx), _order(rows, cy)
    cells = [[best.get((_key(vx), _key(vy))) for vx in xs] for vy in ys]
    return {"x": x, "y": y, "xs": xs, "ys": ys, "cells": cells}


def _key(value: Value) -> str:
    return f"{type(value).__name__} {value!r}"


def _order(rows: Sequence[Row], name: str) -> list[Value]:
    """The values of a column: numbers by size, others as they come."""
    values = list({_key(row[name]): row[name] for row in sorted(rows, key=candidate)}.values())
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        values.sort()
    return values


def two_axes(sweep: Swept, rows: Sequence[Row], most: int) -> tuple[str, str] | None:
    """The two axes that matter most among those with at most ``most`` values in the rows; None where there are no two."""
    names = [e["axis"] for e in sensitivity(sweep, rows) if 1 < len(_order(rows, column(e["axis"]))) <= most]
    return (names[0], names[1]) if len(names) > 1 else None


def report(sweep: Swept, rows: Sequence[Row], *, planned: int, objective: str | None = None) -> dict[str, Any]:
    """Everything above in one dict, for tables and ``--json``. Candidates in ``top`` and ``pareto`` are whole rows."""
    objective = objective or sweep.objective
    rows = sorted(rows, key=candidate)
    good = ranked(objective, rows)
    counts: Mapping[str, int] = {status: sum(row["status"] == status for row in rows) for status in ("ok", "pruned", "failed")}
    return {
        **sweep.identity(),
        "objective": objective,
        "space": sweep.size,
        "planned": planned,
        "evaluated": len(rows),
        **counts,
        "best": good[0] if good else None,
        "pareto": pareto(objective, rows),
        "sensitivity": sensitivity(sweep, rows),
        "reasons": reasons(rows),
        "mixture": mixture(rows),
        "rows": rows,
    }
