"""The fast engine's machine: the contract of :mod:`.engine` for one SM, event by event.

An event is a warp that resumes or a sub-partition that arbitrates. Each has at most one tick ahead of it; the smallest is next,
and of equal ones the first in the row, which is the contract's order.
"""

from __future__ import annotations

from typing import Any

from ..model.instructions import PIPES, Path
from ..model.program import Opcode

# isort: off
from .engine import (
    BARRIER_BASE, BARRIER_PER_WARP, DELAY, FIRST_BESIDE, FIRST_PIPE, GAP, GAP_BESIDE, GROUPS, INSTRUCTIONS_OF, LANE, LSU_QUEUE,
    MBARRIER, PORT, PORT_BESIDE, PRODUCT, RESULT, SMEM, SMEM_BESIDE, SMEM_LATENCY, STALL_BARRIER, STALL_FETCH, STALL_GROUP,
    STALL_LATENCY, STALL_LAUNCH,
    STALL_MBARRIER, STALL_PORT, STALL_PRODUCT, STALL_SCOREBOARD, STALL_SMEM,
)  # fmt: skip
from .engine import PATH as BUNDLE_PATH
from .fast_code import BEGINS, COMES, IN, LEFT_OF, begin_stretch
from .fast_layout import (
    BEGUN, BOARD, BUSY, BYTES_DUE, CODE_AT, DONE, ENDS, FETCH_FREE, GIVEN, HELD_UP, LANDING, LANDS, LEFT, N_STALLS, OVER_AT,
    AGAIN, PATH, PC, PENDING, PHASE, PIPE_FREE, PORT_FREE, PRODUCT_RUNS, PRODUCT_UNTIL, PRODUCTS, QUARTERS, READY, REASON,
    RECORDING, RESULT_AT, SCRIPT, SERVED, SINCE, SMEM_FREE, STALLED, STEPS, TENSOR_FREE, UNKNOWN, USED_SMEM, WAITS_FOR,
)  # fmt: skip
from .fast_outside import (
    CLOSE, COMPLETED, GROUPS_LEFT, LANDED, RELEASE, SETTLE, board_of, certain, close, completed, group_of, groups_left, landed,
    over_of, settle,
)  # fmt: skip
from .fast_parts import N_PIPES, NEVER, NEVER_ISSUED, part
# isort: on

ISSUE, WAIT_SCOREBOARD = int(Opcode.ISSUE), int(Opcode.WAIT_SCOREBOARD)
COMMIT, WAIT_GROUP = int(Opcode.COMMIT), int(Opcode.WAIT_GROUP)
BARRIER, LOOP, END = int(Opcode.BARRIER), int(Opcode.LOOP), int(Opcode.END)
SKIP, EXIT, DEPEND = int(Opcode.SKIP_IF_NEGATIVE), int(Opcode.EXIT), int(Opcode.DEPEND)
NAMED_ARRIVE, MB_ARRIVE, MB_WAIT = int(Opcode.NAMED_ARRIVE), int(Opcode.MB_ARRIVE), int(Opcode.MB_WAIT)
ADVANCE, MMA_COMMIT, MMA_WAIT = int(Opcode.ADVANCE), int(Opcode.MMA_COMMIT), int(Opcode.MMA_WAIT)
TILE = int(Opcode.TILE)
LOAD, TMA_LOAD, SHARED = int(Path.GLOBAL_LOAD), int(Path.TMA_LOAD), int(Path.SMEM)
WGMMA, TCGEN05 = int(Path.WGMMA), int(Path.TCGEN05)
TENSOR = PIPES.index("tensor")

@part
def known(control: Any) -> Any:
    """Whether the answer to the next question is known: this segment is run again."""
    return control[PATH] < control[SCRIPT]


@part
def note(control: Any, path: Any, t: Any, kind: Any, a: Any, b: Any, x: Any, y: Any, out: Any) -> None:
    """Keep a question and its answer for the memo where that listens."""
    k = control[PATH]
    if control[RECORDING] and k < path.shape[0]:
        path[k, 0], path[k, 1], path[k, 2], path[k, 3], path[k, 4], path[k, 5], path[k, 6] = kind, t, a, b, x, y, out
    control[PATH] = k + 1


@part
def stall(counted: Any, lane: Any, reason: Any, amount: Any) -> None:
    counted[STALLED + lane * N_STALLS + reason] += amount


@part
def free_at(bundles: Any, kind: Any, quarters: Any, q: Any, code_at: Any) -> Any:
    """When sub-partition ``q`` has the bundle's code, its port and every pipe that the bundle uses free, or for a product a place
    in the queue."""
    at = max(quarters[q, PORT_FREE], code_at)
    if bundles[kind, BUNDLE_PATH] == WGMMA:
        return max(at, quarters[q, ENDS] + quarters[q, HELD_UP])
    for p in range(N_PIPES):
        if bundles[kind, FIRST_PIPE + p] > 0 and quarters[q, PIPE_FREE + p] > at:
            at = quarters[q, PIPE_FREE + p]
    return at


