"""The parts of the reference engine: clock, SM, sub-partition, warp and barriers, each with its rule of the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import simpy
from simpy.events import EventPriority

from ..model.instructions import PIPES, Path
from ..model.program import Opcode
from ..model.rows import BUNDLE, COUNT

# isort: off
from .engine import (
    DELAY, FIRST_BESIDE, FIRST_PIPE, GAP, GAP_BESIDE, HBM_LATENCY, HBM_RATE, INSTRUCTIONS_OF, L2_LATENCY, L2_RATE, LOOP_DEPTH,
    PATH, PORT, PORT_BESIDE, RESULT, SCOREBOARDS, SMEM, SMEM_BESIDE, SPILL, STALL_FETCH, STALL_GROUP, STALL_LATENCY,
    STALL_PORT, STALL_PRODUCT, STALL_SCOREBOARD, STORE, STORE_RATE, Job, longest_fetch,
)  # fmt: skip
from .reference_memory import Landing
# isort: on

SUB_PARTITIONS = 4
MILLION = 1_000_000
LONG_AGO = NEVER_ISSUED = -(1 << 62)  # a product's end where there was none
TENSOR = PIPES.index("tensor")
WAIT_SCOREBOARD, WAIT_GROUP = int(Opcode.WAIT_SCOREBOARD), int(Opcode.WAIT_GROUP)
DEPEND, MMA_WAIT = int(Opcode.DEPEND), int(Opcode.MMA_WAIT)
WGMMA = int(Path.WGMMA)
SMEM_PORT, L2_PORT, HBM_PORT = range(3)


class Clock:
    """A SimPy environment whose events carry a static key."""

    def __init__(self) -> None:
        self.env = simpy.Environment()
        self.events = 0

    @property
    def now(self) -> int:
        tick: int = self.env._now  # type: ignore[assignment]  # whole ticks only
        return tick

    def fire(self, event: simpy.Event, tick: int, key: int) -> simpy.Event:
        """Let ``event`` happen at ``tick``, after every event of a smaller key."""
        event._ok, event._value = True, None
        self.env.schedule(event, cast(EventPriority, key), tick - self.env._now)
        self.events += 1
        return event

    def at(self, tick: int, key: int) -> simpy.Event:
        return self.fire(self.env.event(), tick, key)


@dataclass(frozen=True, slots=True)
class Cost:
    """Ticks that a bundle holds the port, its warp, and each pipe it uses."""

    port: int
    gap: int
    pipes: tuple[tuple[int, int], ...]  # (pipe, ticks)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A row of ``Job.bundles``. ``alone`` and ``beside`` a running product are its costs."""

    alone: Cost
    beside: Cost
    result: int
    path: int
    smem: int
    delay: int
    spill: int
    smem_beside: int
    instructions: int

    @staticmethod
    def of(row: list[int]) -> Bundle:
        def pipes(first: int) -> tuple[tuple[int, int], ...]:
            return tuple((p, ticks) for p, ticks in enumerate(row[first : first + len(PIPES)]) if ticks)

        alone = Cost(row[PORT], row[GAP], pipes(FIRST_PIPE))
        beside = Cost(row[PORT_BESIDE], row[GAP_BESIDE], pipes(FIRST_BESIDE))
        more = (row[SPILL], row[SMEM_BESIDE], row[INSTRUCTIONS_OF])
        return Bundle(alone, beside, row[RESULT], row[PATH], row[SMEM], row[DELAY], *more)


