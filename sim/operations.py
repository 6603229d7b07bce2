"""The steady loop of a role as priced operations: what each holds of which unit.

Costs are the engines' (``pricing.bundle_table``), read off the rows of the Program's code. Statements whose instructions a
compiler mixed share the time of their stretch of code (what lies between two ordering ops or products) in proportion to what
each would take by itself, so that a role's operations sum to what the engine lets it issue. Instructions of ordering ops go
with the operation after them. An asynchronous statement is two operations: its issue by the warp, and what runs by itself.
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
    HBM_RATE,
    L2_RATE,
    PATH,
    PORT,
    PORT_BESIDE,
    RESULT,
    SMEM,
    SMEM_BESIDE,
    SMEM_LATENCY,
    TICKS_PER_CYCLE,
    TMEM,
    Job,
)
from .hazard_ops import ORDERING, STRUCTURE
from .pricing import bundle_table

TENSOR_PIPE = PIPES.index("tensor")
TRANSFERS = (Path.GLOBAL_LOAD, Path.GLOBAL_TO_SMEM, Path.GLOBAL_STORE, Path.TMA_LOAD, Path.TMA_STORE)
PRODUCTS = (Path.WGMMA, Path.TCGEN05)
#: A statement that takes less of its stretch than this joins the one before it whatever waits for it.
TINY = 0.03
MILLION = 1_000_000

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of one CTA's trip. ``kind``: "vector" (by its warp), "issue", or by itself: "product", "transfer".

    ``unit``: what it is work for. ``cycles``: of its warp, or of its unit if it runs by itself. ``uses``: cycles that it holds a
    unit (of a sub-partition; ``smem``, ``l2``, ``hbm``, products of a CTA: of the SM). ``beside``, ``beside_uses``: the same
    where a product runs all the while. ``delay``: cycles that it then holds products up. ``issue``: cycles of its warp, for a
    product or transfer whose warp does nothing else; otherwise its issue is an operation of its own.
    """

    name: str
    role: str
    cta: int
    kind: str
    unit: str
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