@part
def yields(code: Any, bundles: Any, warps: Any, q: Any, w: Any, kind: Any) -> Any:
    """Whether a group's first product lets another warp's group go first that has begun and waits for a place."""
    if bundles[kind, BUNDLE_PATH] != WGMMA or warps[w, BEGUN]:
        return False
    for v in range(q, warps.shape[0], QUARTERS):
        if warps[v, BEGUN] and warps[v, READY] and bundles[code[warps[v, PC], 1], BUNDLE_PATH] == WGMMA:
            return True
    return False


@part
def fetch(plan: Any, warps: Any, shared: Any, cache: Any, w: Any, t: Any, pc: Any) -> None:
    """Note when the code of the bundle that the warp asks for is at hand."""
    stretch, left, pace = plan.stretch[pc, IN], plan.code[pc, 2], plan.fetch_pace
    warps[w, CODE_AT] = 0
    if stretch < 0:
        return
    if warps[w, LEFT] > 0:
        left = warps[w, LEFT]
    elif plan.stretch[pc, BEGINS] and begin_stretch(cache, plan.stretch_size, plan.code_held, stretch):
        asked = max(t, warps[w, GIVEN])  # this, and the port's time, with the longest fetch added
        shared[FETCH_FREE] = max(asked, shared[FETCH_FREE]) + plan.stretch_size[stretch, 1]
        cache[stretch, COMES] = max(shared[FETCH_FREE], asked + pace * plan.stretch_size[stretch, 0]) - plan.longest_fetch
    passed = (plan.code[pc, 2] - left + 1) * plan.bundles[plan.code[pc, 1], INSTRUCTIONS_OF]
    warps[w, CODE_AT] = cache[stretch, COMES] - pace * (plan.stretch[pc, LEFT_OF] - passed)


@part
def issue(plan: Any, events: Any, warps: Any, quarters: Any, shared: Any, cache: Any, w: Any, t: Any, pc: Any) -> None:
    """The warp asks its sub-partition for the next bundle of its row."""
    code, bundles = plan.code, plan.bundles
    q, kind = w % QUARTERS, code[pc, 1]
    if plan.code_rows > 0:
        fetch(plan, warps, shared, cache, w, t, pc)
    if warps[w, LEFT] == 0:
        warps[w, LEFT] = code[pc, 2]
    warps[w, READY] = 1
    warps[w, SINCE] = t
    at = max(t, free_at(bundles, kind, quarters, q, 0))
    reason = STALL_PORT
    for p in range(N_PIPES):
        free = quarters[q, PIPE_FREE + p]
        if bundles[kind, FIRST_PIPE + p] > 0 and free > quarters[q, PORT_FREE] and free == at:
            reason = p
    if warps[w, CODE_AT] > at:
        at, reason = warps[w, CODE_AT], STALL_FETCH
    warps[w, REASON] = reason
    wake = warps.shape[0] + q
    events[wake] = min(events[wake], at)


@part
def choose(code: Any, bundles: Any, warps: Any, quarters: Any, q: Any, t: Any) -> Any:
    """Round robin: the first waiting warp after the last one served whose port and pipes are free; -1 for none."""
    if quarters[q, PORT_FREE] > t:
        return -1
    n = (warps.shape[0] - q + QUARTERS - 1) // QUARTERS
    rank = quarters[q, SERVED]
    for _ in range(n):
        rank = rank + 1 if rank + 1 < n else 0
        w = q + QUARTERS * rank
        if not warps[w, READY]:
            continue
        kind = code[warps[w, PC], 1]
        if free_at(bundles, kind, quarters, q, warps[w, CODE_AT]) <= t and not yields(code, bundles, warps, q, w, kind):
            return w
    return -1


@part
def soonest(code: Any, bundles: Any, warps: Any, quarters: Any, q: Any) -> Any:
    """When the port, or failing that a pipe somebody waits for, is free; NEVER where nobody waits."""
    at = NEVER
    for w in range(q, warps.shape[0], QUARTERS):
        if warps[w, READY]:
            at = min(at, free_at(bundles, code[warps[w, PC], 1], quarters, q, warps[w, CODE_AT]))
    return at


