"""The chip around the SMs: how CTAs are dispatched, which SM ends last, and how many instructions all of them issue.

Dispatch is the hardware's: the first round goes to every SM in turn, then a second CTA to every SM, and so on; after that the
next CTA goes to the SM where one has ended. SM scope simulates the SM that this list schedule loads most.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..model.program import IntArray, Opcode, Program
from .engine import LOOP_DEPTH, PORT
from .fast_parts import control, jit

ISSUE, LOOP, END = int(Opcode.ISSUE), int(Opcode.LOOP), int(Opcode.END)
SKIP, EXIT = int(Opcode.SKIP_IF_NEGATIVE), int(Opcode.EXIT)


@jit
def _count(code: Any, expressions: Any, tile_args: Any, starts: Any, out: Any) -> None:
    loops, trips = np.zeros(LOOP_DEPTH, np.int64), np.zeros(LOOP_DEPTH, np.int64)
    for tile in range(tile_args.shape[0]):
        args = tile_args[tile]
        for start in starts:
            pc = start
            while True:
                row = code[pc]
                op = row[0]
                if op == ISSUE:
                    out[tile, row[1]] += row[2]
                elif op in (LOOP, END, SKIP):
                    pc = control(code, pc, expressions, args, loops, trips)
                    continue
                elif op == EXIT:
                    break
                pc += 1


def bundle_counts(program: Program) -> IntArray:
    """Bundles that each tile issues, all warps together; shape (tiles, bundles). Exact: it runs the Program's control flow."""
    args = program.tiles.values.astype(np.int64)
    used = np.unique(program.expression_table[:, 1])
    steering = np.zeros_like(args)  # tiles that differ only in what no trip count or guard reads run alike
    steering[:, used[used >= 0]] = args[:, used[used >= 0]]
    unique, back = np.unique(steering, axis=0, return_inverse=True)
    starts = np.array([role.start for role in program.roles for _ in range(role.warps)], np.int64)
    out = np.zeros((len(unique), len(program.bundles)), np.int64)
    _count(program.code, program.expression_table, unique, starts, out)
    return np.asarray(out[back.ravel()])


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Tiles of every SM in the order it gets them, and the SM expected to end last. ``waves``: tiles over CTA slots."""

    queues: tuple[IntArray, ...]
    critical: int
    waves: float
    idle_sms: int

    @property
    def queue(self) -> IntArray:
        return self.queues[self.critical]


def tile_work(program: Program, bundles: IntArray) -> IntArray:
    """Port ticks that each tile needs of one sub-partition: what CTAs on an SM share."""
    per_tile: IntArray = bundle_counts(program) @ bundles[:, PORT] // 4
    return np.maximum(per_tile, 1)


def strided(work: IntArray, *, sms: int) -> Dispatch:
    """Persistent CTAs, one an SM, that go from tile to tile with a stride of all of them."""
    numbers = np.arange(len(work))
    queues = tuple(numbers[sm::sms] for sm in range(sms))
    return Dispatch(
        queues=queues,
        critical=int(np.argmax([work[q].sum() for q in queues])),
        waves=len(work) / sms,
        idle_sms=sum(not len(q) for q in queues),
    )


def dispatch(work: IntArray, *, sms: int, slots: int, alone: float) -> Dispatch:
    """List-schedule tiles in launch order. k CTAs on an SM each run at min(``alone``, 1/k) of the SM's port."""
    n = len(work)
    queues: list[list[int]] = [[] for _ in range(sms)]
    active: list[dict[int, float]] = [{} for _ in range(sms)]  # tile -> work left
    clock, stamp = [0.0] * sms, [0] * sms
    heap: list[tuple[float, int, int]] = []

    def progress(sm: int, now: float) -> None:
        if active[sm]:
            rate = min(alone, 1 / len(active[sm]))
            for tile in active[sm]:
                active[sm][tile] -= (now - clock[sm]) * rate
        clock[sm] = now

    def schedule(sm: int) -> None:
        stamp[sm] += 1
        if active[sm]:
            rate = min(alone, 1 / len(active[sm]))
            heapq.heappush(heap, (clock[sm] + max(0.0, min(active[sm].values())) / rate, stamp[sm], sm))

    head = min(n, sms * slots)
    for tile in range(head):
        queues[tile % sms].append(tile)
        active[tile % sms][tile] = float(work[tile])
    for sm in range(sms):
        schedule(sm)
    last, critical = 0.0, 0
    while heap:
        now, version, sm = heapq.heappop(heap)
        if version != stamp[sm]:
            continue
        progress(sm, now)
        ended = [t for t, left in active[sm].items() if left <= 1e-6 * work[t]]
        for tile in ended[:1]:  # one at a time: SMs that free a slot at the same moment take turns
            del active[sm][tile]
            if head < n:
                queues[sm].append(head)
                active[sm][head] = float(work[head])
                head += 1
        if now > last:
            last, critical = now, sm
        schedule(sm)
    return Dispatch(
        queues=tuple(np.array(q, np.int64) for q in queues),
        critical=critical,
        waves=n / (sms * slots),
        idle_sms=sum(not q for q in queues),
    )