class CodeCache:
    """Instructions that an SM holds: the stretches of code that its warps began last, as many as fit, and a port through which
    all others come."""

    def __init__(self, job: Job) -> None:
        self.rows, self.sizes = job.stretch.tolist(), job.stretch_size.tolist()
        self.pace, self.longest, self.capacity = job.fetch_pace, longest_fetch(job), job.code_held
        self.held: dict[int, int] = {}  # instructions of each stretch, oldest first
        self.comes = [0] * len(self.sizes)  # when the last of each stretch's instructions does
        self.free = LONG_AGO

    def ask(self, warp: Warp, bundle: Bundle, now: int) -> int:
        """When the code of the bundle that the warp asks for is at hand."""
        stretch, begins, size = self.rows[warp.pc] if self.rows else (-1, 0, 0)
        if stretch < 0:
            return 0
        passed = warp.row[COUNT] - warp.left
        if begins and passed == 0 and self._misses(stretch):
            asked = max(warp.given, now - self.longest)
            instructions, cost = self.sizes[stretch]
            self.free = max(self.free, asked) + cost
            self.comes[stretch] = max(self.free, asked + self.pace * instructions)
        return int(self.comes[stretch] - self.pace * (size - (passed + 1) * bundle.instructions))

    def _misses(self, stretch: int) -> bool:
        """Make it the newest one; whether it was not held."""
        size, misses = self.sizes[stretch][0], stretch not in self.held
        self.held.pop(stretch, 0)
        while self.held and sum(self.held.values()) + size > self.capacity:
            self.held.pop(next(iter(self.held)))
        self.held[stretch] = size
        return misses