@part
def hold(bundles: Any, warps: Any, quarters: Any, counted: Any, w: Any, kind: Any, t: Any) -> Any:
    """A bundle takes its port and pipes; returns when its warp may go on."""
    q = w % QUARTERS
    busy = BUSY + q * (N_PIPES + 1)
    product = bundles[kind, BUNDLE_PATH] == WGMMA
    beside = quarters[q, PRODUCT_RUNS] > t and not product
    port = bundles[kind, PORT_BESIDE if beside else PORT]
    quarters[q, SERVED] = w // QUARTERS
    quarters[q, PORT_FREE] = t + port
    counted[busy + N_PIPES] += port
    first = FIRST_BESIDE if beside else FIRST_PIPE
    for p in range(N_PIPES):
        held = bundles[kind, first + p]
        if held > 0:
            quarters[q, PIPE_FREE + p] = max(t, quarters[q, PIPE_FREE + p]) + held  # later than now for a product only
            counted[busy + p] += held
    if beside and bundles[kind, DELAY] > 0:
        quarters[q, PIPE_FREE + TENSOR] += bundles[kind, DELAY]
        quarters[q, PRODUCT_RUNS] = quarters[q, PIPE_FREE + TENSOR]
        quarters[q, HELD_UP] += bundles[kind, DELAY]
    counted[counted.shape[0] - bundles.shape[0] + kind] += 1
    result = bundles[kind, RESULT]
    warps[w, RESULT_AT] = max(warps[w, RESULT_AT], t + port + result)
    if product:
        quarters[q, PRODUCT_RUNS] = quarters[q, PIPE_FREE + TENSOR]
        done = quarters[q, PIPE_FREE + TENSOR] - quarters[q, HELD_UP]
        for i in range(ENDS, quarters.shape[1] - 1):
            quarters[q, i] = quarters[q, i + 1]
        quarters[q, quarters.shape[1] - 1] = done
        warps[w, PRODUCT_UNTIL] = max(warps[w, PRODUCT_UNTIL], done + result)
        warps[w, BEGUN] = 1
    return t + bundles[kind, GAP_BESIDE if beside else GAP]


@part
def share(plan: Any, own: Any, lane: Any, w: Any, kind: Any, board: Any, t: Any, resume: Any) -> Any:
    """A bundle queues at the SM's tensor cores or its SMEM port; returns when its warp may go on."""
    bundles, latency, warps = plan.bundles, plan.latency, own.warps
    quarters, shared, counted = own.quarters, own.shared, own.counted
    path, smem = bundles[kind, BUNDLE_PATH], bundles[kind, SMEM]
    if path == TCGEN05:
        shared[TENSOR_FREE] = max(t, shared[TENSOR_FREE]) + bundles[kind, RESULT]
        for quarter in range(QUARTERS):
            counted[BUSY + quarter * (N_PIPES + 1) + TENSOR] += bundles[kind, RESULT]
        warps[w, PRODUCT_UNTIL] = max(warps[w, PRODUCT_UNTIL], shared[TENSOR_FREE] + latency[PRODUCT])
    counted[USED_SMEM] += smem
    if smem > 0 and path not in (WGMMA, TCGEN05):
        beside = quarters[w % QUARTERS, PRODUCT_RUNS] > t
        shared[SMEM_FREE] = max(t, shared[SMEM_FREE]) + (bundles[kind, SMEM_BESIDE] if beside else smem)
        if path == SHARED:
            if board >= 0:
                warps[w, BOARD + board] = max(warps[w, BOARD + board], shared[SMEM_FREE] + latency[SMEM_LATENCY])
            full = shared[SMEM_FREE] - latency[LSU_QUEUE]
            if full > resume:
                stall(counted, lane, STALL_SMEM, full - resume)
                resume = full
    return resume


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


@part
def renew(
    warp_start: Any, full_count: Any, replace: Any, events: Any, warps: Any, barriers: Any, named: Any, counted: Any, slot: Any,
    t: Any,
) -> None:  # fmt: skip
    """A new CTA on the slot: its warps start ``replace`` later, with nothing in flight and empty barriers."""
    per_cta, instances = warp_start.shape[0], full_count.shape[0]
    for lane in range(per_cta):
        v = slot * per_cta + lane
        warps[v, PC] = warp_start[lane]
        warps[v, RESULT_AT] = warps[v, LANDING] = warps[v, BEGUN] = warps[v, CODE_AT] = warps[v, GIVEN] = 0
        warps[v, PRODUCT_UNTIL] = NEVER_ISSUED
        for i in range(BOARD, warps.shape[1]):
            warps[v, i] = NEVER_ISSUED if PRODUCTS <= i < STEPS else 0
        stall(counted, lane, STALL_LAUNCH, replace)
        events[v] = t + replace
    for i in range(named.shape[1]):
        named[slot, i] = 0
    for i in range(instances):
        for k in range(barriers.shape[1]):
            barriers[slot * instances + i, k] = 0
        barriers[slot * instances + i, PENDING] = full_count[i]
