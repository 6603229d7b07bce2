"""What the fast engine's machine asks for: how loops and tiles go on, and when loads land.

:func:`answer` is asked at a tick and answers with one number, on which the machine acts. It is asked in the order of events,
by the machine itself or by the memo that stands in for it, and keeps its own books.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model.instructions import Path

# isort: off
from .engine import (
    CHIP_RATE, COPY_GROUPS, HBM_LATENCY, HBM_RATE, L2_LATENCY, L2_RATE, MBARRIER, PATH, REPLACE, STORE, STORE_RATE, TMA,
)  # fmt: skip
from .fast_layout import CLOSED, COPIES, FINISHED, GROUP, HEAD, LAND, MOVED, OPEN, OUTSIDE_MBARRIER, OUTSIDE_WARP, OVER
from .fast_lru import BASE, BLOCKS, DIRTY, FILLED, FIRST_SIZE, L2_READ, L2_WRITE, PLANE, RESIDENT, TO_ASK, access
from .fast_parts import control, expression, part
from .fast_share import HBM, L2, PROGRESS, UNIT, ask, go_on, reached
# isort: on

LOAD, TO_SMEM = int(Path.GLOBAL_LOAD), int(Path.GLOBAL_TO_SMEM)
TMA_LOAD, TMA_STORE = int(Path.TMA_LOAD), int(Path.TMA_STORE)
MILLION = 1_000_000

#: Questions, with their operands a, b, x, y and the answer.
CONTROL = 0  # warp, row: the row that follows a LOOP, END or SKIP_IF_NEGATIVE
LEAVE = 1  # warp: it has ended its tile; 1 where it (persistent) or a new CTA goes on with another
REQUEST = 2  # warp, row, bytes, mbarrier: a bundle moves bytes; 0
CLOSE = 3  # warp: a cp.async group is closed; 0
GROUPS_LEFT = 4  # warp, groups that may be in flight: ticks until no more are
LANDED = 5  # warp, scoreboard: ticks until its loads have landed
SETTLE = 6  # mbarrier, parity, ticks until its arrivals are over: a phase's end is known and nobody waits; 0
RELEASE = 7  # the same, place in the order of events: ticks until it is over
COMPLETED = 8  # mbarrier, parity, warp: ticks until the last phase of that parity is over
SPILLED = 9  # warp, row, bytes: a bundle writes registers through to L2; 0


@part
def answer(plan: Any, state: Any, sm: int, t: Any, kind: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """The answer to a question of any kind."""
    out = np.int64(0)
    if kind == CONTROL:
        args = plan.tile_args[state.tile_of[sm, a]]
        out = control(plan.code, b, plan.expressions, args, state.loops[sm, a], state.trips[sm, a])
    elif kind == LEAVE:
        out = leave(plan, state, sm, t, a)
    elif kind == REQUEST:
        request(plan, state, sm, t, a, b, x, y)
    elif kind == SPILLED:
        spill(plan, state, sm, t, x)
    elif kind == CLOSE:
        close(plan, state, sm, a)
    elif kind == GROUPS_LEFT:
        out = groups_left(plan, state, sm, t, a, b)
    elif kind == LANDED:
        out = landed(plan, state, sm, t, a, b)
    elif kind == COMPLETED:
        out = completed(plan, state, sm, t, a, b)
    else:
        settle(plan, state, sm, t, a, b, x)
        out = completed(plan, state, sm, t, a, b) if kind == RELEASE else out
    return out


@part
def _later(plan: Any, state: Any, sm: int, place: Any, other: Any) -> None:
    """What lands at ``place`` lands with what lands at ``other``."""
    outside = state.outside[sm]
    outside[place] = max(outside[place], outside[other])
    if plan.chip:
        for q in range(2):
            state.marks_of[sm, place, q] = max(state.marks_of[sm, place, q], state.marks_of[sm, other, q])


@part
def _clear(plan: Any, state: Any, sm: int, place: Any) -> None:
    state.outside[sm, place] = 0
    if plan.chip:
        state.marks_of[sm, place, L2] = state.marks_of[sm, place, HBM] = 0


@part
def certain(state: Any, sm: int, place: Any) -> Any:
    """Whether L2 and HBM have served what lands at ``place``, so that no request to come can delay it."""
    marks, queues = state.marks_of[sm, place], state.queues
    return marks[L2] <= queues[L2, PROGRESS] and marks[HBM] <= queues[HBM, PROGRESS]


@part
def _until(plan: Any, state: Any, sm: int, t: Any, place: Any, after: Any) -> Any:
    """Ticks until what lands at ``place`` has, were nobody else to ask. ``after``: from the answers of L2 and HBM on."""
    at = state.outside[sm, place]
    if plan.chip:
        for q in range(2):
            mark = state.marks_of[sm, place, q]
            if mark > 0:
                answered = reached(state.queues[q], state.marks[q], state.turns[q], state.changes[q], mark)
                at = max(at, answered + plan.latency[HBM_LATENCY if q == HBM else L2_LATENCY] + after)
    return max(0, at - t)


@part
def close(plan: Any, state: Any, sm: int, warp: Any) -> None:
    w = warp * OUTSIDE_WARP
    closed = state.outside[sm, w + CLOSED]
    group = w + GROUP + closed % COPY_GROUPS
    _clear(plan, state, sm, group)
    if closed > 0:
        _later(plan, state, sm, group, w + GROUP + (closed - 1) % COPY_GROUPS)
    _later(plan, state, sm, group, w + OPEN)
    _clear(plan, state, sm, w + OPEN)
    state.outside[sm, w + CLOSED] += 1


@part
def group_of(state: Any, sm: int, warp: Any, most: Any) -> Any:
    """Where the warp's last group lands that may not be in flight; -1 for none."""
    number = state.outside[sm, warp * OUTSIDE_WARP + CLOSED] - most
    return warp * OUTSIDE_WARP + GROUP + (number - 1) % COPY_GROUPS if number > 0 else np.int64(-1)


