"""A loop's operations with chains of one warp taken as one: fewer operations to place, and no schedule worth having is lost.

Two operations that a warp does one after the other become one where nothing outside needs the first before the second is done,
and nothing outside keeps the second waiting once the first may begin. Short issues join what their warp does next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from .loop_graph import Edge, LoopGraph
from .operations import Operation

SHARE = re.compile(r"(?P<op>.+) (?P<from>\d+)-(?P<to>\d+) %")
#: An issue of less than this share of its warp's work joins the operation after it, whatever waits for that.
SHORT = 0.03


def coarse(graph: LoopGraph) -> LoopGraph:
    """``graph`` with its chains merged."""
    while (pair := _mergeable(graph)) is not None:
        graph = _merged(graph, *pair)
    return graph


def _mergeable(graph: LoopGraph) -> tuple[int, int] | None:
    operations = graph.operations
    warps: dict[str, list[int]] = {}
    for i, op in enumerate(operations):
        if op.kind in ("vector", "issue"):
            warps.setdefault(op.warp, []).append(i)
    for mine in warps.values():
        work = sum(operations[i].cycles for i in mine)
        for i, j in zip(mine, mine[1:], strict=False):
            if operations[j].kind == "vector" and (_chain(graph, i, j) or _short_issue(graph, i, work)):
                return i, j
    return None


def _chain(graph: LoopGraph, i: int, j: int) -> bool:
    """Whether ``j`` follows ``i`` and only ``j`` lets others go on, only ``i`` waits for them."""
    if graph.operations[i].kind != "vector" or not any((e.before, e.after, e.distance) == (i, j, 0) for e in graph.edges):
        return False
    warp = graph.operations[i].warp

    def outside(k: int) -> bool:
        return graph.operations[k].warp != warp

    def asked(before: int, after: int, e: Edge) -> bool:
        """Whether another edge asks for as much as ``e`` does."""
        return any(
            (f.before, f.after) == (before, after) and f.distance <= e.distance and f.latency >= e.latency for f in graph.edges
        )

    gives = [e for e in graph.edges if e.before == i and e.after != j and outside(e.after)]
    waits = [e for e in graph.edges if e.after == j and e.before != i and outside(e.before)]
    return all(not e.begun and asked(j, e.after, e) for e in gives) and all(asked(e.before, i, e) for e in waits)


def _short_issue(graph: LoopGraph, i: int, work: float) -> bool:
    op = graph.operations[i]
    moves = any(e.begun and e.before == i and graph.operations[e.after].kind == "transfer" for e in graph.edges)
    return op.kind == "issue" and moves and op.cycles < SHORT * work


def _merged(graph: LoopGraph, i: int, j: int) -> LoopGraph:
    """``j`` joins ``i``, which keeps its place."""
    operations = list(graph.operations)
    operations[i] = _joined(operations[i], operations[j])
    del operations[j]

    def number(k: int) -> int:
        return i if k == j else k - (k > j)

    edges: dict[tuple[int, int, str, bool], Edge] = {}
    for e in graph.edges:
        moved = replace(e, before=number(e.before), after=number(e.after))
        if moved.before == moved.after and moved.latency <= 0 and e.before != e.after:
            continue  # one after the other in the chain, or a trip later
        key = (moved.before, moved.after, e.buffer, e.begun)
        known = edges.get(key)
        if known is None or (moved.distance, -moved.latency) < (known.distance, -known.latency):
            edges[key] = moved
    return LoopGraph(operations=tuple(operations), edges=tuple(edges.values()))


def _joined(a: Operation, b: Operation) -> Operation:
    first = a if a.cycles >= b.cycles else b
    name = _names(a.name, b.name) if a.kind == "vector" else b.name
    return replace(
        first, name=name, kind="vector", statements=(*a.statements, *b.statements), cycles=a.cycles + b.cycles,
        uses=_sum(a.uses, b.uses), beside=a.beside + b.beside, beside_uses=_sum(a.beside_uses, b.beside_uses),
        delay=a.delay + b.delay,
    )  # fmt: skip


def _names(a: str, b: str) -> str:
    """Both names; where one goes on with columns that the other left, as one."""
    parts, more = a.split(" + "), b.split(" + ")
    last, following = SHARE.fullmatch(parts[-1]), SHARE.fullmatch(more[0])
    if last and following and (last["op"], last["to"]) == (following["op"], following["from"]):
        parts[-1], more = f"{last['op']} {last['from']}-{following['to']} %", more[1:]
    return " + ".join([*parts, *more])


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {unit: a.get(unit, 0.0) + b.get(unit, 0.0) for unit in (*a, *(u for u in b if u not in a))}


