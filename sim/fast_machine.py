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
    DELAY, FIRST_BESIDE, FIRST_PIPE, GAP, GAP_BESIDE, INSTRUCTIONS_OF, LSU_QUEUE, PORT, PORT_BESIDE, PRODUCT, RESULT, SMEM,
    SMEM_BESIDE, SMEM_LATENCY, STALL_BARRIER, STALL_FETCH, STALL_LAUNCH, STALL_PORT, STALL_SMEM,
)  # fmt: skip
from .engine import PATH as BUNDLE_PATH
from .fast_code import BEGINS, COMES, IN, LEFT_OF, begin_stretch
from .fast_layout import (
    BEGUN, BOARD, BUSY, CODE_AT, ENDS, FETCH_FREE, GATHERED, GIVEN, HELD_UP, ISSUED, LANDING, LEFT, N_STALLS, PATH, PC, PENDING,
    PIPE_FREE, PORT_FREE, PRODUCT_RUNS, PRODUCT_UNTIL, PRODUCTS, QUARTERS, READY, REASON, RECORDING, RESULT_AT, SCRIPT, SERVED,
    SINCE, SMEM_FREE, STALLED, STEPS, TENSOR_FREE, TOGETHER, USED_SMEM, WAITS_FOR,
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
def yields(code: Any, bundles: Any, warps: Any, q: Any, w: Any, kind: Any, t: Any) -> Any:
    """Whether a group's first product lets another warp's group go first that has begun and waits for a place."""
    if bundles[kind, BUNDLE_PATH] != WGMMA or warps[w, BEGUN] == ISSUED:
        return False
    for v in range(q, warps.shape[0], QUARTERS):
        asks = warps[v, BEGUN] == ISSUED and warps[v, READY] and warps[v, CODE_AT] <= t
        if asks and bundles[code[warps[v, PC], 1], BUNDLE_PATH] == WGMMA:
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
def gather(plan: Any, events: Any, warps: Any, counted: Any, w: Any, t: Any) -> Any:
    """The warp comes to a group's first product: whether it waits for others of its warpgroup. The last one lets them go on."""
    lane = w % plan.per_cta
    cta = w - lane
    first, last = cta + plan.warpgroups[lane, 0], cta + plan.warpgroups[lane, 1]
    missing = last - first - 1
    for v in range(first, last):
        missing -= warps[v, WAITS_FOR] == TOGETHER
    if missing > 0:
        warps[w, WAITS_FOR], warps[w, SINCE] = TOGETHER, t
        return True
    for v in range(first, last):
        warps[v, BEGUN] = GATHERED
        if v != w:
            stall(counted, v - cta, STALL_BARRIER, t - warps[v, SINCE])
            warps[v, WAITS_FOR], warps[v, SINCE], events[v] = -1, NEVER, t
    return False


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
        if free_at(bundles, kind, quarters, q, warps[w, CODE_AT]) <= t and not yields(code, bundles, warps, q, w, kind, t):
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
        warps[w, BEGUN] = ISSUED
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
