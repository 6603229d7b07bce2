"""What orders the warps of the fast engine's machine: barriers, mbarriers, groups, and what a warp waits for."""

from __future__ import annotations

from typing import Any

# isort: off
from .engine import (
    BARRIER_BASE, BARRIER_PER_WARP, GROUPS, LANE, MBARRIER, STALL_BARRIER, STALL_GROUP, STALL_LATENCY, STALL_MBARRIER,
    STALL_PRODUCT, STALL_SCOREBOARD,
)  # fmt: skip
from .fast_layout import (
    BEGUN, BOARD, BYTES_DUE, DONE, HELD_UP, LANDING, LANDS, OVER_AT, AGAIN, PATH, PC, PENDING, PHASE, PRODUCT_UNTIL, PRODUCTS,
    QUARTERS, RESULT_AT, SINCE, STEPS, UNKNOWN, WAITS_FOR,
)  # fmt: skip
from .fast_machine import (
    ADVANCE, BARRIER, COMMIT, DEPEND, MB_ARRIVE, MB_WAIT, MMA_COMMIT, MMA_WAIT, WAIT_GROUP, WAIT_SCOREBOARD, known, note,
    stall,
)  # fmt: skip
from .fast_outside import (
    CLOSE, COMPLETED, GROUPS_LEFT, LANDED, RELEASE, SETTLE, board_of, certain, close, completed, group_of, groups_left,
    landed, over_of, settle,
)  # fmt: skip
from .fast_parts import NEVER, NEVER_ISSUED, part
# isort: on


@part
def instance(mbarriers: Any, warps: Any, first: Any, w: Any, mbarrier: Any, ring: Any) -> Any:
    """(mbarrier instance of the SM, how often its stages went round) that the warp's ring names; ``first`` of its CTA's."""
    steps, stages = warps[w, STEPS + ring], mbarriers[mbarrier, 2]
    return first + mbarriers[mbarrier, 0] + steps % stages, steps // stages


@part
def late(plan: Any, pc: Any) -> Any:
    """How much later than a whole warp the wait in this row hears that a phase is over."""
    return plan.latency[LANE] if plan.code[pc, 3] == 1 else 0


@part
def complete(plan: Any, state: Any, own: Any, sm: int, slot: Any, c: Any, t: Any, place: Any) -> None:
    """All arrivals and bytes of an mbarrier's phase are known: the phase ends, its waiters resume when it is over.

    ``place``: of this event in the order of an SM's events.
    """
    events, warps, barriers, control, path = own.events, own.warps, own.barriers, own.control, own.path
    parity, per_cta, wake = barriers[c, PHASE], plan.per_cta, plan.latency[MBARRIER]
    first = slot * per_cta
    waits = again = False
    for w in range(first, first + per_cta):
        waits |= warps[w, WAITS_FOR] == 2 * c + parity
    over, unknown = barriers[c, OVER_AT] + wake, 0
    if barriers[c, LANDS]:
        after = max(0, barriers[c, OVER_AT] - t)
        if not known(control):
            settle(plan, state, sm, t, c, parity, after)
        if waits:
            over = t + (path[control[PATH], 6] if known(control) else completed(plan, state, sm, t, c, parity))
            again = plan.chip
            note(control, path, t, RELEASE, c, parity, after, place, over - t)
        else:
            over = t
            note(control, path, t, SETTLE, c, parity, after, 0, 0)
        unknown = 1 if again or not waits else 0
    barriers[c, DONE + parity], barriers[c, UNKNOWN + parity] = over, unknown
    barriers[c, PHASE] = 1 - parity
    barriers[c, PENDING] = plan.full_count[c % plan.instances]
    barriers[c, OVER_AT] = barriers[c, LANDS] = 0
    if waits:
        for w in range(first, first + per_cta):
            if warps[w, WAITS_FOR] == 2 * c + parity:
                warps[w, WAITS_FOR] = -1
                at = max(over, t) + late(plan, warps[w, PC] - 1)
                warps[w, PC] -= 1 if again else 0  # what is to come may delay the copies: look again then
                events[w] = at
                stall(own.counted, w - first, STALL_MBARRIER, at - warps[w, SINCE])
                warps[w, SINCE] = NEVER


@part
def arrive(
    code: Any, latency: Any, events: Any, warps: Any, named: Any, counted: Any, per_cta: Any, slot: Any, w: Any, t: Any, pc: Any
) -> None:
    """Count the warp in at a named barrier; the last one releases those that wait."""
    barrier, count = code[pc, 3], code[pc, 2]
    if code[pc, 0] == BARRIER:
        warps[w, SINCE] = t
        warps[w, WAITS_FOR] = -2 - barrier
    named[slot, barrier] += 1
    if named[slot, barrier] == count:
        named[slot, barrier] = 0
        release = t + latency[BARRIER_BASE] + latency[BARRIER_PER_WARP] * count
        for lane in range(per_cta):
            v = slot * per_cta + lane
            if warps[v, WAITS_FOR] == -2 - barrier:
                warps[v, WAITS_FOR] = -1
                stall(counted, lane, STALL_BARRIER, release - warps[v, SINCE])
                warps[v, SINCE] = NEVER
                events[v] = release


