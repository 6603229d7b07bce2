"""What the fast engine's machine asks for: how loops and tiles go on, and when loads land.

:func:`answer` is asked at a tick and answers with one number, on which the machine acts. It is asked in the order of events,
by the machine itself or by the memo that stands in for it, and keeps its own books.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model.instructions import Path
from .engine import (
    CHIP_RATE,
    COPY_GROUPS,
    HBM_LATENCY,
    HBM_RATE,
    L2_LATENCY,
    L2_RATE,
    MBARRIER,
    PATH,
    REPLACE,
    STORE,
    STORE_RATE,
    TMA,
)
from .fast_layout import (
    CLOSED,
    COPIES,
    FINISHED,
    GROUP,
    HBM_FREE,
    HEAD,
    L2_FREE,
    LAND,
    OPEN,
    OUTSIDE_MBARRIER,
    OUTSIDE_WARP,
    OVER,
)
from .fast_lru import BASE, BLOCKS, FILLED, FIRST_SIZE, L2_READ, L2_WRITE, PLANE, RESIDENT, access
from .fast_parts import control, expression, part

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
RELEASE = 7  # the same: ticks until it is over
COMPLETED = 8  # mbarrier, parity: ticks until the last phase of that parity is over
SPILLED = 9  # warp, row, bytes: a bundle writes registers through to L2; 0


@part
def answer(plan: Any, state: Any, sm: int, t: Any, kind: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """The answer to a question of any kind."""
    outside, out = state.outside[sm], np.int64(0)
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
        close(outside, a)
    elif kind == GROUPS_LEFT:
        out = groups_left(outside, t, a, b)
    elif kind == LANDED:
        out = landed(outside, t, a, b)
    elif kind == COMPLETED:
        out = completed(outside, plan.outside_mbarrier, t, a, b)
    else:
        over = settle(outside, plan.outside_mbarrier, plan.latency[MBARRIER], t, a, b, x)
        out = over if kind == RELEASE else out
    return out


@part
def close(outside: Any, warp: Any) -> None:
    w = warp * OUTSIDE_WARP
    closed = outside[w + CLOSED]
    before = outside[w + GROUP + (closed - 1) % COPY_GROUPS] if closed > 0 else 0
    outside[w + GROUP + closed % COPY_GROUPS] = max(before, outside[w + OPEN])
    outside[w + CLOSED] += 1
    outside[w + OPEN] = 0


@part
def groups_left(outside: Any, t: Any, warp: Any, most: Any) -> Any:
    w = warp * OUTSIDE_WARP
    number = outside[w + CLOSED] - most
    return max(0, outside[w + GROUP + (number - 1) % COPY_GROUPS] - t) if number > 0 else 0


@part
def landed(outside: Any, t: Any, warp: Any, board: Any) -> Any:
    return max(0, outside[warp * OUTSIDE_WARP + LAND + board] - t)


@part
def completed(outside: Any, first: Any, t: Any, c: Any, parity: Any) -> Any:
    return max(0, outside[first + c * OUTSIDE_MBARRIER + OVER + parity] - t)


@part
def settle(outside: Any, first: Any, wake: Any, t: Any, number: Any, parity: Any, after: Any) -> Any:
    """The phase is over ``after`` ticks from now, or when its copies have landed; returns the ticks until it is."""
    c = first + number * OUTSIDE_MBARRIER
    over = max(t + after, outside[c + COPIES]) + wake
    outside[c + OVER + parity] = over
    outside[c + COPIES] = 0
    return over - t


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
            state.outside[sm, i] = 0
    first = plan.outside_mbarrier + slot * plan.instances * OUTSIDE_MBARRIER
    for i in range(first, first + plan.instances * OUTSIDE_MBARRIER):
        state.outside[sm, i] = 0
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
        _whole(plan, state, t, size)


@part
def _port(plan: Any, state: Any, sm: int, t: Any, size: Any) -> Any:
    """When the SM's own port to L2 has served a request."""
    cost = size * plan.rate[L2_RATE, 0] // plan.rate[L2_RATE, 1]
    state.outside[sm, plan.outside_ports] = max(t, state.outside[sm, plan.outside_ports]) + cost
    state.ports[sm, 0] += cost
    return state.outside[sm, plan.outside_ports]