class Pricing:
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

        self.sources: dict[int, set[tuple[int, int]]] = {i: set() for i in range(len(role))}
        for d in depends:
            if outside(d.after, d.before):
                self.sources[d.after].add((d.before, d.distance))
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
            apart = i in self.asynchronous or kind in ORDERING
            if stretch and (apart or multiplies(i) != multiplies(stretch[-1])):
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
        """Per statement of the loop the sums of its rows' costs. GAP holds also what a warp alone waits for: results that it
        needs, tensor memory's port (one bundle's transfers after the other's) and its loads from shared memory."""
        costs = {i: np.zeros(self.table.shape[1]) for i in range(loop.start, loop.end + 1)}
        pc = self.starts[loop.start]
        now = due = port_free = 0.0
        boards: dict[int, float] = {}
        latency = float(self.job.latency[SMEM_LATENCY]) / TICKS_PER_CYCLE
        for row in self.program.code[pc + 1 : int(self.program.code[pc][JUMP])]:
            own, op = costs[int(row[STATEMENT])], row[OPCODE]
            before, held = now, 0.0
            if op == Opcode.ISSUE:
                each = self.table[row[BUNDLE]]
                own += each * row[COUNT]
                held = float(each[GAP]) * int(row[COUNT])
                for _ in range(int(row[COUNT])):
                    now = max(now, port_free) if each[FIRST_PIPE + TMEM] else now
                    port_free = now + float(each[FIRST_PIPE + TMEM]) if each[FIRST_PIPE + TMEM] else port_free
                    due = now + float(each[RESULT])
                    now += float(each[GAP])
                if row[ARG] >= 0:
                    boards[int(row[ARG])] = now
            elif op == Opcode.DEPEND:
                now = max(now, due)
            elif op == Opcode.WAIT_SCOREBOARD and int(row[ARG]) in boards:
                now = max(now, boards[int(row[ARG])] + latency)
            own[[GAP, GAP_BESIDE]] += now - before - held
        return costs

    def _stretch(self, loop: Loop, statements: Sequence[int], cost: Array) -> Iterable[Operation]:
        """Share ``cost`` out among ``statements`` by the time that each would take alone."""
        own = np.array([self._alone(i, loop) for i in statements])
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
        """Whether ``i`` waits for nothing outside that those before it do not wait for, and nothing outside waits for them."""
        before = set().union(*(self.sources[j] for j in inside))
        return self.sources[i] <= before and not any(j in self.sinks for j in inside if self.program.statements[j].writes)

    def _ideal(self, i: int, loop: Loop) -> Array:
        """What a statement costs by itself."""
        counts = ideal_counts(self.program.statements[i], self.buffers, self.program.roles[loop.role].warps)
        if not counts:
            return np.zeros(self.table.shape[1])
        row: Array = bundle_table(replace(self.program, bundles=(tuple(counts.items()),)), self.gpu)[0] / TICKS_PER_CYCLE
        return row

    def _alone(self, i: int, loop: Loop) -> float:
        row = self._ideal(i, loop)
        moved = float(row[FIRST_PIPE + TMEM])
        waited = moved + float(self.gpu.tmem.latency_cycles) if moved and self.gpu.tmem is not None else 0.0
        return max(float(row[GAP]), waited)

    def _unit(self, i: int, loop: Loop) -> str:
        """The unit that a statement by itself holds longest."""
        row = self._ideal(i, loop)
        held = {p: float(row[FIRST_PIPE + n]) for n, p in enumerate(PIPES)} | {"smem": float(row[SMEM])}
        return max(held, key=lambda name: held[name])

    def _operation(self, loop: Loop, statements: Sequence[int], kind: str, cost: Array) -> Operation:
        warps = self.program.roles[loop.role].warps
        share, most = warps / float(self.gpu.sm.subpartitions), -(-warps // int(self.gpu.sm.subpartitions))
        names = [p for p in PIPES if p != "control"]
        columns = {p: (FIRST_PIPE + PIPES.index(p), FIRST_BESIDE + PIPES.index(p)) for p in names} | {"port": (PORT, PORT_BESIDE)}
        uses = {u: float(cost[a]) * share for u, (a, _) in columns.items() if cost[a]}
        beside = {u: float(cost[b]) * share for u, (_, b) in columns.items() if cost[b]}
        if cost[SMEM]:
            uses["smem"], beside["smem"] = float(cost[SMEM]) * warps, float(cost[SMEM_BESIDE]) * warps
        need = [max((most * float(cost[c[i]]) for u, c in columns.items() if u != "tmem"), default=0.0) for i in (0, 1)]
        # what is spilled is stored and loaded again well before its use: no warp waits for the port
        waiting = 0.0 if self.program.statements[statements[0]].kind == "spill" else uses.get("smem", 0.0)
        return Operation(
            name=self._name(statements), role=self.program.roles[loop.role].name, cta=0, kind=kind,
            unit=self._unit(statements[0], loop) if kind == "vector" else "issue", statements=tuple(statements),
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
                for unit, held in self._transfer(row).items():
                    run[unit] = run.get(unit, 0.0) + held * warps
        issue = cost.copy()
        issue[FIRST_PIPE + TENSOR_PIPE] = issue[FIRST_BESIDE + TENSOR_PIPE] = 0.0
        if issue[SMEM] and kind == "transfer":
            run["smem"] = float(issue[SMEM]) * warps
        issue[SMEM] = 0.0
        yield replace(self._operation(loop, [i], "issue", issue), name=f"issue {self._name([i])}")
        cycles = max(run.values())
        yield Operation(
            name=self._name([i]), role=self.program.roles[loop.role].name, cta=0, kind=kind,
            unit="tensor" if kind == "product" else max(run, key=lambda name: run[name]), statements=(i,), cycles=cycles,
            uses=run, beside=cycles, beside_uses=run,
        )  # fmt: skip

    def _transfer(self, row: Any) -> dict[str, float]:
        """Cycles that one warp's bytes of a code row hold the SM's shares of L2 and, where they miss, of HBM: two queues, and a
        request waits for the later one."""
        tensor = int(row[TENSOR])
        size = float(row[BYTES])
        if tensor >= 0:
            size /= float(self.job.multicast[tensor])
        l2, hbm = (float(n) / float(d) / TICKS_PER_CYCLE for n, d in (self.job.rate[L2_RATE], self.job.rate[HBM_RATE]))
        missed = float(self.job.miss_ppm[tensor]) / MILLION if tensor >= 0 else 0.0
        return {"l2": size * l2} | ({"hbm": size * missed * hbm} if missed else {})

    def _own_warp(self, operations: list[Operation]) -> list[Operation]:
        """A role that only issues needs no operations for that: its products and transfers hold its warp when they begin."""
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