class Sm:
    """What one SM's warps share, each first come, first served: the SMEM port, its share of L2 and HBM, its tensor cores."""

    def __init__(self, job: Job) -> None:
        self.free, self.used = [0, 0, 0], [0, 0, 0]
        self.rate, self.latency, self.miss_ppm = job.rate.tolist(), job.latency.tolist(), job.miss_ppm.tolist()
        self.multicast, self.blocks, self.block_bytes = job.multicast.tolist(), job.blocks.tolist(), job.block_bytes.tolist()
        self.tensor_free = self.store_free = 0
        self.code = CodeCache(job)

    def queue(self, port: int, tick: int, cost: int) -> int:
        self.free[port] = max(tick, self.free[port]) + cost
        self.used[port] += cost
        return self.free[port]

    def l2(self, tick: int, size: int) -> int:
        """When the SM's own port has served ``size`` bytes asked for at ``tick``."""
        return self.queue(L2_PORT, tick, size * self.rate[L2_RATE][0] // self.rate[L2_RATE][1])

    def asked(self, tensor: int, block: int, size: int) -> int:
        """What is asked for of a block, of which ``size`` bytes are moved: the last ends with its tensor, CTAs may share it."""
        if tensor < 0:
            return size
        if tensor < len(self.blocks):
            first, blocks = self.blocks[tensor]
            size = size * self.block_bytes[first + block] // self.block_bytes[first] if 0 <= block < blocks else 0
        return int(size // self.multicast[tensor])

    def read_out(self, tick: int, size: int, left: int) -> int:
        """When a bulk store of ``size`` bytes at ``tick``, which the port has served at ``left``, is over for its warp."""
        self.store_free = max(tick, self.store_free) + size * self.rate[STORE_RATE][0] // self.rate[STORE_RATE][1]
        return int(max(left, self.store_free) + self.latency[STORE])

    def memory(self, tick: int, size: int, tensor: int, left: int) -> int:
        """When ``size`` bytes asked for at ``tick`` arrive that the port has served at ``left``: L2 holds the same share of all
        requests of a tensor."""
        rate, latency = self.rate, self.latency
        done = left + int(latency[L2_LATENCY])
        if tensor >= 0 and (missed := size * self.miss_ppm[tensor] // MILLION):
            cost = missed * rate[HBM_RATE][0] // rate[HBM_RATE][1]
            done = max(done, self.queue(HBM_PORT, tick, cost) + latency[HBM_LATENCY])
        return done

    def multiply(self, tick: int, cost: int) -> int:
        """Queue a product of all the SM's tensor cores; when it is done."""
        self.tensor_free = max(tick, self.tensor_free) + cost
        return self.tensor_free


class Warp:
    """One warp: its number, where it lives, where it is in its code, what it has in flight and what it waits for."""

    def __init__(self, number: int, lane: int, sm: int, slot: int, rings: int) -> None:
        self.number, self.lane, self.sm, self.slot, self.rings = number, lane, sm, slot, rings
        self.ready = self.held = False  # waits for its bundle; waits at a barrier
        self.since = self.row_start = self.left = self.done_bytes = self.tile = self.blocker = 0
        self.late = 0  # how much later than others it hears that what it waits for is over
        self.row: list[int] = []
        self.args: list[int] = []  # of the tile
        self.served: simpy.Event | None = None  # happens when the warp may go on after its bundle
        self.begin(0)

    def begin(self, pc: int) -> None:
        """A new CTA: nothing is in flight."""
        self.pc = self.again = pc
        self.loops, self.trips = [0] * LOOP_DEPTH, [0] * LOOP_DEPTH
        self.board, self.result_at = [0] * SCOREBOARDS, 0
        self.loads, self.open_until = [Landing()] * SCOREBOARDS, Landing()  # what lands by scoreboard, and in the open group
        self.product_until = NEVER_ISSUED  # a product's end is kept without what will hold it up
        self.begun = False  # it has issued products that it has not committed yet
        self.looks_again = False  # when it resumes, since what it waits for may have been put off
        self.given, self.code_at = LONG_AGO, 0  # when it got its last bundle, and the code of the one that it asks for
        self.groups: list[Landing] = []  # when each closed cp.async group has landed
        self.products: list[int] = []  # when each closed group of products is done
        self.steps = [0] * max(1, self.rings)  # how often each ring went on

    def value(self, row: list[int]) -> int:
        """Of one :class:`~flashsim.model.program.Index`."""
        total, arg, arg_coef, depth, coef, outer, outer_coef = row
        total += arg_coef * self.args[arg] if arg >= 0 else 0
        total += coef * self.loops[depth] if depth >= 0 else 0
        return total + (outer_coef * self.loops[outer] if outer >= 0 else 0)

    def due(self, op: int, arg: int) -> tuple[int, Landing, int]:
        """From when on a waiting row may go on, what has to land first, and the stall it is booked under."""
        if op == DEPEND:
            return self.result_at, Landing(), STALL_LATENCY
        if op == WAIT_SCOREBOARD:
            return self.board[arg], self.loads[arg], STALL_SCOREBOARD
        if op == MMA_WAIT:
            number = len(self.products) - arg
            return (self.products[number - 1] if number > 0 else NEVER_ISSUED), Landing(), STALL_PRODUCT
        number = len(self.groups) - arg
        return 0, self.groups[number - 1] if number > 0 else Landing(), STALL_GROUP


class Tile:
    """A tile that a CTA works on: its place in the queue, its arguments and how many warps have not ended it."""

    def __init__(self, job: Job, order: int, alive: int) -> None:
        self.order, self.number, self.alive = order, int(job.queue[order]), alive
        self.args: list[int] = job.tile_args[self.number].tolist()


class NamedBarrier:
    """Counts warps in; the last one releases those that wait."""

    def __init__(self) -> None:
        self.arrived = 0
        self.waiting: list[tuple[Warp, simpy.Event]] = []


class Mbarrier:
    """One stage of an mbarrier. A phase ends when its arrivals and bytes are known; it is over when the last of them is."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes_due = self.over_at = self.phase = 0
        self.copies = Landing()  # of the phase that runs
        self.done_at = [Landing(), Landing()]  # when the last phase of each parity was over
        self.waiting: list[tuple[Warp, simpy.Event]] = []  # all for the phase that runs

    def book(self, arrivals: int, size: int, at: int) -> bool:
        """``arrivals`` come and ``size`` more bytes are due, which is so at ``at``; whether that ends the phase."""
        self.pending -= arrivals
        self.bytes_due += size
        self.over_at = max(self.over_at, at)
        return self.pending == 0 and self.bytes_due == 0

    def lands(self, landing: Landing, later: int) -> None:
        """A copy is part of the phase that runs; ``later``: ticks from the SM's port to SMEM."""
        self.copies = self.copies.with_(replace(landing, at=landing.at + later))

    def complete(self, now: int, wake: int) -> Landing:
        """Begin the next phase; returns when this one is over and its waiters have been woken."""
        over = self.done_at[self.phase % 2] = replace(self.copies, at=max(now, self.over_at, self.copies.at) + wake)
        self.phase += 1
        self.pending, self.over_at, self.copies = self.count, 0, Landing()
        return over


class SubPartition:
    """Issue port and pipes of a quarter SM. Round robin among the warps that wait for it, one bundle at a time.

    ``grant`` is called with each warp that is given its bundle.
    """

    def __init__(
        self, clock: Clock, key: int, job: Job, code: CodeCache, bundles: list[Bundle],
        grant: Callable[[SubPartition, Warp], None],
    ) -> None:  # fmt: skip
        self.clock, self.key, self.code, self.bundles, self.grant = clock, key, code, bundles, grant
        self.product_ends = [NEVER_ISSUED] * job.product_queue  # of the last ones issued, without ``held_up``
        self.held_up = 0
        self.members: list[Warp] = []
        self.port_free, self.pipe_free = 0, [0] * len(PIPES)
        self.product_until = 0  # until when the tensor core is busy with products
        self.served = 0
        self.wake: int | None = None
        self.busy = [0] * (len(PIPES) + 1)

    def ask(self, warp: Warp) -> None:
        """The warp waits for its bundle from now on, at first for what is free last."""
        now = warp.since = self.clock.now
        warp.ready, warp.served, warp.code_at = True, self.clock.env.event(), 0
        soonest = max(now, self.soonest(warp))
        warp.blocker = self.blocker(warp, soonest)
        warp.code_at = self.code.ask(warp, self.bundles[warp.row[BUNDLE]], now)
        if warp.code_at > soonest:
            soonest, warp.blocker = warp.code_at, STALL_FETCH
        self.arbitrate_at(soonest)

    def soonest(self, warp: Warp) -> int:
        """When the code is at hand and the port and every pipe that the warp's bundle uses are free, or for a product a place in
        the queue."""
        at = max(self.port_free, warp.code_at)
        if self._multiplies(warp):
            return max(at, self.product_ends[0] + self.held_up)
        for pipe, _ in self.bundles[warp.row[BUNDLE]].alone.pipes:
            if self.pipe_free[pipe] > at:
                at = self.pipe_free[pipe]
        return at

    def blocker(self, warp: Warp, tick: int) -> int:
        """What the warp waits for: the last pipe to become free if that is later than the port, else the port."""
        late = STALL_PORT
        for pipe, _ in self.bundles[warp.row[BUNDLE]].alone.pipes:
            if self.pipe_free[pipe] > self.port_free and self.pipe_free[pipe] == tick:
                late = pipe
        return late

    def arbitrate_at(self, tick: int) -> None:
        if self.wake is None or tick < self.wake:
            self.wake = tick
            callbacks: list[Any] | None = self.clock.at(tick, self.key).callbacks
            assert callbacks is not None
            callbacks.append(lambda _: self.arbitrate(tick))

    def arbitrate(self, tick: int) -> None:
        if self.wake != tick:
            return  # an earlier wake-up took this one's place
        self.wake = None
        if self.port_free <= tick:
            n = len(self.members)
            for step in range(1, n + 1):
                rank = (self.served + step) % n
                warp = self.members[rank]
                if warp.ready and self.soonest(warp) <= tick and not self._yields(warp):
                    self.served = rank
                    self.grant(self, warp)
                    break
        waiting = min((self.soonest(w) for w in self.members if w.ready), default=None)
        if waiting is not None:
            self.arbitrate_at(waiting)

    def _multiplies(self, warp: Warp) -> bool:
        return self.bundles[warp.row[BUNDLE]].path == WGMMA

    def _yields(self, warp: Warp) -> bool:
        """The first product of a group lets another warp's group go first that has begun and waits for a place."""
        if not self._multiplies(warp) or warp.begun:
            return False
        now = self.clock.now
        return any(other.ready and other.begun and other.code_at <= now and self._multiplies(other) for other in self.members)

    def take(self, bundle: Bundle, now: int) -> Cost:
        """Hold the port and the bundle's pipes; what that costs, which depends on whether a product runs."""
        beside = self.product_until > now and bundle.path != WGMMA
        cost = bundle.beside if beside else bundle.alone
        self.port_free = now + cost.port
        self.busy[-1] += cost.port
        for pipe, ticks in cost.pipes:
            self.pipe_free[pipe] = max(now, self.pipe_free[pipe]) + ticks  # later than now for a product only
            self.busy[pipe] += ticks
        if beside and bundle.delay > 0:
            self.pipe_free[TENSOR] += bundle.delay
            self.product_until = self.pipe_free[TENSOR]
            self.held_up += bundle.delay
        if bundle.path == WGMMA:
            self.product_until = self.pipe_free[TENSOR]
            self.product_ends = [*self.product_ends[1:], self.pipe_free[TENSOR] - self.held_up]
        return cost