@part
def board_of(warp: Any, board: Any) -> Any:
    """Where loads to a warp's scoreboard land."""
    return warp * OUTSIDE_WARP + LAND + board


@part
def over_of(plan: Any, c: Any, parity: Any) -> Any:
    """Where an mbarrier's last phase of a parity is over."""
    return plan.outside_mbarrier + c * OUTSIDE_MBARRIER + OVER + parity


@part
def groups_left(plan: Any, state: Any, sm: int, t: Any, warp: Any, most: Any) -> Any:
    place = group_of(state, sm, warp, most)
    return _until(plan, state, sm, t, place, 0) if place >= 0 else np.int64(0)


@part
def landed(plan: Any, state: Any, sm: int, t: Any, warp: Any, board: Any) -> Any:
    return _until(plan, state, sm, t, board_of(warp, board), 0)


@part
def completed(plan: Any, state: Any, sm: int, t: Any, c: Any, parity: Any) -> Any:
    return _until(plan, state, sm, t, over_of(plan, c, parity), plan.latency[TMA] + plan.latency[MBARRIER])


@part
def settle(plan: Any, state: Any, sm: int, t: Any, c: Any, parity: Any, after: Any) -> None:
    """The phase is over ``after`` ticks from now, or when its copies have landed."""
    copies, over, outside = plan.outside_mbarrier + c * OUTSIDE_MBARRIER + COPIES, over_of(plan, c, parity), state.outside[sm]
    _clear(plan, state, sm, over)
    _later(plan, state, sm, over, copies)
    outside[over] = max(t + after, outside[over]) + plan.latency[MBARRIER]
    _clear(plan, state, sm, copies)


