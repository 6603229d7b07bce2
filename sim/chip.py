"""The chip around the SMs: how CTAs are dispatched, which SM ends last, and how many instructions all of them issue.

Dispatch is the hardware's: the first round goes to every SM in turn, then a second CTA to every SM, and so on; after that the
next CTA goes to the SM where one has ended. SM scope simulates the SM that this list schedule loads most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..model.program import IntArray, Opcode, Program
from .engine import LOOP_DEPTH, PORT, Run
from .fast_lru import HBM_READ, L2_READ
from .fast_parts import control, jit
from .residency import Traffic

ISSUE, LOOP, END = int(Opcode.ISSUE), int(Opcode.LOOP), int(Opcode.END)
SKIP, EXIT = int(Opcode.SKIP_IF_NEGATIVE), int(Opcode.EXIT)


@jit
def _count(code: Any, expressions: Any, tile_args: Any, starts: Any, warps: Any, out: Any) -> None:
    """Add what each tile issues to its row of ``out``: rows between two places of control run equally often."""
    loops, trips = np.zeros(LOOP_DEPTH, np.int64), np.zeros(LOOP_DEPTH, np.int64)
    rows = code.shape[0]
    steers = np.zeros(rows, np.int64)  # the next row of control from each row on
    for pc in range(rows - 1, -1, -1):
        op = code[pc, 0]
        steers[pc] = pc if op in (LOOP, END, SKIP, EXIT) or pc == rows - 1 else steers[pc + 1]
    change = np.zeros(rows + 1, np.int64)  # by how much oftener a row runs than the one before it
    for tile in range(tile_args.shape[0]):
        args = tile_args[tile]
        for role in range(starts.shape[0]):
            change[:] = 0
            pc = starts[role]
            while True:
                change[pc] += warps[role]
                pc = steers[pc]
                change[pc + 1] -= warps[role]
                if code[pc, 0] == EXIT:
                    break
                pc = control(code, pc, expressions, args, loops, trips)
            times = 0
            for pc in range(rows):
                times += change[pc]
                if code[pc, 0] == ISSUE:
                    out[tile, code[pc, 1]] += times * code[pc, 2]


@dataclass(frozen=True, kw_only=True)
class Issued:
    """Bundles that tiles issue, all warps together. ``kinds``: a row for all tiles that run alike; ``kind_of``: of each tile."""

    kinds: IntArray
    kind_of: IntArray

    @property
    def total(self) -> IntArray:
        """Of each bundle, by all tiles."""
        return np.asarray(np.bincount(self.kind_of, minlength=len(self.kinds)) @ self.kinds)


def issued_bundles(program: Program) -> Issued:
    """What each tile issues. Exact: it runs the Program's control flow, once for tiles that differ only in what no trip count
    or guard reads."""
    args = program.tiles.values.astype(np.int64)
    used = np.unique(program.expression_table[:, 1])
    steering = args[:, used[used >= 0]]
    order = np.lexsort(steering.T) if steering.size else np.arange(len(args))
    first = np.ones(len(args), np.bool_)
    first[1:] = (steering[order[1:]] != steering[order[:-1]]).any(axis=1)
    kind_of = np.empty(len(args), np.int64)
    kind_of[order] = np.cumsum(first) - 1
    starts = np.array([role.start for role in program.roles], np.int64)
    warps = np.array([role.warps for role in program.roles], np.int64)
    kinds = np.zeros((int(first.sum()), len(program.bundles)), np.int64)
    _count(program.code, program.expression_table, args[order[first]], starts, warps, kinds)
    return Issued(kinds=kinds, kind_of=kind_of)


def bundle_counts(program: Program) -> IntArray:
    """The same with a row for each tile; shape (tiles, bundles)."""
    issued = issued_bundles(program)
    return np.asarray(issued.kinds[issued.kind_of])


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Tiles of every SM in the order it gets them, and the SM expected to end last. ``waves``: tiles over CTA slots; ``load``:
    work of the SM that ends last over the mean SM's."""

    queues: tuple[IntArray, ...]
    critical: int
    waves: float
    idle_sms: int
    load: float

    @property
    def queue(self) -> IntArray:
        return self.queues[self.critical]

    def shares(self, slots: int) -> float:
        """Of how many equal shares of L2 and HBM the critical SM has one: an SM with two CTAs asks for twice as much."""
        resident = sum(min(len(queue), slots) for queue in self.queues)
        return resident / min(len(self.queue), slots)


def tile_work(counts: IntArray, bundles: IntArray) -> IntArray:
    """Port ticks that tiles with these ``counts`` of bundles need of one sub-partition, which is what CTAs on an SM share."""
    work: IntArray = counts @ bundles[:, PORT] // 4
    return np.maximum(work, 1)


@jit
def _progress(left: Any, resident: int, rate: Any, passed: float) -> None:
    for i in range(resident):
        left[i] -= passed * rate[resident]


