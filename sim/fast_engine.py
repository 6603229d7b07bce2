"""The fast engine: the contract of :mod:`.engine` as one compiled loop over integer arrays.

A binary heap of integers ``tick * keys + key`` orders events; the key is the warp number, or the number of warps plus the
sub-partition. That is the contract's order, so no tie is ever broken by insertion.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model.instructions import PIPES, Path
from ..model.program import Opcode

from .engine import (  # isort: skip
    BARRIER_BASE, BARRIER_PER_WARP, DELAY, DISPATCH, FIRST_BESIDE, FIRST_PIPE, GAP, GAP_BESIDE, GROUPS, LOOP_DEPTH,
    LSU_QUEUE, MBARRIER, PATH, PORT, PORT_BESIDE, PRODUCT, REPLACE, RESULT, SCOREBOARDS, SMEM, SMEM_LATENCY, SPILL,
    STALL_BARRIER, STALL_GROUP, STALL_LATENCY, STALL_LAUNCH, STALL_MBARRIER, STALL_PORT, STALL_PRODUCT, STALL_SCOREBOARD,
    STALL_SMEM, STALLS, TMA, Job, Run,
    deadlock,
)  # fmt: skip
from .fast_parts import N_PIPES, NEVER, complete, control, free_at, group_waits, jit, memory, pop, push, residents

ISSUE, WAIT_SCOREBOARD = int(Opcode.ISSUE), int(Opcode.WAIT_SCOREBOARD)
COMMIT, WAIT_GROUP = int(Opcode.COMMIT), int(Opcode.WAIT_GROUP)
BARRIER, LOOP, END = int(Opcode.BARRIER), int(Opcode.LOOP), int(Opcode.END)
SKIP, EXIT, DEPEND = int(Opcode.SKIP_IF_NEGATIVE), int(Opcode.EXIT), int(Opcode.DEPEND)
NAMED_ARRIVE, MB_ARRIVE, MB_WAIT = int(Opcode.NAMED_ARRIVE), int(Opcode.MB_ARRIVE), int(Opcode.MB_WAIT)
ADVANCE, MMA_COMMIT, MMA_WAIT = int(Opcode.ADVANCE), int(Opcode.MMA_COMMIT), int(Opcode.MMA_WAIT)
TILE = int(Opcode.TILE)
TMA_LOAD, WGMMA, TCGEN05 = int(Path.TMA_LOAD), int(Path.WGMMA), int(Path.TCGEN05)
TENSOR = PIPES.index("tensor")
SHARED, LOAD, TO_SMEM = int(Path.SMEM), int(Path.GLOBAL_LOAD), int(Path.GLOBAL_TO_SMEM)


# One function on purpose: split into calls that share this state it runs eight times slower (reference counts of its arrays).
@jit
def _simulate(
    code: Any, expressions: Any, tile_args: Any, warp_start: Any, queue: Any, sms: int, slots: int,
    bundles: Any, latency: Any, rate: Any, miss_ppm: Any, mbarriers: Any, ring_stages: Any, multicast: Any,
    product_queue: int, persistent: bool, record_limit: int, n_stalls: int,
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
    product_group = np.zeros((warps, GROUPS), np.int64)
    products_closed, product_until = np.zeros(warps, np.int64), np.zeros(warps, np.int64)
    steps = np.zeros((warps, max(1, ring_stages.shape[0])), np.int64)  # how often each ring went on
    waits_for = np.full(warps, -1, np.int64)  # 2 x mbarrier instance + parity, or -2 - named barrier
    instances = 0
    for b in range(mbarriers.shape[0]):
        instances += mbarriers[b, 2]
    pending = np.zeros(sms * slots * max(1, instances), np.int64)
    bytes_due, over_at = np.zeros_like(pending), np.zeros_like(pending)
    phase = np.zeros_like(pending)
    done_at = np.zeros((pending.shape[0], 2), np.int64)
    full_count = np.zeros(max(1, instances), np.int64)
    for b in range(mbarriers.shape[0]):
        for stage in range(mbarriers[b, 2]):
            full_count[mbarriers[b, 0] + stage] = mbarriers[b, 1]
    for c in range(pending.shape[0]):
        pending[c] = full_count[c % max(1, instances)]
    tensor_free = np.zeros(sms, np.int64)  # until when an SM's tensor cores are busy with a CTA's products
    product_runs = np.zeros(sms * 4, np.int64)  # until when each tensor core is busy with products
    product_ends = np.zeros((sms * 4, product_queue), np.int64)  # of the last ones issued, in a circle
    held_up = np.zeros(sms * 4, np.int64)  # by how much in all; products' ends are kept without it
    n_products, place_free = np.zeros(sms * 4, np.int64), np.zeros(sms * 4, np.int64)
    begun = np.zeros(warps, np.bool_)  # whether a warp has issued products that it has not committed yet
    arrived = np.zeros((sms * slots, 16), np.int64)
    left_of = np.full(queue.shape[0], per_cta, np.int64)  # warps of each CTA that have not ended it
    tile_of = np.full(warps, -1, np.int64)
    cta_of = np.zeros(warps, np.int64)
    again = np.zeros(warps, np.int64)  # where a persistent warp goes on with its next tile
    port_free = np.zeros(sms * 4, np.int64)
    pipe_free = np.zeros((sms * 4, N_PIPES), np.int64)
    served = np.zeros(sms * 4, np.int64)
    wake = np.full(sms * 4, NEVER, np.int64)
    free = np.zeros((sms, 3), np.int64)
    members, n_members, home, rank = residents(sms, slots, per_cta)
    busy = np.zeros((sms, 4, N_PIPES + 1), np.int64)
    used = np.zeros((sms, 3), np.int64)
    missed = np.zeros((sms, max(1, miss_ppm.shape[0])), np.int64)
    stalls = np.zeros((sms, per_cta, n_stalls), np.int64)
    issued = np.zeros(bundles.shape[0], np.int64)
    ctas = np.full((queue.shape[0], 5), -1, np.int64)
    records = np.zeros((record_limit, 7), np.int64)
    n_records = head = events = last = finished = 0

    for slot in range(sms * slots):  # the first round: every SM's first slot, then every SM's second
        order = (slot % slots) * sms + slot // slots
        if order >= queue.shape[0]:
            continue
        head = max(head, order + 1)
        start = (slot % slots) * latency[DISPATCH]
        ctas[order, 0], ctas[order, 1], ctas[order, 2], ctas[order, 3] = queue[order], slot // slots, slot % slots, start
        for i in range(per_cta):
            w = slot * per_cta + i
            pc[w], tile_of[w], cta_of[w] = warp_start[i], queue[order], order
            again[w] = warp_start[i]
            stalls[slot // slots, i, STALL_LAUNCH] += start
            size = push(heap, size, start * keys + w)

    while size > 0:
        if size > heap.shape[0] - 2 * per_cta - 2:  # superseded wake-ups can pile up
            heap = np.concatenate((heap, np.zeros_like(heap)))
        event = heap[0]
        size = pop(heap, size)
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
                    if not ready[w] or free_at(s, bundles[code[pc[w], 1]], port_free, pipe_free, place_free) > t:
                        continue
                    kind = code[pc[w], 1]
                    first = bundles[kind, PATH] == WGMMA and not begun[w]
                    if first and group_waits(members[s, :n], begun, ready, bundles, code, pc):
                        continue
                    sm, i = s // 4, w % per_cta
                    ready[w] = False
                    served[s] = rank[w]
                    beside = product_runs[s] > t and bundles[kind, PATH] != WGMMA
                    port = bundles[kind, PORT_BESIDE if beside else PORT]
                    port_free[s] = t + port
                    busy[sm, s % 4, N_PIPES] += port
                    first = FIRST_BESIDE if beside else FIRST_PIPE
                    for p in range(N_PIPES):
                        if bundles[kind, first + p] > 0:
                            begin = max(t, pipe_free[s, p])  # later than now for a product only
                            pipe_free[s, p] = begin + bundles[kind, first + p]
                            busy[sm, s % 4, p] += bundles[kind, first + p]
                    if beside and bundles[kind, DELAY] > 0:
                        pipe_free[s, TENSOR] += bundles[kind, DELAY]
                        product_runs[s] = pipe_free[s, TENSOR]
                        held_up[s] += bundles[kind, DELAY]
                        place_free[s] += bundles[kind, DELAY]
                    issued[kind] += 1
                    resume = t + bundles[kind, GAP_BESIDE if beside else GAP]
                    result_at[w] = max(result_at[w], t + port + bundles[kind, RESULT])
                    if bundles[kind, PATH] == WGMMA:
                        product_runs[s] = pipe_free[s, TENSOR]
                        begun[w] = True
                        ends = pipe_free[s, TENSOR] - held_up[s]
                        product_ends[s, n_products[s] % product_queue] = ends
                        n_products[s] += 1
                        place_free[s] = product_ends[s, n_products[s] % product_queue] + held_up[s]
                        product_until[w] = max(product_until[w], ends + bundles[kind, RESULT])
                    stalls[sm, i, reason_of[w]] += t - since[w]
                    path = bundles[kind, PATH]
                    row = code[pc[w]]
                    if path == TCGEN05:
                        start = max(t, tensor_free[sm])
                        tensor_free[sm] = start + bundles[kind, RESULT]
                        for quarter in range(4):
                            busy[sm, quarter, TENSOR] += bundles[kind, RESULT]
                        product_until[w] = max(product_until[w], tensor_free[sm] + latency[PRODUCT])
                    if path in (WGMMA, TCGEN05):
                        used[sm, 0] += bundles[kind, SMEM]
                    elif bundles[kind, SMEM] > 0:
                        free[sm, 0] = max(t, free[sm, 0]) + bundles[kind, SMEM]
                        used[sm, 0] += bundles[kind, SMEM]
                        if path == SHARED:
                            if row[3] >= 0:
                                board[w, row[3]] = max(board[w, row[3]], free[sm, 0] + latency[SMEM_LATENCY])
                            full = free[sm, 0] - latency[LSU_QUEUE]
                            if full > resume:
                                stalls[sm, i, STALL_SMEM] += full - resume
                                resume = full
                    if bundles[kind, SPILL] > 0:
                        memory(t, bundles[kind, SPILL], -1, sm, rate, latency, miss_ppm, multicast, missed, free, used)
                    if LOAD <= path < WGMMA:
                        total, through = row[4], row[2] - left[w] + 1
                        moved = total * through // row[2] - done_bytes[w]
                        done_bytes[w] += moved
                        arrives = memory(t, moved, row[5], sm, rate, latency, miss_ppm, multicast, missed, free, used)
                        if path == TO_SMEM:
                            open_until[w] = max(open_until[w], arrives)
                        elif path == LOAD:
                            board[w, row[3]] = max(board[w, row[3]], arrives)
                        elif path == TMA_LOAD:
                            c = (w // per_cta) * instances + mbarriers[row[9], 0] + steps[w, row[10]] % mbarriers[row[9], 2]
                            bytes_due[c] -= moved
                            over_at[c] = max(over_at[c], arrives + latency[TMA])
                            if pending[c] == 0 and bytes_due[c] == 0:
                                size = complete(
                                    c, w // per_cta, per_cta, t, full_count[c % instances], pending, over_at, phase, done_at,
                                    waits_for, since, stalls, sm, latency[MBARRIER], heap, size, keys,
                                )  # fmt: skip
                    left[w] -= 1
                    if left[w] == 0:
                        if n_records < record_limit:
                            slot = w // per_cta
                            records[n_records, 0], records[n_records, 1] = row_start[w], resume
                            records[n_records, 2], records[n_records, 3] = sm, slot % slots
                            records[n_records, 4], records[n_records, 5], records[n_records, 6] = i, tile_of[w], pc[w]
                            n_records += 1
                        pc[w] += 1
                        done_bytes[w] = 0
                    size = push(heap, size, resume * keys + w)
                    break
            # wake again when the port, or failing that a pipe somebody waits for, is free
            soonest = NEVER
            for j in range(n_members[s]):
                w = members[s, j]
                if ready[w]:
                    soonest = min(soonest, free_at(s, bundles[code[pc[w], 1]], port_free, pipe_free, place_free))
            if soonest < NEVER:
                wake[s] = soonest
                size = push(heap, size, soonest * keys + key)
            continue

        w = key
        slot, i = w // per_cta, w % per_cta
        sm = slot // slots
        args = tile_args[tile_of[w]]
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
                at = max(t, free_at(s, bundles[row[1]], port_free, pipe_free, place_free))
                reason_of[w] = STALL_PORT
                for p in range(N_PIPES):
                    if bundles[row[1], FIRST_PIPE + p] > 0 and pipe_free[s, p] > port_free[s] and pipe_free[s, p] == at:
                        reason_of[w] = p
                if at < wake[s]:
                    wake[s] = at
                    size = push(heap, size, at * keys + warps + s)
                break
            if op in (WAIT_SCOREBOARD, WAIT_GROUP, DEPEND, MMA_WAIT):
                reason = STALL_SCOREBOARD
                if op == DEPEND:
                    reason = STALL_LATENCY
                    until = result_at[w]
                elif op == WAIT_SCOREBOARD:
                    until = board[w, row[3]]
                elif op == MMA_WAIT:
                    reason = STALL_PRODUCT
                    number = products_closed[w] - row[3]
                    until = product_group[w, (number - 1) % GROUPS] if number > 0 else 0
                    until += held_up[home[w]] if until > 0 else 0
                    if until > t:  # it may be held up meanwhile: look again then
                        stalls[sm, i, reason] += until - t
                        size = push(heap, size, until * keys + w)
                        break
                else:
                    reason = STALL_GROUP
                    number = closed[w] - row[3]
                    until = group[w, (number - 1) % GROUPS] if number > 0 else 0
                pc[w] += 1
                if until > t:
                    stalls[sm, i, reason] += until - t
                    size = push(heap, size, until * keys + w)
                    break
            elif op == COMMIT:
                before = group[w, (closed[w] - 1) % GROUPS] if closed[w] > 0 else 0
                group[w, closed[w] % GROUPS] = max(before, open_until[w])
                closed[w] += 1
                open_until[w] = 0
                pc[w] += 1
            elif op in (BARRIER, NAMED_ARRIVE):
                pc[w] += 1
                arrived[slot, row[3]] += 1
                if op == BARRIER:
                    since[w] = t
                    waits_for[w] = -2 - row[3]
                if arrived[slot, row[3]] == row[2]:
                    arrived[slot, row[3]] = 0
                    release = t + latency[BARRIER_BASE] + latency[BARRIER_PER_WARP] * row[2]
                    for k in range(per_cta):
                        v = slot * per_cta + k
                        if waits_for[v] == -2 - row[3]:
                            waits_for[v] = -1
                            stalls[sm, k, STALL_BARRIER] += release - since[v]
                            size = push(heap, size, release * keys + v)
                if op == BARRIER:
                    break
            elif op == MB_ARRIVE:
                c = slot * instances + mbarriers[row[9], 0] + steps[w, row[10]] % mbarriers[row[9], 2]
                pending[c] -= row[2]
                bytes_due[c] += row[4]
                over_at[c] = max(over_at[c], max(t, product_until[w]) if row[3] == 1 else t)
                pc[w] += 1
                if pending[c] == 0 and bytes_due[c] == 0:
                    size = complete(
                        c, slot, per_cta, t, full_count[c % instances], pending, over_at, phase, done_at, waits_for, since,
                        stalls, sm, latency[MBARRIER], heap, size, keys,
                    )  # fmt: skip
            elif op == MB_WAIT:
                turn = steps[w, row[10]]
                c = slot * instances + mbarriers[row[9], 0] + turn % mbarriers[row[9], 2]
                parity = (turn // mbarriers[row[9], 2] + row[2]) % 2
                pc[w] += 1
                if phase[c] % 2 == parity:
                    since[w] = t
                    waits_for[w] = 2 * c + parity
                    break
                if done_at[c, parity] > t:
                    stalls[sm, i, STALL_MBARRIER] += done_at[c, parity] - t
                    size = push(heap, size, done_at[c, parity] * keys + w)
                    break
            elif op == ADVANCE:
                steps[w, row[10]] += 1
                pc[w] += 1
            elif op == TILE:
                pc[w] += 1
                again[w] = pc[w]
            elif op == MMA_COMMIT:
                product_group[w, products_closed[w] % GROUPS] = product_until[w]
                products_closed[w] += 1
                begun[w] = False
                pc[w] += 1
            elif op in (LOOP, END, SKIP):
                pc[w] = control(code, pc[w], expressions, args, loops[w], trips[w])
            else:  # EXIT
                order = cta_of[w]
                left_of[order] -= 1
                if left_of[order] == 0:
                    ctas[order, 4] = t
                    finished += 1
                if persistent:
                    order += sms * slots
                    if order < queue.shape[0]:
                        pc[w], tile_of[w], cta_of[w] = again[w], queue[order], order
                        if ctas[order, 3] < 0:  # the first of the slot's warps
                            ctas[order, 0], ctas[order, 1], ctas[order, 2], ctas[order, 3] = queue[order], sm, slot % slots, t
                        args = tile_args[tile_of[w]]
                        continue
                    break
                if left_of[order] == 0 and head < queue.shape[0]:
                    start = t + latency[REPLACE]
                    ctas[head, 0], ctas[head, 1], ctas[head, 2], ctas[head, 3] = queue[head], sm, slot % slots, start
                    arrived[slot, :] = 0
                    for c in range(slot * instances, (slot + 1) * instances):
                        pending[c], bytes_due[c], over_at[c], phase[c] = full_count[c % instances], 0, 0, 0
                        done_at[c, 0] = done_at[c, 1] = 0
                    arrived[slot, :] = 0
                    for k in range(per_cta):
                        v = slot * per_cta + k
                        pc[v], closed[v], open_until[v], tile_of[v], cta_of[v] = warp_start[k], 0, 0, queue[head], head
                        products_closed[v] = product_until[v] = result_at[v] = 0
                        begun[v] = False
                        board[v, :] = 0
                        steps[v, :] = 0
                        stalls[sm, k, STALL_LAUNCH] += start - t
                        size = push(heap, size, start * keys + v)
                    head += 1
                break
    stuck = -1  # the first warp that waits while nothing can happen
    if finished < queue.shape[0]:
        for w in range(warps):
            if tile_of[w] >= 0 and left_of[cta_of[w]] > 0 and (waits_for[w] != -1 or stuck < 0):
                stuck = w
                if waits_for[w] != -1:
                    break
    waiting = tile_of[stuck] if stuck >= 0 else -1
    return last, ctas, busy, used, stalls, issued, records[:n_records], events, waiting, stuck, pc[max(0, stuck)] - 1


def run(job: Job) -> Run:
    """Simulate ``job``. Raises RuntimeError on a deadlock: no event is left and CTAs have not ended."""
    arrays = (job.code, job.expressions, job.tile_args, job.warp_start, job.queue)
    prices = (job.bundles, job.latency, job.rate, job.miss_ppm, job.mbarriers, job.rings, job.multicast)
    last, ctas, busy, used, stalls, issued, records, events, waiting, stuck, row = _simulate(
        *arrays, job.sms, job.slots, *prices, job.product_queue, job.persistent, job.record_limit, len(STALLS)
    )
    if waiting >= 0:
        raise RuntimeError(deadlock(last, waiting, stuck % len(job.warp_start), row))
    return Run(
        ticks=int(last), ctas=ctas, busy=busy, shared=used, stalls=stalls, issued=issued, records=records, events=int(events)
    )
