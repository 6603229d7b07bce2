"""The fast engine: the contract of :mod:`.engine`, compiled. It runs one SM at a time and remembers how its machine goes on.

SMs share the queue of CTAs. One runs until it comes to a question about that which has a later place in the order of events than
another SM's, and waits there. With ``record_limit`` every event is such a question, so that records come in their order.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

# isort: off
from . import compiled
from . import fast_outside as outside
from .engine import (
    BARRIER_BASE, BARRIER_PER_WARP, DISPATCH, LANE, LSU_QUEUE, MBARRIER, PRODUCT, REPLACE, SMEM, SMEM_LATENCY, SPILL,
    STALL_BARRIER, STALL_LAUNCH, STALL_MBARRIER, Job, Run, deadlock,
)  # fmt: skip
from .engine import PATH as BUNDLE_PATH
from .fast_code import TABLE_COLUMNS
from .fast_layout import (
    AGAIN, BEGUN, BUSY, BYTES_DUE, DONE_BYTES, DUE, EVENTS, FINISHED, GATHERED, GIVEN, GOES_ON, HEAD, LANDING, LANDS, LAST, LEFT,
    MBARRIER_SIZE, MODE, N_STALLS, NAMED, NOW, PATH, PC, QUARTERS, READY, REASON, RECORDING, RECORDS, SINCE, STALLED,
    TOGETHER, USED_SMEM, WAITS_FOR, Plan, State, plan, state,
)  # fmt: skip
from .fast_lru import RESIDENT
from .fast_machine import (
    BARRIER, DEPEND, END, EXIT, ISSUE, LOAD, LOOP, MMA_WAIT, NAMED_ARRIVE, SKIP, TCGEN05, TMA_LOAD, WAIT_GROUP,
    WAIT_SCOREBOARD, WGMMA, choose, gather, hold, issue, known, note, renew, share, soonest, stall,
)  # fmt: skip
from .fast_memo import KEEPS, MOST_ANSWERS, REPLAY, Memo, checkpoint, event_key, memo, order_key, replay
from .fast_order import arrive, asks, due, instance, order, settle_mbarrier
from .fast_outside import CONTROL, LEAVE, REQUEST, SPILLED
from .fast_parts import N_PIPES, NEVER, jit, part, pop, push
from .fast_parts import control as follow
# isort: on

#: Latencies that a machine knows of; the others are those of L2 and HBM.
MACHINE_LATENCIES = (SMEM_LATENCY, BARRIER_BASE, BARRIER_PER_WARP, REPLACE, LSU_QUEUE, MBARRIER, PRODUCT, LANE)
RUNS = -1  # in place of a key: the SM has not stopped


class Sm(NamedTuple):
    """Views of one SM's rows, by part."""

    events: Any
    warps: Any
    barriers: Any
    named: Any
    quarters: Any
    shared: Any
    cache: Any
    outside: Any
    counted: Any
    control: Any
    path: Any


@part
def leave(plan: Any, state: Any, own: Any, sm: int, w: Any, t: Any, horizon: Any) -> Any:
    """The warp has ended its tile: (the key where it has to wait for other SMs, whether it goes on with another tile)."""
    control, slot = own.control, w // plan.per_cta
    if not known(control):
        key = order_key(plan, state, sm, t, LEAVE, w, 0, 0, 0)
        if key > horizon:
            control[GOES_ON], control[NOW] = w, t
            return key, False
    out = own.path[control[PATH], 6] if known(control) else outside.leave(plan, state, sm, t, w)
    note(control, own.path, t, LEAVE, w, 0, 0, 0, out)
    if plan.persistent:
        own.warps[w, PC] = own.warps[w, AGAIN]
    elif out == 1:
        renew(
            plan.warp_start, plan.full_count, plan.latency[REPLACE], own.events, own.warps, own.barriers, own.named, own.counted,
            slot, t,
        )  # fmt: skip
    return np.int64(RUNS), plan.persistent and out == 1