@part
def due(plan: Any, state: Any, own: Any, sm: int, w: Any, t: Any, op: Any, arg: Any) -> Any:
    """(when what a waiting row waits for has arrived, the stall it is booked under, whether the row has to look again then)."""
    warps, control, path = own.warps, own.control, own.path
    if op == DEPEND:
        return warps[w, RESULT_AT], STALL_LATENCY, False
    if op == MMA_WAIT:  # products may be held up meanwhile
        done = warps[w, PRODUCTS + arg] if arg < GROUPS else NEVER_ISSUED
        return done + own.quarters[w % QUARTERS, HELD_UP], STALL_PRODUCT, True
    if op == WAIT_GROUP:
        left = path[control[PATH], 6] if known(control) else groups_left(plan, state, sm, t, w, arg)
        note(control, path, t, GROUPS_LEFT, w, arg, 0, 0, left)
        return t + left, STALL_GROUP, plan.chip
    until, again = warps[w, BOARD + arg], False
    if warps[w, LANDING] >> arg & 1:
        left = path[control[PATH], 6] if known(control) else landed(plan, state, sm, t, w, arg)
        note(control, path, t, LANDED, w, arg, 0, 0, left)
        again = plan.chip and left > 0
        warps[w, LANDING] ^= 0 if again else 1 << arg
        until = max(until, t + left)
    return until, STALL_SCOREBOARD, again


@part
def mbarrier_wait(plan: Any, state: Any, own: Any, sm: int, w: Any, c: Any, parity: Any, t: Any) -> Any:
    """(when the phase of that parity is over, NEVER while its end is not known; whether the row has to look again then)."""
    barriers, control, path, again = own.barriers, own.control, own.path, False
    if barriers[c, PHASE] == parity:
        own.warps[w, SINCE] = t
        own.warps[w, WAITS_FOR] = 2 * c + parity
        return NEVER, False
    if barriers[c, UNKNOWN + parity]:
        left = path[control[PATH], 6] if known(control) else completed(plan, state, sm, t, c, parity)
        note(control, path, t, COMPLETED, c, parity, w, 0, left)
        again = plan.chip and left > 0
        barriers[c, UNKNOWN + parity] = 1 if again else 0
        barriers[c, DONE + parity] = t + left
    return barriers[c, DONE + parity], again


@part
def settle_mbarrier(plan: Any, state: Any, own: Any, sm: int, slot: Any, c: Any, t: Any, place: Any) -> None:
    """End the phase of mbarrier ``c`` where nothing of it is still to come."""
    if own.barriers[c, PENDING] == 0 and own.barriers[c, BYTES_DUE] == 0:
        complete(plan, state, own, sm, slot, c, t, place)


@part
def order(plan: Any, state: Any, own: Any, sm: int, w: Any, t: Any, pc: Any) -> Any:
    """A row that orders warps through mbarriers, groups and rings.

    Returns until when the warp waits, NEVER where none knows, and whether the row has to look again then.
    """
    code, warps, control = plan.code, own.warps, own.control
    op, until, again = code[pc, 0], t, False
    if op in (MB_WAIT, MB_ARRIVE):
        slot = w // plan.per_cta
        c, turn = instance(plan.mbarriers, warps, slot * plan.instances, w, code[pc, 9], code[pc, 10])
        if op == MB_WAIT:
            parity = (turn + code[pc, 2]) % 2
            until, again = mbarrier_wait(plan, state, own, sm, w, c, parity, t)
            until += late(plan, pc) if t < until < NEVER else 0
        else:
            own.barriers[c, PENDING] -= code[pc, 2]
            own.barriers[c, BYTES_DUE] += code[pc, 4]
            products = warps[w, PRODUCT_UNTIL] + own.quarters[w % QUARTERS, HELD_UP]
            at = max(t, products) if code[pc, 3] == 1 else t
            own.barriers[c, OVER_AT] = max(own.barriers[c, OVER_AT], at)
            settle_mbarrier(plan, state, own, sm, slot, c, t, w)
    elif op == COMMIT:
        if not known(control):
            close(plan, state, sm, w)
        note(control, own.path, t, CLOSE, w, 0, 0, 0, 0)
    elif op == ADVANCE:
        step = STEPS + code[pc, 10]
        warps[w, step] = warps[w, step] + 1 if warps[w, step] + 1 < plan.wrap else 0
    elif op == MMA_COMMIT:
        for i in range(PRODUCTS + GROUPS - 1, PRODUCTS, -1):
            warps[w, i] = warps[w, i - 1]
        warps[w, PRODUCTS] = warps[w, PRODUCT_UNTIL]
        warps[w, BEGUN] = 0
    else:  # TILE
        warps[w, AGAIN] = pc + 1
    return until, again


@part
def asks(plan: Any, state: Any, own: Any, sm: int, w: Any, pc: Any) -> Any:
    """Whether a row asks when loads land that other SMs may still delay: it has to wait for them."""
    op, arg, barriers = plan.code[pc, 0], plan.code[pc, 3], own.barriers
    if op == WAIT_GROUP:
        place = group_of(state, sm, w, arg)
        return place >= 0 and not certain(state, sm, place)
    if op == WAIT_SCOREBOARD:
        place = board_of(w, arg)
        return own.warps[w, LANDING] >> arg & 1 == 1 and not certain(state, sm, place)
    if op in (MB_WAIT, MB_ARRIVE):
        c, turn = instance(plan.mbarriers, own.warps, w // plan.per_cta * plan.instances, w, plan.code[pc, 9], plan.code[pc, 10])
        if op == MB_ARRIVE:
            return barriers[c, LANDS] == 1
        parity = (turn + plan.code[pc, 2]) % 2
        waits = barriers[c, PHASE] != parity and barriers[c, UNKNOWN + parity] == 1
        return waits and not certain(state, sm, over_of(plan, c, parity))
    return False
