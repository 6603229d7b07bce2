"""The fast engine: the contract of :mod:`.engine` as one compiled loop over integer arrays.

A binary heap of integers ``tick * keys + key`` orders events; the key is the warp number, or the number of warps plus the
sub-partition. That is the contract's order, so no tie is ever broken by insertion.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from ..model.instructions import PIPES, Path
from ..model.program import Opcode
from .engine import (
    BARRIER_BASE,
    BARRIER_PER_WARP,
    DISPATCH,
    FIRST_PIPE,
    GAP,
    GROUPS,
    HBM_LATENCY,
    HBM_RATE,
    L2_LATENCY,
    L2_RATE,
    LOOP_DEPTH,
    LSU_QUEUE,
    PATH,
    PORT,
    REPLACE,
    RESULT,
    SCOREBOARDS,
    SMEM,
    SMEM_LATENCY,
    STALL_BARRIER,
    STALL_GROUP,
    STALL_LATENCY,
    STALL_LAUNCH,
    STALL_PORT,
    STALL_SCOREBOARD,
    STALL_SMEM,
    STALLS,
    Job,
    Run,
)

NEVER = np.int64(1) << 62
N_PIPES = len(PIPES)
MILLION = 1_000_000

ISSUE, WAIT_SCOREBOARD = int(Opcode.ISSUE), int(Opcode.WAIT_SCOREBOARD)
COMMIT, WAIT_GROUP = int(Opcode.COMMIT), int(Opcode.WAIT_GROUP)
BARRIER, LOOP, END = int(Opcode.BARRIER), int(Opcode.LOOP), int(Opcode.END)
SKIP, EXIT, DEPEND = int(Opcode.SKIP_IF_NEGATIVE), int(Opcode.EXIT), int(Opcode.DEPEND)
SHARED, LOAD, TO_SMEM = int(Path.SMEM), int(Path.GLOBAL_LOAD), int(Path.GLOBAL_TO_SMEM)

jit = nb.njit(cache=True, nogil=True)


@jit
def _push(heap: Any, size: Any, value: Any) -> Any:
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] <= value:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = value
    return size + 1


@jit
def _pop(heap: Any, size: Any) -> Any:
    """Remove the smallest value (the caller has read it); returns the new size."""
    size -= 1
    value = heap[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = value
    return size


@jit
def expression(row: Any, args: Any, loops: Any) -> Any:
    """Value of one :class:`~flashsim.model.program.Index`."""
    total = row[0]
    if row[1] >= 0:
        total += row[2] * args[row[1]]
    if row[3] >= 0:
        total += row[4] * loops[row[3]]
    if row[5] >= 0:
        total += row[6] * loops[row[5]]
    return total


@jit
def _free_at(s: Any, bundle: Any, port_free: Any, pipe_free: Any) -> Any:
    """When sub-partition ``s`` has its port and every pipe that ``bundle`` uses free."""
    at = port_free[s]
    for p in range(N_PIPES):
        if bundle[FIRST_PIPE + p] > 0 and pipe_free[s, p] > at:
            at = pipe_free[s, p]
    return at


@jit
def _memory(
    t: Any, size: Any, tensor: Any, sm: Any, rate: Any, latency: Any, miss_ppm: Any, missed: Any, free: Any, used: Any
) -> Any:
    """Queue ``size`` bytes at L2, and at HBM if L2 does not hold them; returns when they arrive."""
    cost = size * rate[L2_RATE, 0] // rate[L2_RATE, 1]
    start = max(t, free[sm, 1])
    free[sm, 1] = start + cost
    used[sm, 1] += cost
    done = free[sm, 1] + latency[L2_LATENCY]
    if tensor >= 0:
        missed[sm, tensor] += miss_ppm[tensor]
        if missed[sm, tensor] >= MILLION:
            missed[sm, tensor] -= MILLION
            cost = size * rate[HBM_RATE, 0] // rate[HBM_RATE, 1]
            start = max(t, free[sm, 2])
            free[sm, 2] = start + cost
            used[sm, 2] += cost
            done = max(done, free[sm, 2] + latency[HBM_LATENCY])
    return done


# One function on purpose: split into calls that share this state it runs eight times slower (reference counts of its arrays).
@jit
def _simulate(
    code: Any, expressions: Any, tile_args: Any, warp_start: Any, queue: Any, sms: int, slots: int,
    bundles: Any, latency: Any, rate: Any, miss_ppm: Any, record_limit: int, n_stalls: int,
) -> Any:
    per_cta = warp_start.shape[0]
    warps = sms * slots * per_cta
    keys = warps + sms * 4
    heap = np.zeros(2 * keys + 64, dtype=np.int64)
    size = 0
    reason_of = np.zeros(warps, np.int64)
    pc, left, done_bytes = np.zeros(warps, np.int64), np.zeros(warps, np.int64), np.zeros(warps, np.int64)
    since = np.zeros(warps, np.int64)  # when the warp began to wait
    row_start = np.zeros(warps, np.int64)
    ready = np.zeros(warps, np.bool_)
    loops = np.zeros((warps, LOOP_DEPTH), np.int64)
    trips = np.zeros((warps, LOOP_DEPTH), np.int64)
    board = np.zeros((warps, SCOREBOARDS), np.int64)
    group = np.zeros((warps, GROUPS), np.int64)
    result_at = np.zeros(warps, np.int64)
    closed, open_until = np.zeros(warps, np.int64), np.zeros(warps, np.int64)
    arrived = np.zeros((sms * slots, 16), np.int64)
    alive = np.zeros(sms * slots, np.int64)
    tile_of = np.full(sms * slots, -1, np.int64)
    cta_of = np.zeros(sms * slots, np.int64)
    port_free = np.zeros(sms * 4, np.int64)
    pipe_free = np.zeros((sms * 4, N_PIPES), np.int64)
    served = np.zeros(sms * 4, np.int64)
    wake = np.full(sms * 4, NEVER, np.int64)
    free = np.zeros((sms, 3), np.int64)
    # warps of each sub-partition, in global warp order
    members = np.zeros((sms * 4, slots * per_cta), np.int64)
    n_members = np.zeros(sms * 4, np.int64)
    home = np.zeros(warps, np.int64)
    for w in range(warps):
        sm = w // (slots * per_cta)
        home[w] = sm * 4 + (w % (slots * per_cta)) % 4
        members[home[w], n_members[home[w]]] = w
        n_members[home[w]] += 1
    rank = np.zeros(warps, np.int64)
    for s in range(sms * 4):
        for i in range(n_members[s]):
            rank[members[s, i]] = i

    busy = np.zeros((sms, 4, N_PIPES + 1), np.int64)
    used = np.zeros((sms, 3), np.int64)
    missed = np.zeros((sms, max(1, miss_ppm.shape[0])), np.int64)
    stalls = np.zeros((sms, per_cta, n_stalls), np.int64)
    issued = np.zeros(bundles.shape[0], np.int64)
    ctas = np.zeros((queue.shape[0], 5), np.int64)
    records = np.zeros((record_limit, 7), np.int64)
    n_records = head = events = last = 0

    for slot in range(sms * slots):  # the first round: every SM's first slot, then every SM's second
        order = (slot % slots) * sms + slot // slots
        if order >= queue.shape[0]:
            continue
        tile_of[slot] = queue[order]
        head = max(head, order + 1)
        start = (slot % slots) * latency[DISPATCH]
        cta_of[slot] = order
        ctas[order, 0], ctas[order, 1], ctas[order, 2], ctas[order, 3] = queue[order], slot // slots, slot % slots, start
        alive[slot] = per_cta
        for i in range(per_cta):
            w = slot * per_cta + i
            pc[w] = warp_start[i]
            stalls[slot // slots, i, STALL_LAUNCH] += start
            size = _push(heap, size, start * keys + w)

    while size > 0:
        if size > heap.shape[0] - 64:  # superseded wake-ups can pile up
            heap = np.concatenate((heap, np.zeros_like(heap)))
        event = heap[0]
        size = _pop(heap, size)
        events += 1
        t, key = event // keys, event % keys
        if key >= warps:
            s = key - warps
            if wake[s] != t:
                continue
            wake[s] = NEVER
            if port_free[s] <= t:
                # round robin: the first waiting warp after the last one served whose pipes are free
                n = n_members[s]
                for step in range(1, n + 1):
                    w = members[s, (served[s] + step) % n]
                    if not ready[w] or _free_at(s, bundles[code[pc[w], 1]], port_free, pipe_free) > t:
                        continue
                    kind = code[pc[w], 1]
                    sm, i = s // 4, w % per_cta
                    ready[w] = False
                    served[s] = rank[w]
                    port_free[s] = t + bundles[kind, PORT]
                    busy[sm, s % 4, N_PIPES] += bundles[kind, PORT]
                    for p in range(N_PIPES):
                        if bundles[kind, FIRST_PIPE + p] > 0:
                            pipe_free[s, p] = t + bundles[kind, FIRST_PIPE + p]
                            busy[sm, s % 4, p] += bundles[kind, FIRST_PIPE + p]
                    issued[kind] += 1
                    resume = t + bundles[kind, GAP]
                    result_at[w] = max(result_at[w], t + bundles[kind, PORT] + bundles[kind, RESULT])
                    stalls[sm, i, reason_of[w]] += t - since[w]
                    path = bundles[kind, PATH]
                    row = code[pc[w]]
                    if bundles[kind, SMEM] > 0:
                        free[sm, 0] = max(t, free[sm, 0]) + bundles[kind, SMEM]
                        used[sm, 0] += bundles[kind, SMEM]
                        if path == SHARED:
                            if row[3] >= 0:
                                board[w, row[3]] = max(board[w, row[3]], free[sm, 0] + latency[SMEM_LATENCY])
                            full = free[sm, 0] - latency[LSU_QUEUE]
                            if full > resume:
                                stalls[sm, i, STALL_SMEM] += full - resume
                                resume = full
                    if path >= LOAD:
                        total, through = row[4], row[2] - left[w] + 1
                        moved = total * through // row[2] - done_bytes[w]
                        done_bytes[w] += moved
                        arrives = _memory(t, moved, row[5], sm, rate, latency, miss_ppm, missed, free, used)
                        if path == TO_SMEM:
                            open_until[w] = max(open_until[w], arrives)
                        elif path == LOAD:
                            board[w, row[3]] = max(board[w, row[3]], arrives)
                    left[w] -= 1
                    if left[w] == 0:
                        if n_records < record_limit:
                            slot = w // per_cta
                            records[n_records, 0], records[n_records, 1] = row_start[w], resume
                            records[n_records, 2], records[n_records, 3] = sm, slot % slots
                            records[n_records, 4], records[n_records, 5], records[n_records, 6] = i, tile_of[slot], pc[w]
                            n_records += 1
                        pc[w] += 1
                        done_bytes[w] = 0
                    size = _push(heap, size, resume * keys + w)
                    break
            # wake again when the port, or failing that a pipe somebody waits for, is free
            soonest = NEVER
            for j in range(n_members[s]):
                w = members[s, j]
                if ready[w]:
                    soonest = min(soonest, _free_at(s, bundles[code[pc[w], 1]], port_free, pipe_free))
            if soonest < NEVER:
                wake[s] = soonest
                size = _push(heap, size, soonest * keys + key)
            continue

        w = key
        slot, i = w // per_cta, w % per_cta
        sm = slot // slots
        args = tile_args[tile_of[slot]]
        last = max(last, t)
        while True:
            row = code[pc[w]]
            op = row[0]
            if op == ISSUE:
                if left[w] == 0:
                    left[w] = row[2]
                    row_start[w] = t
                ready[w] = True
                since[w] = t
                s = home[w]
                at = max(t, _free_at(s, bundles[row[1]], port_free, pipe_free))
                reason_of[w] = STALL_PORT
                for p in range(N_PIPES):
                    if bundles[row[1], FIRST_PIPE + p] > 0 and pipe_free[s, p] > port_free[s] and pipe_free[s, p] == at:
                        reason_of[w] = p
                if at < wake[s]:
                    wake[s] = at
                    size = _push(heap, size, at * keys + warps + s)
                break
            if op in (WAIT_SCOREBOARD, WAIT_GROUP, DEPEND):
                reason = STALL_SCOREBOARD
                if op == DEPEND:
                    reason = STALL_LATENCY
                    until = result_at[w]
                elif op == WAIT_SCOREBOARD:
                    until = board[w, row[3]]
                else:
                    reason = STALL_GROUP
                    number = closed[w] - row[3]
                    until = group[w, (number - 1) % GROUPS] if number > 0 else 0
                pc[w] += 1
                if until > t:
                    stalls[sm, i, reason] += until - t
                    size = _push(heap, size, until * keys + w)
                    break
            elif op == COMMIT:
                before = group[w, (closed[w] - 1) % GROUPS] if closed[w] > 0 else 0
                group[w, closed[w] % GROUPS] = max(before, open_until[w])
                closed[w] += 1
                open_until[w] = 0
                pc[w] += 1
            elif op == BARRIER:
                pc[w] += 1
                since[w] = t
                arrived[slot, row[3]] += 1
                if arrived[slot, row[3]] == per_cta:
                    arrived[slot, row[3]] = 0
                    release = t + latency[BARRIER_BASE] + latency[BARRIER_PER_WARP] * per_cta
                    for k in range(per_cta):
                        v = slot * per_cta + k
                        stalls[sm, k, STALL_BARRIER] += release - since[v]
                        size = _push(heap, size, release * keys + v)
                break
            elif op == LOOP:
                n = expression(expressions[row[3]], args, loops[w])
                depth = code[row[7], 6]
                if n <= 0:
                    pc[w] = row[7] + 1
                else:
                    loops[w, depth] = 0
                    trips[w, depth] = n
                    pc[w] += 1
            elif op == END:
                depth = row[6]
                loops[w, depth] += 1
                if loops[w, depth] < trips[w, depth]:
                    pc[w] = row[7] + 1
                else:
                    loops[w, depth] = 0
                    pc[w] += 1
            elif op == SKIP:
                pc[w] = row[7] if expression(expressions[row[3]], args, loops[w]) < 0 else pc[w] + 1
            else:  # EXIT
                alive[slot] -= 1
                if alive[slot] == 0:
                    ctas[cta_of[slot], 4] = t
                    if head < queue.shape[0]:
                        start = t + latency[REPLACE]
                        tile_of[slot], cta_of[slot] = queue[head], head
                        ctas[head, 0], ctas[head, 1], ctas[head, 2], ctas[head, 3] = queue[head], sm, slot % slots, start
                        head += 1
                        alive[slot] = per_cta
                        for k in range(per_cta):
                            v = slot * per_cta + k
                            pc[v], closed[v], open_until[v] = warp_start[k], 0, 0
                            board[v, :] = 0
                            stalls[sm, k, STALL_LAUNCH] += start - t
                            size = _push(heap, size, start * keys + v)
                break
    waiting = -1
    for slot in range(sms * slots):
        if alive[slot] > 0:
            waiting = tile_of[slot]
    return last, ctas, busy, used, stalls, issued, records[:n_records], events, waiting


def run(job: Job) -> Run:
    """Simulate ``job``. Raises RuntimeError on a deadlock: no event is left and CTAs have not ended."""
    arrays = (job.code, job.expressions, job.tile_args, job.warp_start, job.queue)
    prices = (job.bundles, job.latency, job.rate, job.miss_ppm)
    last, ctas, busy, used, stalls, issued, records, events, waiting = _simulate(
        *arrays, job.sms, job.slots, *prices, job.record_limit, len(STALLS)
    )
    if waiting >= 0:
        raise RuntimeError(f"deadlock at tick {last}: no event is left and tile {waiting} has not ended")
    return Run(
        ticks=int(last), ctas=ctas, busy=busy, shared=used, stalls=stalls, issued=issued, records=records, events=int(events)
    )