@part
def leave(plan: Any, state: Any, sm: int, t: Any, w: Any) -> Any:
    counters, order = state.counters, state.order_of[sm, w]
    state.left_of[order] -= 1
    ended = state.left_of[order] == 0
    if ended:
        state.ctas[order, 4] = t
        counters[FINISHED] += 1
    if plan.persistent:
        order = _following(plan, state, order)
        if order >= plan.queue.shape[0]:
            return 0
        state.tile_of[sm, w], state.order_of[sm, w] = plan.queue[order], order
        if state.ctas[order, 3] < 0:  # the first of the slot's warps
            _begin(plan, state, sm, w // plan.per_cta, order, t)
        return 1
    if not ended or counters[HEAD] >= plan.queue.shape[0]:
        return 0
    slot, order = w // plan.per_cta, counters[HEAD]
    counters[HEAD] += 1
    _begin(plan, state, sm, slot, order, t + plan.latency[REPLACE])
    for v in range(slot * plan.per_cta, (slot + 1) * plan.per_cta):
        state.tile_of[sm, v], state.order_of[sm, v] = plan.queue[order], order
        for i in range(v * OUTSIDE_WARP, (v + 1) * OUTSIDE_WARP):
            _clear(plan, state, sm, i)
    first = plan.outside_mbarrier + slot * plan.instances * OUTSIDE_MBARRIER
    for i in range(first, first + plan.instances * OUTSIDE_MBARRIER):
        _clear(plan, state, sm, i)
    return 1


@part
def _following(plan: Any, state: Any, order: Any) -> Any:
    """The next CTA of a persistent slot: decided when the first of its warps asks."""
    if state.follows[order] < 0:
        if plan.dynamic:
            state.follows[order] = state.counters[HEAD]
            state.counters[HEAD] += 1
        else:
            state.follows[order] = order + plan.sms * plan.slots
    return state.follows[order]


@part
def _begin(plan: Any, state: Any, sm: int, slot: Any, order: Any, t: Any) -> None:
    ctas = state.ctas
    ctas[order, 0], ctas[order, 1], ctas[order, 2], ctas[order, 3] = plan.queue[order], sm, slot, t


@part
def spill(plan: Any, state: Any, sm: int, t: Any, size: Any) -> None:
    """Queue at L2: nothing waits for it but what is asked for later."""
    _port(plan, state, sm, t, size)
    if plan.chip:
        _serve(state, t)
        _queue(plan, state, L2, sm, size, 0)


@part
def _port(plan: Any, state: Any, sm: int, t: Any, size: Any) -> Any:
    """When the SM's own port to L2 has served a request."""
    cost = size * plan.rate[L2_RATE, 0] // plan.rate[L2_RATE, 1]
    state.outside[sm, plan.outside_ports] = max(t, state.outside[sm, plan.outside_ports]) + cost
    state.ports[sm, 0] += cost
    return state.outside[sm, plan.outside_ports]


@part
def _serve(state: Any, t: Any) -> None:
    """L2 and HBM go on with what all SMs have asked for, up to now."""
    for q in range(2):
        go_on(state.queues[q], state.marks[q], state.heaps[q], state.turns[q], state.changes[q], t)


@part
def _queue(plan: Any, state: Any, q: int, sm: int, size: Any, ride: Any) -> Any:
    """A request of the SM at L2 or HBM, after a ``ride``; its mark."""
    rate = plan.rate[HBM_RATE if q == HBM else CHIP_RATE]
    cost = size * rate[0] * UNIT // rate[1]
    return ask(state.queues[q], state.marks[q], state.heaps[q], state.turns[q], state.changes[q], sm, cost, ride)


@part
def _block(plan: Any, state: Any, sm: int, w: Any, pc: Any) -> Any:
    """Which block of its tensor a row moves; -1 for none."""
    if plan.code[pc, 5] < 0:
        return np.int64(-1)
    return expression(plan.expressions[plan.code[pc, 6]], plan.tile_args[state.tile_of[sm, w]], state.loops[sm, w])


@part
def _there(plan: Any, tensor: Any, block: Any, size: Any) -> Any:
    """What of ``size`` bytes of a whole block is there: the last one ends with the tensor."""
    if tensor < plan.blocks.shape[0]:
        first, blocks = plan.blocks[tensor, 0], plan.blocks[tensor, 1]
        if block < 0 or block >= blocks:
            return np.int64(0)
        if plan.block_bytes[first + block] != plan.block_bytes[first]:
            return size * plan.block_bytes[first + block] // plan.block_bytes[first]
    return size


@part
def _ended(plan: Any, state: Any, sm: int, w: Any, pc: Any, block: Any, size: Any) -> Any:
    """What the warp's row asks for in all, once it has asked for the last ``size`` bytes of its block; 0 before."""
    moved, tensor = w * OUTSIDE_WARP + MOVED, plan.code[pc, 5]
    state.outside[sm, moved] += size
    if state.outside[sm, moved] < plan.code[pc, 4]:
        return np.int64(0)
    state.outside[sm, moved] = 0
    return _there(plan, tensor, block, plan.code[pc, 4]) // plan.multicast[tensor]


@part
def request(plan: Any, state: Any, sm: int, t: Any, w: Any, pc: Any, size: Any, c: Any) -> None:
    """Queue at L2, and at HBM where L2 does not hold it; note when it arrives where that will be asked for."""
    outside, ports, latency, rate = state.outside[sm], plan.outside_ports, plan.latency, plan.rate
    tensor = plan.code[pc, 5]
    block = _block(plan, state, sm, w, pc)
    whole = _ended(plan, state, sm, w, pc, block, size) if plan.chip and tensor >= 0 else np.int64(0)
    if tensor >= 0:
        size = _there(plan, tensor, block, size) // plan.multicast[tensor]
    left = _port(plan, state, sm, t, size)
    arrives = left + latency[L2_LATENCY]
    l2 = hbm = np.int64(0)
    if plan.chip:
        l2, hbm = _through_l2(plan, state, sm, t, w, pc, block, size, whole)
    elif tensor >= 0:
        missed = size * plan.miss_ppm[tensor] // MILLION
        if missed > 0:
            cost = missed * rate[HBM_RATE, 0] // rate[HBM_RATE, 1]
            outside[ports + 1] = max(t, outside[ports + 1]) + cost
            state.ports[sm, 1] += cost
            arrives = max(arrives, outside[ports + 1] + latency[HBM_LATENCY])
    path, place = plan.bundles[plan.code[pc, 1], PATH], np.int64(-1)
    if path == TO_SMEM:
        place = w * OUTSIDE_WARP + OPEN
    elif path == LOAD:
        place = board_of(w, plan.code[pc, 3])
    elif path == TMA_LOAD:
        place = plan.outside_mbarrier + c * OUTSIDE_MBARRIER + COPIES
        arrives += latency[TMA]
    elif path == TMA_STORE:  # until shared memory has been read; nobody waits for where it goes from there
        outside[ports + 2] = max(t, outside[ports + 2]) + size * rate[STORE_RATE, 0] // rate[STORE_RATE, 1]
        place, l2, hbm = w * OUTSIDE_WARP + OPEN, np.int64(0), np.int64(0)
        arrives = max(left, outside[ports + 2]) + latency[STORE]
    if place >= 0:
        outside[place] = max(outside[place], arrives)
        if plan.chip:
            state.marks_of[sm, place, L2] = max(state.marks_of[sm, place, L2], l2)
            state.marks_of[sm, place, HBM] = max(state.marks_of[sm, place, HBM], hbm)


@part
def _through_l2(plan: Any, state: Any, sm: int, t: Any, w: Any, pc: Any, block: Any, size: Any, whole: Any) -> Any:
    """Queue where all SMs share L2 and HBM: the marks of the request there, 0 for none. ``whole``: as :func:`_ended` says."""
    tensor = plan.code[pc, 5]
    _serve(state, t)
    l2 = _queue(plan, state, L2, sm, size, 0)
    if tensor < 0:
        return l2, np.int64(0)
    kind, args = plan.numbers[tensor], plan.tile_args[state.tile_of[sm, w]]
    write = plan.writes[plan.code[pc, 1]] == 1
    state.traffic[kind, L2_WRITE if write else L2_READ] += size
    blocks = plan.tensors[kind, BLOCKS]
    if block < 0 or block >= blocks:
        return l2, np.int64(0)
    i = plan.tensors[kind, BASE] + args[plan.tensors[kind, PLANE]] * blocks + block
    held = plan.sizes[plan.tensors[kind, FIRST_SIZE] + block]
    if write:
        _write(plan, state, sm, i, held)
        return l2, np.int64(0)
    share = plan.miss_ppm[tensor]
    return l2, _read(plan, state, sm, i, held, whole - (whole - size) * share // MILLION if whole else size * share // MILLION)


@part
def _write(plan: Any, state: Any, sm: int, i: Any, held: Any) -> None:
    """The first write to a tile takes all of it to HBM."""
    tiles = state.tiles
    clean = tiles[i, DIRTY] == 0
    if tiles[i, RESIDENT] == 0:
        tiles[i, TO_ASK] = 0
    access(tiles, state.held, plan.capacity, state.traffic, i, held, True)
    if clean:
        _ask_hbm(plan, state, sm, held)


@part
def _read(plan: Any, state: Any, sm: int, i: Any, held: Any, part_of_it: Any) -> Any:
    """Ask HBM for a part of a tile, as far as nobody has; the mark at which all that was asked for is there."""
    tiles = state.tiles
    if tiles[i, RESIDENT] == 0:
        tiles[i, TO_ASK] = held
    access(tiles, state.held, plan.capacity, state.traffic, i, held, False)
    asked = min(part_of_it, tiles[i, TO_ASK])
    if asked > 0:
        tiles[i, TO_ASK] -= asked
        tiles[i, FILLED] = max(tiles[i, FILLED], _ask_hbm(plan, state, sm, asked))
    if asked < part_of_it:
        state.rides[sm] = max(state.rides[sm], tiles[i, FILLED])
    return tiles[i, FILLED]


@part
def _ask_hbm(plan: Any, state: Any, sm: int, size: Any) -> Any:
    """The mark of a request at HBM, after what the SM rides with."""
    state.ports[sm, 1] += size * plan.rate[HBM_RATE, 0] // plan.rate[HBM_RATE, 1]
    return _queue(plan, state, HBM, sm, size, state.rides[sm])
