"""The constraint model of a modulo schedule, for OR-tools' CP-SAT: its interval is a variable, and what is minimised.

Every trip of the loop repeats the schedule of the one before, one interval later: an operation has a start within the interval
and takes its cycles on a circle of that length. What two operations do to each other is linear in the time for which both run:

* a warp and the tensor cores do one operation at a time, as does a queue of memory with the transfers that hold it longest;
* beside a product an operation of a warp runs at the pace of a / b (its cycles alone and beside), and holds the product up;
* two operations of different warps that ask for f > 1 of a unit together run at the pace of 1 / f, as round robin gives it.

So an operation that takes ``a`` alone takes a + v (1 - pace) where v is the time for which it is slowed, and all constraints are
linear but for who comes first. Three warps that want one unit at the same moment are taken pair by pair; over the whole
interval each unit's load is held by its bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from .loop_graph import Edge, LoopGraph
from .operations import Operation

#: Stages that a schedule may have.
STAGES = 8
#: Paces are whole parts of this.
PARTS = 1000
#: The interval is found to this share of itself.
RESOLUTION = 0.002
#: What rounded losses add to an operation at most.
ROUNDING = 1.02
#: A slowdown of less is left out.
NEGLIGIBLE = 0.01
SHARED = ("port", "fma", "alu", "mufu", "lsu", "tensor", "tmem", "smem")


def alone(op: Operation) -> int:
    """Cycles of ``op`` with nothing beside it, whole."""
    return max(1, math.ceil(op.cycles - 1e-6))


def slowed_by_products(op: Operation) -> float:
    """The share of its time beside products that ``op`` loses there."""
    return 1 - op.cycles / op.beside if op.kind in ("vector", "issue") and op.beside > op.cycles else 0.0


def crowding(a: Operation, b: Operation, duty: float) -> float:
    """How much of the unit that both want most they ask for together, 1 where it is enough for both; products run for ``duty``
    of the time."""
    return max([1.0, *(_share(a, unit, duty) + _share(b, unit, duty) for unit in SHARED if unit in a.uses and unit in b.uses)])


def _share(op: Operation, unit: str, duty: float) -> float:
    held = (1 - duty) * op.uses[unit] + duty * op.beside_uses.get(unit, 0.0)
    return min(1.0, held / max(1.0, (1 - duty) * op.cycles + duty * op.beside))


class Model:
    """Schedules of ``graph`` with an interval from ``low`` to ``high``; ``rooms``: most more copies of each buffer."""

    def __init__(self, graph: LoopGraph, low: int, high: int, copies: Mapping[str, int]) -> None:
        from ortools.sat.python import cp_model

        self.model = cp_model.CpModel()
        self.graph, self.low, self.high = graph, low, high
        operations = graph.operations
        self.interval = self.model.new_int_var_from_domain(cp_model.Domain.from_values(_steps(low, high)), "interval")
        self.start = [self.model.new_int_var(0, high - 1, f"start {i}") for i in range(len(operations))]
        self.duty = min(1.0, sum(op.cycles for op in operations if op.kind == "product") / low)
        self.longest = [self._longest(op) for op in operations]
        self.cycles = [self.model.new_int_var(alone(op), most, "") for op, most in zip(operations, self.longest, strict=True)]
        self.stage = [self.model.new_int_var(0, STAGES - 1, f"stage {i}") for i in range(len(operations))]
        self.copies = {name: self.model.new_int_var(0, most, f"copies of {name}") for name, most in copies.items()}
        self.slowed: list[list[tuple[Any, float]]] = [[] for _ in operations]
        self.before: dict[tuple[int, int], Any] = {}
        for start in self.start:
            self.model.add(start < self.interval)
        for e in graph.edges:
            self._dependence(e)
        self._one_at_a_time()
        self._slowdowns()
        self.lead = next((i for i, op in enumerate(operations) if op.kind == "product"), 0)
        self.model.add(self.start[self.lead] == 0)
        self.model.minimize(self.interval)

    def _longest(self, op: Operation) -> int:
        """Cycles that ``op`` takes at most, with the worst beside it all the while."""
        others = self.graph.operations
        if op.kind == "transfer":
            return alone(op)
        if op.kind == "product":
            return min(self.high, alone(op) + math.ceil(sum(other.delay for other in others)))
        worst: dict[str, float] = {}
        for other in others:
            if other.kind in ("vector", "issue") and other.warp != op.warp:
                worst[other.warp] = max(worst.get(other.warp, 0.0), self._lost(op, other))
        left = 1 - slowed_by_products(op) - sum(worst.values())
        return max(alone(op), min(self.high, math.ceil(alone(op) / left * ROUNDING) if left > 0 else self.high))

    def _lost(self, op: Operation, other: Operation) -> float:
        """The share of its time beside ``other`` that ``op`` loses there, less where a product slows it already."""
        return (1 - 1 / crowding(op, other, self.duty)) * (1 - self.duty * slowed_by_products(op))

    def _dependence(self, e: Edge) -> None:
        """``reach`` is the least number of intervals after which ``after`` may begin, for its place in the interval."""
        a, b, lag = e.before, e.after, math.ceil(e.latency - 1e-6)
        length = lag + (0 if e.begun else self.cycles[a])
        furthest = 1 + math.ceil((lag + self.longest[a]) / self.low)
        reached = [self.model.new_bool_var("") for _ in range(furthest + 1)]
        self.model.add_exactly_one(reached)
        for n, literal in enumerate(reached):
            self.model.add(self.start[b] + n * self.interval >= self.start[a] + length).only_enforce_if(literal)
        reach = sum(n * literal for n, literal in enumerate(reached))
        distance = e.distance + self.copies.get(e.buffer, 0)
        self.model.add(self.stage[b] + distance - self.stage[a] >= reach)

    def _one_at_a_time(self) -> None:
        operations = self.graph.operations
        held: dict[str, list[tuple[int, Any]]] = {}
        for i, op in enumerate(operations):
            if op.warp:
                held.setdefault(op.warp, []).append((i, max(1, math.ceil(op.issue)) if op.issue else self.cycles[i]))
            if op.kind == "product":
                held.setdefault("tensor", []).append((i, self.cycles[i]))
            if op.kind == "transfer":
                held.setdefault(op.unit, []).append((i, self.cycles[i]))
        for entries in held.values():
            for (i, a), (j, b) in combinations(entries, 2):
                first = self._first(i, j)
                self.model.add(self.start[j] >= self.start[i] + a).only_enforce_if(first)
                self.model.add(self.start[i] + self.interval >= self.start[j] + b).only_enforce_if(first)
                self.model.add(self.start[i] >= self.start[j] + b).only_enforce_if(~first)
                self.model.add(self.start[j] + self.interval >= self.start[i] + a).only_enforce_if(~first)
            self.model.add(sum(cycles for _, cycles in entries) <= self.interval)

    def _first(self, i: int, j: int) -> Any:
        """Whether ``i`` starts first in the interval."""
        if (j, i) in self.before:
            return ~self.before[j, i]
        if (i, j) not in self.before:
            self.before[i, j] = literal = self.model.new_bool_var(f"{i} before {j}")
            self.model.add(self.start[i] <= self.start[j]).only_enforce_if(literal)
            self.model.add(self.start[i] >= self.start[j]).only_enforce_if(~literal)
        return self.before[i, j]

    # --- what operations do to each other ---

    def _slowdowns(self) -> None:
        operations = self.graph.operations
        products = [i for i, op in enumerate(operations) if op.kind == "product"]
        workers = [i for i, op in enumerate(operations) if op.kind in ("vector", "issue")]
        together: dict[tuple[int, str], list[tuple[int, Any]]] = {}
        for i in workers:
            slow, delay = slowed_by_products(operations[i]), operations[i].delay / max(1.0, operations[i].beside)
            for p in products if max(slow, delay) > NEGLIGIBLE else ():
                both = self._both_run(i, p)
                self.slowed[i].append((both, slow))
                self.slowed[p].append((both, delay))
                together.setdefault((i, "tensor"), []).append((p, both))
        for i, j in combinations(workers, 2):
            crowded = crowding(operations[i], operations[j], self.duty) if operations[i].warp != operations[j].warp else 1.0
            if 1 - 1 / crowded > NEGLIGIBLE:
                both = self._both_run(i, j)
                for each, other in ((i, j), (j, i)):
                    self.slowed[each].append((both, self._lost(operations[each], operations[other])))
                    together.setdefault((each, operations[other].warp), []).append((other, both))
        for i, op in enumerate(operations):
            loss = sum(math.ceil(PARTS * share) * both for both, share in self.slowed[i])
            self.model.add(PARTS * self.cycles[i] >= PARTS * alone(op) + loss)
        for (i, _), others in together.items():  # implied, but seen from afar: what runs one after the other leaves so much free
            busy, both = sum(self.cycles[j] for j, _ in others), sum(both for _, both in others)
            self.model.add(both <= self.cycles[i])
            self.model.add(both >= self.cycles[i] + busy - self.interval)

    def _both_run(self, i: int, j: int) -> Any:
        """Cycles a trip in which both run, at least: what of ``j`` begins within ``i``, and what of ``i`` begins within ``j``."""
        first = self._first(i, j)
        both = self.model.new_int_var(0, min(self.longest[i], self.longest[j]), f"{i} and {j} run")
        self.model.add(both == self._within(i, j, first) + self._within(j, i, ~first))
        return both

    def _within(self, i: int, j: int, first: Any) -> Any:
        """Cycles in which both run from the start of ``j`` on, which begins while ``i`` runs; ``first``: ``i`` starts first."""
        both = self.model.new_int_var(0, min(self.longest[i], self.longest[j]), f"{j} from its start within {i}")
        whole = self.model.new_bool_var(f"{j} ends within {i}")
        end = self.start[i] + self.cycles[i]
        self.model.add(both >= self.cycles[j]).only_enforce_if(whole)
        self.model.add(both >= end - self.start[j]).only_enforce_if(first, ~whole)
        self.model.add(both >= end - self.start[j] - self.interval).only_enforce_if(~first, ~whole)
        return both

    def break_symmetry(self) -> None:
        """Of two tiles that are alike, the second one's lead comes in the first half of the interval."""
        operations = self.graph.operations
        same = [i for i, op in enumerate(operations) if i != self.lead and _alike(op, operations[self.lead])]
        if len(same) == 1:
            self.model.add(2 * self.start[same[0]] <= self.interval)

    def pool(self, sizes: Mapping[str, int], free: int) -> None:
        """More copies of buffers of ``sizes`` must fit in what is free."""
        self.model.add(sum(size * self.copies[name] for name, size in sizes.items()) <= free)

    def begin_at(self, starts: Sequence[int], cycles: Sequence[int]) -> None:
        """Hint at a schedule."""
        for i, (start, length) in enumerate(zip(starts, cycles, strict=True)):
            self.model.add_hint(self.start[i], (start - starts[self.lead]) % self.high)
            self.model.add_hint(self.cycles[i], length)


def _steps(low: int, high: int) -> list[int]:
    """The intervals that are told apart."""
    count = math.ceil(math.log(max(high, low) / low) / math.log1p(RESOLUTION))
    return sorted({min(high, math.ceil(low * (1 + RESOLUTION) ** n)) for n in range(count + 1)})


def _alike(a: Operation, b: Operation) -> bool:
    """Whether ``a`` and ``b`` are the same operation of two tiles."""
    same = [op.name.rstrip("0123456789") for op in (a, b)]
    return a.kind == b.kind and same[0] == same[1] and a.cycles == b.cycles and (a.name != b.name or a.cta != b.cta)
