"""The steady loop as priced operations: what each holds of which unit, and which waits for which.

Costs are the engines' (``engine.bundle_table``), read off the rows of the Program's code. Statements whose instructions a compiler
mixed share the time of their stretch of code (what lies between two ordering ops or products) in proportion to what each would
take by itself, so that a role's operations sum to what the engine lets it issue. Instructions of ordering ops go with the
operation after them. An asynchronous statement is two operations: its issue by the warp, and the product or the transfer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..model.gpu import GPU
from ..model.instructions import PIPES, Path
from ..model.ops import OPS
from ..model.program import Buffer, Opcode, Program, Statement
from ..model.rows import ARG, BUNDLE, BYTES, COUNT, JUMP, OPCODE, STATEMENT, TENSOR
from .dependence import PRODUCTS as MATRIX
from .dependence import Dependence, Loop
from .engine import (
    DELAY,
    FIRST_BESIDE,
    FIRST_PIPE,
    GAP,
    GAP_BESIDE,
    HBM_LATENCY,
    HBM_RATE,
    L2_LATENCY,
    L2_RATE,
    MBARRIER,
    PATH,
    PORT,
    PORT_BESIDE,
    PRODUCT,
    RESULT,
    SMEM,
    SMEM_LATENCY,
    TICKS_PER_CYCLE,
    TMA,
    TMEM,
    Job,
    bundle_table,
)
from .hazard_ops import ORDERING, STRUCTURE

TENSOR_PIPE = PIPES.index("tensor")
TRANSFERS = (Path.GLOBAL_LOAD, Path.GLOBAL_TO_SMEM, Path.GLOBAL_STORE, Path.TMA_LOAD, Path.TMA_STORE)
PRODUCTS = (Path.WGMMA, Path.TCGEN05)
#: A statement that takes less of its stretch than this joins the one before it whatever waits for it.
TINY = 0.03
MILLION = 1_000_000

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one CTA's trip. ``cycles``: of its warp, or of its unit if it runs by itself (``kind`` "product", "transfer").

    ``uses``: cycles that it holds each unit (of a sub-partition; ``smem``, ``l2`` and a CTA's products: of the SM). ``beside`` and
    ``beside_uses``: the same where a product runs all the while. ``delay``: cycles that it then holds products up. ``issue``: cycles
    of its warp, for a product or transfer whose warp does nothing else; otherwise its issue is an operation of its own.
    """

    name: str
    role: str
    cta: int
    kind: str
    statements: tuple[int, ...]
    cycles: float
    uses: Mapping[str, float]
    beside: float
    beside_uses: Mapping[str, float]
    delay: float = 0.0
    issue: float = 0.0

    @property
    def warp(self) -> str:
        """The warps that run it, as a unit that does one operation at a time; none for what runs by itself."""
        return f"{self.role}.{self.cta}" if self.kind in ("vector", "issue") or self.issue else ""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Operation ``after`` of trip i + ``distance`` begins at least ``latency`` cycles after ``before`` of trip i has ended
    (``begun``: has begun). One more copy of ``buffer`` makes the distance one more."""

    before: int
    after: int
    distance: int
    latency: float
    buffer: str = ""
    begun: bool = False


@dataclass(frozen=True, kw_only=True)
class LoopGraph:
    """All CTAs of an SM: their operations and what waits for what."""

    operations: tuple[Operation, ...]
    edges: tuple[Edge, ...]


def loop_graph(
    program: Program, gpu: GPU, job: Job, loops: Sequence[Loop], depends: Sequence[Dependence], skipped: Collection[int], ctas: int
) -> LoopGraph:
    """The priced graph of ``ctas`` CTAs on one SM; statements that the steady loop leaves out are ``skipped``."""
    pricing = _Pricing(program, gpu, job, depends, skipped)
    operations: list[Operation] = []
    for loop in loops:
        operations += pricing.role(loop)
    edges = _edges(program, job, operations, depends)
    count = len(operations)
    return LoopGraph(
        operations=tuple(replace(op, cta=cta) for cta in range(ctas) for op in operations),
        edges=tuple(
            replace(e, before=e.before + cta * count, after=e.after + cta * count, buffer=f"{e.buffer}.{cta}" if e.buffer else "")
            for cta in range(ctas)
            for e in edges
        ),
    )


# --- prices ---


class _Pricing:
    """Turns the code rows of a role's loop into operations."""

    def __init__(
        self, program: Program, gpu: GPU, job: Job, depends: Sequence[Dependence], skipped: Collection[int]
    ) -> None:
        self.program, self.gpu, self.job, self.skipped = program, gpu, job, skipped
        self.table = job.bundles.astype(np.float64) / TICKS_PER_CYCLE
        self.paths = job.bundles[:, PATH]
        self.buffers = {b.name: b for b in program.buffers}
        starts = {int(row[STATEMENT]): pc for pc, row in enumerate(program.code) if row[OPCODE] == Opcode.LOOP}
        self.starts = starts
        moved = {int(row[STATEMENT]) for row in program.code if row[OPCODE] == Opcode.ISSUE and self._runs(int(row[BUNDLE]))}
        self.asynchronous = moved
        role = [s.role for s in program.statements]
        def outside(i: int, j: int) -> bool:
            return program.statements[j].kind in MATRIX or j in moved or role[i] != role[j]

        self.sources = {i: {(d.before, d.distance) for d in depends if d.after == i and outside(i, d.before)} for i in range(len(role))}
        self.sinks = {d.before for d in depends if outside(d.before, d.after) and not d.buffer}

    def _runs(self, bundle: int) -> bool:
        return int(self.paths[bundle]) in (*TRANSFERS, *PRODUCTS)

    def role(self, loop: Loop) -> list[Operation]:
        costs = self._costs(loop)

        def multiplies(i: int) -> bool:  # by itself, and not mixed into the code before it
            return self.program.statements[i].kind == "mma" and bool(costs[i].any())

        out: list[Operation] = []
        carried = np.zeros(self.table.shape[1])
        stretch: list[int] = []
        held = np.zeros_like(carried)
        for i in range(loop.start + 1, loop.end):
            kind = self.program.statements[i].kind
            if i in self.skipped or kind in STRUCTURE:
                continue
            if i in self.asynchronous or kind in ORDERING or (stretch and multiplies(i) != multiplies(stretch[-1])):
                if stretch:
                    out += self._stretch(loop, stretch, held + carried)
                    stretch, held, carried = [], np.zeros_like(carried), np.zeros_like(carried)
            if i in self.asynchronous:
                out += self._asynchronous(loop, i, costs[i] + carried)
                carried = np.zeros_like(carried)
            elif kind in ORDERING:
                carried = carried + costs[i]
            else:
                stretch.append(i)
                held = held + costs[i]
        if stretch:
            out += self._stretch(loop, stretch, held + carried)
        return self._own_warp(out)

    def _costs(self, loop: Loop) -> dict[int, Array]:
        """Per statement of the loop the sums of its rows' costs; GAP holds also what its warp waits for its own results."""
        width = self.table.shape[1]
        costs = {i: np.zeros(width) for i in range(loop.start, loop.end + 1)}
        pc = self.starts[loop.start]
        since = np.zeros(width)  # since the warp last waited for a result
        last = np.zeros(width)
        boards: dict[int, float] = {}
        passed = 0.0
        for row in self.program.code[pc + 1 : int(self.program.code[pc][JUMP])]:
            own, op, waited = costs[int(row[STATEMENT])], row[OPCODE], 0.0
            if op == Opcode.ISSUE:
                last = self.table[row[BUNDLE]]
                own += last * row[COUNT]
                since = since + last * row[COUNT]
                passed += float(last[GAP]) * int(row[COUNT])
                if row[ARG] >= 0:
                    boards[int(row[ARG])] = passed
            elif op == Opcode.DEPEND:
                waited = float(last[RESULT] - last[GAP])
                if since[FIRST_PIPE + TMEM] and self.gpu.tmem is not None:
                    waited = max(waited, float(since[FIRST_PIPE + TMEM] + self.gpu.tmem.latency_cycles - since[GAP]))
                since = np.zeros(width)
            elif op == Opcode.WAIT_SCOREBOARD and int(row[ARG]) in boards:
                waited = float(self.job.latency[SMEM_LATENCY]) / TICKS_PER_CYCLE - (passed - boards[int(row[ARG])])
            if waited > 0:
                own[[GAP, GAP_BESIDE]] += waited
                passed += waited
        return costs

    def _stretch(self, loop: Loop, statements: Sequence[int], cost: Array) -> Iterable[Operation]:
        """Share ``cost`` out among ``statements`` by the time that each would take alone."""
        own = np.array([self._alone(self.program.statements[i], loop) for i in statements])
        total = own.sum()
        parts = own / total if total else np.full(len(own), 1 / len(own))
        groups: list[tuple[list[int], float]] = []
        for i, part in zip(statements, parts, strict=True):
            if groups and (part < TINY or self._joins(groups[-1][0], i)):
                groups[-1] = ([*groups[-1][0], i], groups[-1][1] + part)
            else:
                groups.append(([i], part))
        for inside, part in groups:
            yield self._operation(loop, inside, "vector", cost * part)

    def _joins(self, inside: Sequence[int], i: int) -> bool:
        """Whether ``i`` waits for nothing outside that those before it do not wait for, and nothing outside waits for them alone."""
        before = set().union(*(self.sources[j] for j in inside))
        return self.sources[i] <= before and not any(j in self.sinks for j in inside if self.program.statements[j].writes)

    def _alone(self, s: Statement, loop: Loop) -> float:
        counts = ideal_counts(s, self.buffers, self.program.roles[loop.role].warps)
        if not counts:
            return 0.0
        table = bundle_table(replace(self.program, bundles=(tuple(counts.items()),)), self.gpu)
        moved = float(table[0, FIRST_PIPE + TMEM]) / TICKS_PER_CYCLE
        waited = moved + float(self.gpu.tmem.latency_cycles) if moved and self.gpu.tmem is not None else 0.0
        return max(float(table[0, GAP]) / TICKS_PER_CYCLE, waited)

    def _operation(self, loop: Loop, statements: Sequence[int], kind: str, cost: Array) -> Operation:
        warps = self.program.roles[loop.role].warps
        share, most = warps / float(self.gpu.sm.subpartitions), -(-warps // int(self.gpu.sm.subpartitions))
        names = [p for p in PIPES if p != "control"]
        columns = {p: (FIRST_PIPE + PIPES.index(p), FIRST_BESIDE + PIPES.index(p)) for p in names} | {"port": (PORT, PORT_BESIDE)}
        uses = {u: float(cost[a]) * share for u, (a, _) in columns.items() if cost[a]}
        beside = {u: float(cost[b]) * share for u, (_, b) in columns.items() if cost[b]}
        if cost[SMEM]:
            uses["smem"] = beside["smem"] = float(cost[SMEM]) * warps
        need = [max((most * float(cost[c[i]]) for u, c in columns.items() if u != "tmem"), default=0.0) for i in (0, 1)]
        waiting = uses.get("smem", 0.0)
        return Operation(
            name=self._name(statements), role=self.program.roles[loop.role].name, cta=0, kind=kind, statements=tuple(statements),
            cycles=max(float(cost[GAP]), need[0], waiting), uses=uses,
            beside=max(float(cost[GAP_BESIDE]), need[1], waiting), beside_uses=beside, delay=float(cost[DELAY]) * share,
        )  # fmt: skip

    def _name(self, statements: Sequence[int]) -> str:
        first = self.program.statements[statements[0]]
        kind = first.kind
        if kind in MATRIX:
            kind = "Q K^T" if first.attrs.get("transpose_b") else "P V"
        share = first.attrs.get("share")
        part = f" {100 * share[0]:.0f}-{100 * share[1]:.0f} %" if share and tuple(share) != (0.0, 1.0) else ""
        target = f" {first.writes[0]}" if first.writes else ""
        more = "".join(f" + {self.program.statements[i].kind}" for i in statements[1:])
        return f"{kind}{target}{part}{more}"

    def _asynchronous(self, loop: Loop, i: int, cost: Array) -> Iterable[Operation]:
        """The issue of a product or transfer, and itself."""
        warps = self.program.roles[loop.role].warps
        rows = [r for r in self.program.code if r[STATEMENT] == i and r[OPCODE] == Opcode.ISSUE and self._runs(int(r[BUNDLE]))]
        run: dict[str, float] = {}
        kind = "product"
        for row in rows:
            path, each, count = int(self.paths[row[BUNDLE]]), self.table[row[BUNDLE]], int(row[COUNT])
            if path in PRODUCTS:
                sm_wide = path == Path.TCGEN05
                held = float(each[RESULT] if sm_wide else each[FIRST_PIPE + TENSOR_PIPE]) * count
                run["tensor"] = run.get("tensor", 0.0) + held
                run["smem"] = run.get("smem", 0.0) + float(each[SMEM]) * count * warps
            else:
                kind = "transfer"
                run["l2"] = run.get("l2", 0.0) + self._transfer(row) * warps
        issue = cost.copy()
        issue[FIRST_PIPE + TENSOR_PIPE] = issue[FIRST_BESIDE + TENSOR_PIPE] = 0.0
        if issue[SMEM] and kind == "transfer":
            run["smem"] = float(issue[SMEM]) * warps
        issue[SMEM] = 0.0
        yield replace(self._operation(loop, [i], "issue", issue), name=f"issue {self._name([i])}")
        cycles = max(run.values())
        yield Operation(
            name=self._name([i]), role=self.program.roles[loop.role].name, cta=0, kind=kind, statements=(i,), cycles=cycles,
            uses=run, beside=cycles, beside_uses=run,
        )  # fmt: skip

    def _transfer(self, row: Any) -> float:
        """Cycles that one warp's bytes of a code row hold the SM's share of L2, or of HBM where they miss."""
        tensor = int(row[TENSOR])
        size = float(row[BYTES])
        if tensor >= 0:
            size /= float(self.job.multicast[tensor])
        l2, hbm = (float(n) / float(d) / TICKS_PER_CYCLE for n, d in (self.job.rate[L2_RATE], self.job.rate[HBM_RATE]))
        missed = float(self.job.miss_ppm[tensor]) / MILLION if tensor >= 0 else 0.0
        return size * max(l2, missed * hbm)

    def _own_warp(self, operations: list[Operation]) -> list[Operation]:
        """A role that only issues has no need of operations for that: its products and transfers hold its warp when they begin."""
        if any(op.kind == "vector" for op in operations):
            return operations
        issues = {op.statements[0]: op for op in operations if op.kind == "issue"}
        out = []
        for op in operations:
            if op.kind != "issue":
                issue = issues[op.statements[0]]
                out.append(replace(op, issue=issue.cycles, uses={**issue.uses, **op.uses}, beside_uses={**issue.uses, **op.uses}))
        return out


def ideal_counts(s: Statement, buffers: Mapping[str, Buffer], warps: int) -> dict[str, int]:
    """What one warp issues for a statement by itself, by instruction."""
    counter = _Counter()
    OPS[s.kind].lower(counter, s, buffers, warps)
    return counter.counts


class _Counter:
    """An Emitter that only counts."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def issue(
        self, name: str, count: int, *, scoreboard: int = -1, total_bytes: int = 0, barrier: str = "", ring: str = ""
    ) -> None:
        if count > 0:
            self.counts[name] = self.counts.get(name, 0) + count

    def wait_scoreboard(self, scoreboard: int) -> None: ...

    def depend(self) -> None: ...

    def marker(self, kind: str, arg: int) -> None: ...

    def order(
        self, kind: str, barrier: str = "", ring: str = "", *, count: int = 0, total_bytes: int = 0, arg: int = -1
    ) -> None: ...


# --- edges ---


def _edges(
    program: Program, job: Job, operations: Sequence[Operation], depends: Sequence[Dependence]
) -> list[Edge]:
    """Dependences between operations, with what passes until the one that waits can know: a product's drain, a barrier's wake-up."""
    ends: dict[int, int] = {}
    begins: dict[int, int] = {}
    for number, op in enumerate(operations):
        for i in op.statements:
            if op.kind != "issue":
                ends[i] = number
            begins.setdefault(i, number)
    found: dict[tuple[int, int, str], Edge] = {}
    for d in depends:
        if d.before not in ends or d.after not in ends:
            continue
        before, after = operations[ends[d.before]], operations[begins[d.after]]
        queued = before.kind == "product" == operations[ends[d.after]].kind and before.role == after.role
        target = ends[d.after] if queued else begins[d.after]
        if ends[d.before] == target and d.distance == 0:
            continue
        latency = 0.0 if queued else _latency(program, job, before, after.role != before.role)
        key = (ends[d.before], target, d.buffer)
        edge = Edge(before=key[0], after=target, distance=d.distance, latency=latency, buffer=d.buffer)
        if key not in found or edge.distance < found[key].distance:
            found[key] = edge
    for i, number in begins.items():  # a product runs once it is issued
        if operations[number].kind == "issue":
            found[number, ends[i], "issue"] = Edge(before=number, after=ends[i], distance=0, latency=0.0, begun=True)
    return _needed(list(found.values()), operations)


def _needed(edges: Sequence[Edge], operations: Sequence[Operation]) -> list[Edge]:
    """``edges`` without those that two others imply, or that one operation has to itself after a trip."""
    after: dict[int, list[Edge]] = {}
    for e in edges:
        if not e.buffer:
            after.setdefault(e.before, []).append(e)

    def implied(e: Edge, seen: frozenset[int], at: int, distance: int, length: float) -> bool:
        """Whether a chain of other edges asks for as much."""
        for step in after.get(at, []):
            if step is e or step.after in seen or step.distance < 0:
                continue
            so_far = distance + step.distance
            until = length + step.latency - (operations[at].cycles if step.begun else 0.0)
            if so_far > e.distance:
                continue
            if step.after == e.after:
                if until >= e.latency:
                    return True
            elif implied(e, seen | {step.after}, step.after, so_far, until + operations[step.after].cycles):
                return True
        return False

    kept = list(edges)
    for e in edges:
        if e.before == e.after and e.distance >= 1 and e.latency <= 0:
            kept.remove(e)
        elif not e.begun and implied(e, frozenset((e.before,)), e.before, 0, 0.0):
            kept.remove(e)
            if e in after.get(e.before, []):
                after[e.before].remove(e)
    return kept


def _latency(program: Program, job: Job, before: Operation, crosses: bool) -> float:
    """Cycles from the end of ``before`` until a warp can go on; ``crosses``: one of another role."""
    latency = job.latency.astype(float) / TICKS_PER_CYCLE
    woken = float(latency[MBARRIER]) if crosses else 0.0
    rows = [r for r in program.code if r[STATEMENT] in before.statements and r[OPCODE] == Opcode.ISSUE]
    paths = {int(job.bundles[r[BUNDLE], PATH]) for r in rows}
    if before.kind == "product":
        if Path.TCGEN05 in paths:
            return float(latency[PRODUCT]) + woken
        return woken + max(float(job.bundles[r[BUNDLE], RESULT]) / TICKS_PER_CYCLE for r in rows if job.bundles[r[BUNDLE], PATH])
    if before.kind == "transfer":
        tensors = [int(r[TENSOR]) for r in rows if r[TENSOR] >= 0]
        missed = any(job.miss_ppm[t] > MILLION // 2 for t in tensors)
        return woken + float(latency[HBM_LATENCY] if missed else latency[L2_LATENCY]) + (float(latency[TMA]) if crosses else 0.0)
    return woken
