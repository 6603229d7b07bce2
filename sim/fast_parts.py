"""Pieces of the fast engine's compiled code, and how it is compiled: the event heap, index expressions, queues, barriers."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np

from ..model.instructions import PIPES, Path
from ..model.program import Opcode
from . import engine
from .engine import FIRST_PIPE, HBM_LATENCY, HBM_RATE, L2_LATENCY, L2_RATE, PATH, STALL_MBARRIER

NEVER = np.int64(1) << 62
N_PIPES = len(PIPES)
MILLION = 1_000_000
WGMMA = int(Path.WGMMA)
LOOP, END, SKIP = int(Opcode.LOOP), int(Opcode.END), int(Opcode.SKIP_IF_NEGATIVE)


def _stamp() -> str:
    """A digest of what compiled code takes from elsewhere: this file, and the numbers that the contract gives to names."""
    named = {name: value for name, value in vars(engine).items() if name.isupper() and isinstance(value, int)}
    numbers = [sorted(named.items()), [(op.name, int(op)) for op in (*Opcode, *Path)], PIPES]
    source = inspect.getsource(sys.modules[__name__])
    return hashlib.sha256((source + repr(numbers)).encode()).hexdigest()[:12]


STAMP = _stamp()


def jit(function: Callable[..., Any]) -> Any:
    """Compile ``function`` and keep the code on disk.

    numba notices when the function's own file changes. For the rest the file that it keeps carries STAMP in its name.
    """
    function.__qualname__ += f"-{STAMP}"
    return nb.njit(cache=True, nogil=True)(function)


@jit
def push(heap: Any, size: Any, value: Any) -> Any:
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
def pop(heap: Any, size: Any) -> Any:
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


@nb.njit(inline="always")
def control(code: Any, pc: Any, expressions: Any, args: Any, loops: Any, trips: Any) -> Any:
    """Where code goes on after its LOOP, END or SKIP_IF_NEGATIVE at ``pc``; counts the loops."""
    row = code[pc]
    after = pc + 1
    if row[0] == LOOP:
        n = expression(expressions[row[3]], args, loops)
        if n <= 0:
            after = row[7] + 1
        else:
            depth = code[row[7], 6]
            loops[depth], trips[depth] = 0, n
    elif row[0] == END:
        depth = row[6]
        loops[depth] += 1
        if loops[depth] < trips[depth]:
            after = row[7] + 1
        else:
            loops[depth] = 0
    elif expression(expressions[row[3]], args, loops) < 0:
        after = row[7]
    return after


@jit
def free_at(s: Any, bundle: Any, port_free: Any, pipe_free: Any, place_free: Any) -> Any:
    """When sub-partition ``s`` has its port and every pipe that ``bundle`` uses free, or for a product a place in the queue."""
    at = port_free[s]
    if bundle[PATH] == WGMMA:
        return max(at, place_free[s])
    for p in range(N_PIPES):
        if bundle[FIRST_PIPE + p] > 0 and pipe_free[s, p] > at:
            at = pipe_free[s, p]
    return at


@jit
def group_waits(members: Any, begun: Any, ready: Any, bundles: Any, code: Any, pc: Any) -> Any:
    """Whether one of the warps waits with the next product of a group that it has begun."""
    for w in members:
        if not (begun[w] and ready[w]):
            continue
        if bundles[code[pc[w], 1], PATH] == WGMMA:
            return True
    return False


@jit
def memory(
    t: Any, size: Any, tensor: Any, sm: Any, rate: Any, latency: Any, miss_ppm: Any, multicast: Any, missed: Any, free: Any,
    used: Any,
) -> Any:  # fmt: skip
    """Queue ``size`` bytes at L2, and at HBM if L2 does not hold them; returns when they arrive."""
    if tensor >= 0:
        size = size // multicast[tensor]
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


@jit
def complete(
    c: Any, slot: Any, per_cta: Any, t: Any, count: Any, pending: Any, over_at: Any, phase: Any, done_at: Any, waits_for: Any,
    since: Any, stalls: Any, sm: Any, wake: Any, heap: Any, size: Any, keys: Any,
) -> Any:  # fmt: skip
    """All arrivals and bytes of mbarrier instance ``c``'s phase are known: the phase ends, its waiters resume."""
    parity = phase[c] % 2
    over = over_at[c] + wake
    done_at[c, parity] = over
    phase[c] += 1
    pending[c] = count
    over_at[c] = 0
    for k in range(per_cta):
        w = slot * per_cta + k
        if waits_for[w] == 2 * c + parity:
            waits_for[w] = -1
            resume = max(over, t)
            stalls[sm, k, STALL_MBARRIER] += resume - since[w]
            size = push(heap, size, resume * keys + w)
    return size


@jit
def residents(sms: int, slots: int, per_cta: int) -> Any:
    """Warps of each sub-partition in global warp order and their number; each warp's sub-partition and place there."""
    warps = sms * slots * per_cta
    members = np.zeros((sms * 4, slots * per_cta), np.int64)
    number = np.zeros(sms * 4, np.int64)
    home, rank = np.zeros(warps, np.int64), np.zeros(warps, np.int64)
    for w in range(warps):
        s = w // (slots * per_cta) * 4 + (w % (slots * per_cta)) % 4
        home[w], rank[w] = s, number[s]
        members[s, number[s]] = w
        number[s] += 1
    return members, number, home, rank