@part
def resume(plan: Any, state: Any, own: Any, sm: int, w: Any, t: Any, horizon: Any) -> Any:
    """The warp runs its rows until one blocks it; returns RUNS, or the key where it has to wait for other SMs."""
    code, control, warps, events, counted = plan.code, own.control, own.warps, own.events, own.counted
    control[LAST] = t
    while True:
        pc = warps[w, PC]
        op = code[pc, 0]
        if op == ISSUE:
            if warps[w, LEFT] == 0 and warps[w, BEGUN] != GATHERED:
                state.row_start[sm, w] = t
            begins = warps[w, BEGUN] == 0 and plan.bundles[code[pc, 1], BUNDLE_PATH] == WGMMA
            if begins and gather(plan, events, warps, counted, w, t):
                return np.int64(RUNS)
            issue(plan, events, warps, own.quarters, own.shared, own.cache, w, t, pc)
            return np.int64(RUNS)
        if op in (LOOP, END, SKIP):
            if known(control):
                out = own.path[control[PATH], 6]
            else:
                args = plan.tile_args[state.tile_of[sm, w]]
                out = follow(code, pc, plan.expressions, args, state.loops[sm, w], state.trips[sm, w])
            note(control, own.path, t, CONTROL, w, pc, 0, 0, out)
            warps[w, PC] = out
            if w == plan.anchor and op == END:
                control[DUE] = 1
            continue
        if op == EXIT:
            key, goes_on = leave(plan, state, own, sm, w, t, horizon)
            if not goes_on:
                return key
            continue
        if plan.chip and not known(control) and asks(plan, state, own, sm, w, pc):
            key = event_key(plan, sm, t, w)
            if key > horizon:
                control[GOES_ON], control[NOW] = w, t
                return key
        warps[w, PC] = pc + 1
        again = False
        if op in (WAIT_SCOREBOARD, WAIT_GROUP, DEPEND, MMA_WAIT):
            until, reason, again = due(plan, state, own, sm, w, t, op, code[pc, 3])
        elif op in (BARRIER, NAMED_ARRIVE):
            arrive(code, plan.latency, events, warps, own.named, counted, plan.per_cta, w // plan.per_cta, w, t, pc)
            until, reason = NEVER if op == BARRIER else t, STALL_BARRIER
        else:
            (until, again), reason = order(plan, state, own, sm, w, t, pc), STALL_MBARRIER
        if until > t:
            if again:
                warps[w, PC] = pc
            if until < NEVER:
                stall(counted, w % plan.per_cta, reason, until - t)
                events[w] = until
            return np.int64(RUNS)


@part
def serve(plan: Any, state: Any, own: Any, sm: int, w: Any, t: Any) -> None:
    """Give the warp its bundle."""
    code, bundles, warps, control = plan.code, plan.bundles, own.warps, own.control
    pc, lane = warps[w, PC], w % plan.per_cta
    kind, count = code[pc, 1], code[pc, 2]
    path = bundles[kind, BUNDLE_PATH]
    warps[w, READY] = 0
    stall(own.counted, lane, warps[w, REASON], t - warps[w, SINCE])
    warps[w, SINCE], warps[w, GIVEN] = NEVER, t + plan.longest_fetch
    goes_on = hold(bundles, warps, own.quarters, own.counted, w, kind, t)
    if bundles[kind, SMEM] > 0 or path == TCGEN05:
        goes_on = share(plan, own, lane, w, kind, code[pc, 3], t, goes_on)
    if bundles[kind, SPILL] > 0:
        if not known(control):
            outside.spill(plan, state, sm, t, bundles[kind, SPILL])
        note(control, own.path, t, SPILLED, w, pc, bundles[kind, SPILL], 0, 0)
    if LOAD <= path < WGMMA:
        moved = code[pc, 4] * (count - warps[w, LEFT] + 1) // count - warps[w, DONE_BYTES]
        warps[w, DONE_BYTES] += moved
        slot = w // plan.per_cta
        c = instance(plan.mbarriers, warps, slot * plan.instances, w, code[pc, 9], code[pc, 10])[0] if path == TMA_LOAD else 0
        if not known(control):
            outside.request(plan, state, sm, t, w, pc, moved, c)
        note(control, own.path, t, REQUEST, w, pc, moved, c, 0)
        if path == LOAD:
            warps[w, LANDING] |= 1 << code[pc, 3]
        elif path == TMA_LOAD:
            own.barriers[c, BYTES_DUE] -= moved
            own.barriers[c, LANDS] = 1
            settle_mbarrier(plan, state, own, sm, slot, c, t, plan.warps + w % QUARTERS)
    warps[w, LEFT] -= 1
    if warps[w, LEFT] == 0:
        kept = state.counters[RECORDS]
        if kept < plan.record_limit:
            row = state.records[kept]
            row[0], row[1], row[2], row[3] = state.row_start[sm, w], goes_on, sm, w // plan.per_cta
            row[4], row[5], row[6] = lane, state.tile_of[sm, w], pc
            state.counters[RECORDS] += 1
        warps[w, PC] += 1
        warps[w, DONE_BYTES] = 0
    own.events[w] = goes_on


@part
def sm_of(plan: Any, state: Any, sm: int) -> Any:
    """The parts of one SM's rows."""
    m, slots = state.machine[sm], plan.slots
    return Sm(
        m[: plan.first_warp], m[plan.first_warp : plan.first_mbarrier].reshape(plan.warps, plan.warp_size),
        m[plan.first_mbarrier : plan.first_named].reshape(slots * plan.instances, MBARRIER_SIZE),
        m[plan.first_named : plan.first_quarter].reshape(slots, NAMED),
        m[plan.first_quarter : plan.first_shared].reshape(QUARTERS, plan.quarter_size),
        m[plan.first_shared : plan.first_code], m[plan.first_code :].reshape(plan.code_rows, TABLE_COLUMNS),
        state.outside[sm], state.counted[sm], state.control[sm], state.path[sm],
    )  # fmt: skip


@part
def live(plan: Any, state: Any, memo: Any, sm: int, horizon: Any) -> Any:
    """Run the machine until the SM has to wait for others (the key), has ended (NEVER), or the memo knows how to go on (RUNS)."""
    own = sm_of(plan, state, sm)
    events, control, counted, code, bundles = own.events, own.control, own.counted, plan.code, plan.bundles
    n = plan.warps
    while True:
        if control[GOES_ON] >= 0:
            who, t = control[GOES_ON], control[NOW]
            control[GOES_ON] = -1
        else:
            t, who = NEVER, np.int64(0)
            for i in range(n + QUARTERS):
                if events[i] < t:
                    t, who = events[i], np.int64(i)
            if t == NEVER:
                return NEVER
            if plan.strict:
                key = event_key(plan, sm, t, who)
                if key > horizon:
                    return key
            ends = control[DUE] or control[PATH] > MOST_ANSWERS // 2
            if control[RECORDING] and ends and checkpoint(plan, state, memo, sm, t):
                return np.int64(RUNS)
            counted[EVENTS] += 1
        if who < n:
            events[who] = NEVER
            key = resume(plan, state, own, sm, who, t, horizon)
            if key != RUNS:
                return key
        else:
            w = choose(code, bundles, own.warps, own.quarters, who - n, t)
            if w >= 0:
                kind = code[own.warps[w, PC], 1]
                moves = LOAD <= bundles[kind, BUNDLE_PATH] < WGMMA or bundles[kind, SPILL] > 0
                if plan.chip and moves and not known(control):
                    key = event_key(plan, sm, t, who)
                    if key > horizon:
                        counted[EVENTS] -= 1
                        return key
                serve(plan, state, own, sm, w, t)
            events[who] = soonest(code, bundles, own.warps, own.quarters, who - n)


@part
def _advance(plan: Any, state: Any, memo: Any, sm: int, horizon: Any) -> Any:
    """Run one SM until it has to wait for others, and return the key of where it waits; NEVER when it has ended."""
    key = np.int64(RUNS)
    while key == RUNS:
        if state.control[sm, MODE] == REPLAY:
            key = replay(plan, state, memo, sm, horizon)
        else:
            key = live(plan, state, memo, sm, horizon)
    return key


@part
def _first_round(plan: Any, state: Any) -> None:
    """Every SM's first slot gets a CTA, then every SM's second."""
    for place in range(plan.sms * plan.slots):
        sm, slot = place // plan.slots, place % plan.slots
        order = slot * plan.sms + sm
        if order >= plan.queue.shape[0]:
            continue
        state.counters[HEAD] = max(state.counters[HEAD], order + 1)
        start = slot * plan.latency[DISPATCH]
        ctas = state.ctas
        ctas[order, 0], ctas[order, 1], ctas[order, 2], ctas[order, 3] = plan.queue[order], sm, slot, start
        for k in range(plan.per_cta):
            w = slot * plan.per_cta + k
            base = plan.first_warp + w * plan.warp_size
            state.machine[sm, base + PC] = state.machine[sm, base + AGAIN] = plan.warp_start[k]
            state.tile_of[sm, w], state.order_of[sm, w] = plan.queue[order], order
            state.counted[sm, STALLED + k * N_STALLS + STALL_LAUNCH] += start
            state.machine[sm, w] = start


@jit
def _simulate(plan: Any, state: Any, memo: Any) -> None:
    _first_round(plan, state)
    heap, size = np.zeros(plan.sms + 1, np.int64), 0
    warps, keys = plan.sms * plan.warps, plan.sms * (plan.warps + QUARTERS)
    for sm in range(plan.sms):
        size = push(heap, size, event_key(plan, sm, 0, 0))
    while size > 0:
        place = heap[0] % keys
        size = pop(heap, size)
        sm = place // plan.warps if place < warps else (place - warps) // QUARTERS
        key = _advance(plan, state, memo, sm, heap[0] if size > 0 else NEVER)
        if key != NEVER:
            size = push(heap, size, key)


def _stuck(p: Plan, s: State) -> tuple[int, int, int]:
    """(tile, warp of its CTA, row) of the first warp that waits while nothing can happen."""
    rows = s.machine[:, p.first_warp : p.first_warp + p.warps * p.warp_size].reshape(-1, p.warp_size)
    tiles, orders = s.tile_of.ravel(), s.order_of.ravel()
    there = np.flatnonzero((tiles >= 0) & (s.left_of[orders] > 0))
    waiting = there[rows[there, WAITS_FOR] != -1]
    w = int(waiting[0] if len(waiting) else there[0])
    return int(tiles[w]), w % p.per_cta, int(rows[w, PC]) - (rows[w, WAITS_FOR] != TOGETHER)


#: Memos of the last jobs whose machines are alike, by what a machine depends on. One that is in use is not in here.
_memos: dict[bytes, Memo] = {}
KEPT_MEMOS = 3


def _borrow(job: Job, p: Plan, counted: int) -> tuple[bytes, Memo]:
    """The memo of machines like this job's, and the key under which to give it back."""
    numbers = (job.slots, job.persistent, job.l2 is None, len(job.rings), job.product_queue, job.code_held, job.fetch_pace)
    digest, latencies = hashlib.sha256(repr(numbers).encode()), job.latency[list(MACHINE_LATENCIES)]
    for array in (job.code, job.bundles, latencies, job.warp_start, job.mbarriers, job.stretch, job.stretch_size):
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    known = _memos.pop(digest.digest(), None)
    if known is None:
        oldest = _memos.pop(next(iter(_memos)), None) if len(_memos) >= KEPT_MEMOS else None
        known = memo(len(p.kinds), counted, keeps=True, instead_of=oldest)
    return digest.digest(), known


def cold() -> bool:
    """Whether the next run compiles the engine first."""
    return compiled.cold(_simulate)


#: The last runs of one SM, whole: candidates of a sweep that differ in what no engine reads have the same job.
_runs: list[tuple[Job, Run]] = []
KEPT_RUNS = 8


def kept_run(job: Job) -> Run:
    """:func:`run`, or what it gave for an equal job just before; its arrays cannot be written to."""
    if job.l2 is not None or job.record_limit:
        return run(job)
    found = next((made for known, made in _runs if known.equals(job)), None)
    if found is None:
        found = run(job)
        for f in fields(found):
            if isinstance(array := getattr(found, f.name), np.ndarray):
                array.setflags(write=False)
        _runs[KEPT_RUNS - 1 :] = []
        _runs.insert(0, (job, found))
    return found


def run(job: Job) -> Run:
    """Simulate ``job``. Raises RuntimeError on a deadlock: no event is left and CTAs have not ended."""
    p = plan(job)
    s = state(p, job, MOST_ANSWERS)
    key, remembered = (b"", memo(len(p.kinds), 1, keeps=False)) if p.strict else _borrow(job, p, s.totals.shape[1])
    s.control[:, RECORDING] = remembered.counts[KEEPS]
    with compiled.once(_simulate):
        _simulate(p, s, remembered)
    if not p.strict and remembered.counts[KEEPS]:
        _memos[key] = remembered
        while len(_memos) > KEPT_MEMOS:
            _memos.pop(next(iter(_memos)), None)
    last = int(s.control[:, LAST].max())
    if s.counters[FINISHED] < len(job.queue):
        raise RuntimeError(deadlock(last, *_stuck(p, s)))
    s.tiles[:-1][s.tiles[:-1, RESIDENT] == 0, :2] = len(s.tiles) - 1  # a tile that has left has no neighbours
    totals = s.totals + s.counted
    first_issued = totals.shape[1] - len(job.bundles)
    return Run(
        ticks=last, ctas=s.ctas, busy=totals[:, BUSY:USED_SMEM].reshape(p.sms, QUARTERS, N_PIPES + 1),
        shared=np.column_stack((totals[:, USED_SMEM], s.ports)),
        stalls=totals[:, STALLED:first_issued].reshape(p.sms, p.per_cta, N_STALLS),
        issued=totals[:, first_issued:].sum(axis=0), records=s.records[: s.counters[RECORDS]],
        events=int(totals[:, EVENTS].sum()), **({"traffic": s.traffic, "l2": s.tiles} if job.l2 else {}),
    )  # fmt: skip
