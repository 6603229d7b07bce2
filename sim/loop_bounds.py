"""What no schedule of a steady loop can beat: its busiest unit, and its longest chain of dependences round the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .loop_graph import Edge, LoopGraph
from .operations import Operation

TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class LoopBounds:
    """Cycles a trip. ``units``: of each unit and each role's warps; ``recurrence``: of the longest chain, whose operations are
    ``chain``. ``plain``: the units as if products slowed nothing beside them."""

    units: Mapping[str, float]
    plain: Mapping[str, float]
    recurrence: float
    chain: tuple[str, ...]

    @property
    def unit(self) -> str:
        return max(self.units, key=lambda name: self.units[name])

    @property
    def resource(self) -> float:
        return self.units[self.unit]

    @property
    def bound(self) -> float:
        return max(self.resource, self.recurrence)


def loop_bounds(graph: LoopGraph, copies: Mapping[str, int] | None = None) -> LoopBounds:
    """``copies``: how many more of a buffer there may be."""
    recurrence, chain = longest_chain(graph, copies or {})
    return LoopBounds(units=unit_loads(graph), plain=unit_loads(graph, slowed=False), recurrence=recurrence, chain=chain)


def unit_loads(graph: LoopGraph, *, slowed: bool = True) -> dict[str, float]:
    """The least interval that each unit allows.

    With products that run by themselves (``slowed``) an operation of a warp holds a unit for w cycles, or for w' where a product
    runs meanwhile, and then holds products up for d. Products take T cycles with nothing to hold them up. Of a unit, work can
    be put beside products until T is full; it goes there in the order of what that saves, and what is left needs time without.
    FMA work holds a product up for less than it would take without one: the tensor cores' least has all of it beside.
    """
    operations = graph.operations
    names = dict.fromkeys(unit for op in operations for unit in op.uses)
    loads = {unit: sum(op.uses.get(unit, 0.0) for op in operations) for unit in names}
    loads |= {warp: _serial(operations, warp) for warp in dict.fromkeys(op.warp for op in operations if op.warp)}
    products = [op for op in operations if op.kind == "product"]
    if not slowed or not products:
        return loads
    own = sum(op.uses.get("tensor", 0.0) for op in products)
    vector = [op for op in operations if op.kind in ("vector", "issue")]
    for unit in ("port", "fma", "alu", "mufu"):
        if unit in loads:
            loads[unit] = _beside([(op.uses.get(unit, 0.0), op.beside_uses.get(unit, 0.0), op.delay) for op in vector], own)
    for warp in dict.fromkeys(op.warp for op in vector):
        loads[warp] = _beside([(op.cycles, op.beside, op.delay) for op in vector if op.warp == warp], own)
    loads["tensor"] += sum(op.delay for op in vector)
    return loads


def _serial(operations: Sequence[Operation], warp: str) -> float:
    return sum(op.issue or op.cycles for op in operations if op.warp == warp)


def _beside(work: Sequence[tuple[float, float, float]], products: float) -> float:
    """The least interval for operations that take (alone, beside a product, holding it up), with ``products`` cycles of these."""
    total, room = 0.0, products
    saved = 0.0
    for alone, beside, delay in sorted(work, key=lambda c: -(c[0] - c[2]) / max(TOLERANCE, c[1] - c[2])):
        total += alone
        if alone <= delay or room <= 0:
            continue
        share = 1.0 if beside <= delay else min(1.0, room / (beside - delay))
        room -= share * (beside - delay)
        saved += share * (alone - delay)
    return max(total, products + total - saved) if room <= TOLERANCE else total


def longest_chain(graph: LoopGraph, copies: Mapping[str, int]) -> tuple[float, tuple[str, ...]]:
    """Cycles a trip of the slowest circle of dependences, and its operations."""
    steps = [(e, e.distance + copies.get(e.buffer, 0), _length(graph, e)) for e in graph.edges]
    interval, chain = 0.0, tuple[str, ...]()
    while True:
        circle = _circle(len(graph.operations), steps, interval)
        if circle is None:
            return interval, chain
        length, distance = sum(s[2] for s in circle), sum(s[1] for s in circle)
        if distance <= 0:
            names = " -> ".join(graph.operations[s[0].before].name for s in circle)
            raise ValueError(f"these operations wait for each other within a trip: {names}")
        better = length / distance
        if better <= interval * (1 + TOLERANCE):
            return interval, chain
        interval, chain = better, tuple(graph.operations[s[0].before].name for s in circle)


def _length(graph: LoopGraph, e: Edge) -> float:
    return e.latency + (0.0 if e.begun else graph.operations[e.before].cycles)


def _circle(
    count: int, steps: Sequence[tuple[Edge, int, float]], interval: float
) -> list[tuple[Edge, int, float]] | None:
    """A circle that takes longer than ``interval`` a trip (Bellman and Ford), or None."""
    reached = [0.0] * count
    came: dict[int, tuple[Edge, int, float]] = {}
    last = -1
    for _ in range(count + 1):
        last = -1
        for step in steps:
            e, distance, length = step
            at = reached[e.before] + length - interval * distance
            if at > reached[e.after] + TOLERANCE:
                reached[e.after], came[e.after], last = at, step, e.after
        if last < 0:
            return None
    for _ in range(count):
        last = came[last][0].before
    circle: list[tuple[Edge, int, float]] = []
    at_node = last
    while True:
        circle.append(came[at_node])
        at_node = came[at_node][0].before
        if at_node == last:
            return circle[::-1]
