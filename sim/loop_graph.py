"""All operations of an SM's steady loop and what waits for what: the graph that bounds and schedules are made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..model.gpu import GPU
from ..model.instructions import Path
from ..model.program import Opcode, Program
from ..model.rows import BUNDLE, OPCODE, STATEMENT, TENSOR
from .dependence import Dependence, Loop
from .engine import HBM_LATENCY, L2_LATENCY, MBARRIER, PATH, PRODUCT, RESULT, TICKS_PER_CYCLE, TMA, Job
from .operations import Operation, Pricing


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
    program: Program, gpu: GPU, job: Job, loops: Sequence[Loop], depends: Sequence[Dependence], skipped: Collection[int],
    ctas: int,
) -> LoopGraph:  # fmt: skip
    """The priced graph of ``ctas`` CTAs on one SM; statements that the steady loop leaves out are ``skipped``."""
    pricing = Pricing(program, gpu, job, depends, skipped)
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


def _edges(
    program: Program, job: Job, operations: Sequence[Operation], depends: Sequence[Dependence]
) -> list[Edge]:
    """Dependences between operations, with what passes until one that waits can know: a product's drain, a barrier's wake-up."""
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
        missed = any(job.miss_ppm[t] > 0 for t in tensors)
        return woken + float(latency[HBM_LATENCY] if missed else latency[L2_LATENCY]) + (float(latency[TMA]) if crosses else 0.0)
    return woken