@part
def _whole(plan: Any, state: Any, t: Any, size: Any) -> Any:
    """When L2 as a whole has."""
    state.chip[L2_FREE] = max(t, state.chip[L2_FREE]) + size * plan.rate[CHIP_RATE, 0] // plan.rate[CHIP_RATE, 1]
    return state.chip[L2_FREE]


@part
def request(plan: Any, state: Any, sm: int, t: Any, w: Any, pc: Any, size: Any, c: Any) -> None:
    """Queue at L2, and at HBM where L2 does not hold it; note when it arrives where that will be asked for."""
    outside, ports, latency, rate = state.outside[sm], plan.outside_ports, plan.latency, plan.rate
    tensor = plan.code[pc, 5]
    if tensor >= 0:
        size = size // plan.multicast[tensor]
    left = _port(plan, state, sm, t, size)
    arrives = left + latency[L2_LATENCY]
    if plan.chip:
        arrives = _through_l2(plan, state, sm, t, w, pc, size, arrives)
    elif tensor >= 0:
        missed = plan.outside_missed + tensor
        outside[missed] += plan.miss_ppm[tensor]
        if outside[missed] >= MILLION:
            outside[missed] -= MILLION
            cost = size * rate[HBM_RATE, 0] // rate[HBM_RATE, 1]
            outside[ports + 1] = max(t, outside[ports + 1]) + cost
            state.ports[sm, 1] += cost
            arrives = max(arrives, outside[ports + 1] + latency[HBM_LATENCY])
    path = plan.bundles[plan.code[pc, 1], PATH]
    if path == TO_SMEM:
        outside[w * OUTSIDE_WARP + OPEN] = max(outside[w * OUTSIDE_WARP + OPEN], arrives)
    elif path == LOAD:
        board = w * OUTSIDE_WARP + LAND + plan.code[pc, 3]
        outside[board] = max(outside[board], arrives)
    elif path == TMA_LOAD:
        copies = plan.outside_mbarrier + c * OUTSIDE_MBARRIER + COPIES
        outside[copies] = max(outside[copies], arrives + latency[TMA])
    elif path == TMA_STORE:
        outside[ports + 2] = max(t, outside[ports + 2]) + size * rate[STORE_RATE, 0] // rate[STORE_RATE, 1]
        read = max(left, outside[ports + 2]) + latency[STORE]
        outside[w * OUTSIDE_WARP + OPEN] = max(outside[w * OUTSIDE_WARP + OPEN], read)


@part
def _through_l2(plan: Any, state: Any, sm: int, t: Any, w: Any, pc: Any, size: Any, arrives: Any) -> Any:
    """The same where all SMs share L2 and HBM: when the request is answered."""
    chip, tiles, rate, code = state.chip, state.tiles, plan.rate, plan.code
    arrives = max(arrives, _whole(plan, state, t, size) + plan.latency[L2_LATENCY])
    if code[pc, 5] < 0:
        return arrives
    kind, args = plan.numbers[code[pc, 5]], plan.tile_args[state.tile_of[sm, w]]
    write = plan.writes[code[pc, 1]] == 1
    state.traffic[kind, L2_WRITE if write else L2_READ] += size
    block, blocks = expression(plan.expressions[code[pc, 6]], args, state.loops[sm, w]), plan.tensors[kind, BLOCKS]
    if block < 0 or block >= blocks:
        return arrives
    i = plan.tensors[kind, BASE] + args[plan.tensors[kind, PLANE]] * blocks + block
    fills = tiles[i, RESIDENT] == 0 and not write
    moved = access(tiles, chip, plan.capacity, state.traffic, i, plan.sizes[plan.tensors[kind, FIRST_SIZE] + block], write)
    if moved > 0:
        cost = moved * rate[HBM_RATE, 0] // rate[HBM_RATE, 1]
        chip[HBM_FREE] = max(t, chip[HBM_FREE]) + cost
        state.ports[sm, 1] += cost
        if fills:
            tiles[i, FILLED] = chip[HBM_FREE] + plan.latency[HBM_LATENCY]
    return arrives if write else max(arrives, tiles[i, FILLED])