@jit
def _list_schedule(work: Any, sms: int, slots: int, rate: Any, sm_of: Any) -> int:
    """Fill ``sm_of`` with each tile's SM; returns the SM that ends last. ``rate[k]``: of each of k CTAs on an SM."""
    tiles, left = np.zeros((sms, slots), np.int64), np.zeros((sms, slots))
    resident, clock, due = np.zeros(sms, np.int64), np.zeros(sms), np.full(sms, np.inf)
    stamp = np.zeros(sms, np.int64)  # SMs free at one moment take turns in the order in which that was foreseen
    n = work.shape[0]
    head = min(n, sms * slots)
    for tile in range(head):
        sm = tile % sms
        sm_of[tile] = sm
        tiles[sm, resident[sm]], left[sm, resident[sm]] = tile, work[tile]
        resident[sm] += 1
    last, critical = 0.0, 0
    for sm in range(sms):
        stamp[sm] = 1
        if resident[sm] > 0:
            due[sm] = clock[sm] + max(0.0, left[sm, : resident[sm]].min()) / rate[resident[sm]]
    while True:
        sm, now, first = 0, due[0], stamp[0]
        for other in range(1, sms):
            at = due[other]
            if at < now or (at == now and stamp[other] < first):
                sm, now, first = other, at, stamp[other]
        if now == np.inf:
            return critical
        k = resident[sm]
        _progress(left[sm], k, rate, now - clock[sm])
        clock[sm] = now
        for i in range(k):
            if left[sm, i] <= 1e-6 * work[tiles[sm, i]]:  # one at a time: SMs that free a slot at one moment take turns
                for j in range(i, k - 1):
                    tiles[sm, j], left[sm, j] = tiles[sm, j + 1], left[sm, j + 1]
                k -= 1
                if head < n:
                    sm_of[head] = sm
                    tiles[sm, k], left[sm, k] = head, work[head]
                    head += 1
                    k += 1
                break
        resident[sm] = k
        if now > last:
            last, critical = now, sm
        stamp[sm] += 1
        due[sm] = now + max(0.0, left[sm, :k].min()) / rate[k] if k > 0 else np.inf


def strided(work: IntArray, *, sms: int) -> Dispatch:
    """Persistent CTAs, one an SM, that go from tile to tile with a stride of all of them."""
    numbers = np.arange(len(work))
    queues = tuple(numbers[sm::sms] for sm in range(sms))
    return _order(work, queues, critical=int(np.argmax([work[q].sum() for q in queues])), slots=1)


def dispatch(work: IntArray, *, sms: int, slots: int, alone: float) -> Dispatch:
    """List-schedule tiles in launch order. k CTAs on an SM each run at min(``alone``, 1/k) of the SM's port."""
    n = len(work)
    sm_of = np.zeros(n, np.int64)
    rate = np.array([min(alone, 1 / max(1, k)) for k in range(slots + 1)])
    critical = _list_schedule(work, sms, slots, rate, sm_of)
    order = np.argsort(sm_of, kind="stable")
    ends = np.searchsorted(sm_of[order], np.arange(sms), side="right").tolist()
    queues = tuple(order[begin:end] for begin, end in zip([0, *ends], ends, strict=False))
    return _order(work, queues, critical=int(critical), slots=slots)


def _order(work: IntArray, queues: tuple[IntArray, ...], *, critical: int, slots: int) -> Dispatch:
    return Dispatch(
        queues=queues,
        critical=critical,
        waves=len(work) / (len(queues) * slots),
        idle_sms=sum(not len(q) for q in queues),
        load=float(work[queues[critical]].sum() * len(queues) / max(1, work.sum())),
    )


#: Where chip scope says nothing: SMs that end within this share of the launch, HBM reads within this factor of another count.
EVEN, ALIKE = 0.02, 1.05


def chip_notes(
    program: Program, run: Run, planned: Traffic, found: Traffic, *, slots: int, expected: int
) -> tuple[str, ...]:
    """Why a run of the whole chip differs from SM scope, which expected so many ticks, in words: the tail, what L2 did not hold.

    ``planned``: the traffic of a replay in which CTAs keep step. ``found``: the run's.
    """
    sms, tiles = len(run.busy), len(program.tiles)
    ends = np.zeros(sms)
    np.maximum.at(ends, run.ctas[:, 1], run.ctas[:, 4])
    idle = 1 - float(ends.mean()) / max(1, run.ticks)
    notes = []
    if idle > EVEN:
        waves = tiles / (sms * slots)
        notes.append(f"tail: SMs have ended {100 * idle:.0f} % of the launch early, on average ({tiles} CTAs, {waves:.2f} waves)")
    read, in_step = found.total(HBM_READ), planned.total(HBM_READ)
    once = sum(t.size_bytes for t in program.tensors if found.by_tensor[t.name][L2_READ])
    if read > ALIKE * once:
        notes.append(f"L2 overflow: HBM is read {read / max(1, once):.2f} times as much as the tensors hold")
    if read > ALIKE * in_step:
        notes.append(f"drift: out of step, CTAs read {read / max(1, in_step):.2f} times as much of HBM as a replay in step")
    gained = 1 - run.ticks / max(1, expected)
    if gained > EVEN:
        share = "requests that do not coincide get more than an SM's share of L2 and HBM"
        notes.append(f"bursts: {100 * gained:.0f} % faster than SM scope, as {share}")
    if gained < -EVEN:
        turns = "loads that other SMs hasten or delay let warps take other turns"
        notes.append(f"phases: {-100 * gained:.0f} % slower than SM scope, as {turns}")
    return tuple(notes) or ("full waves: all SMs end together, and L2 serves what a replay in step expects",)
