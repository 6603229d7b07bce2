"""The reference engine: the contract of :mod:`.engine` as SimPy processes, written to be read.

Every warp is a process, every sub-partition an arbiter. All events go through :meth:`_Clock.at`, which hands SimPy the
contract's static key as the event's priority: at equal ticks warps resume by number, then sub-partitions arbitrate by
number. Insertion order never decides.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import numpy as np
import simpy
from simpy.events import EventPriority

from ..model.instructions import PIPES, Path
from ..model.program import Opcode
from .engine import (
    BARRIER_BASE,
    BARRIER_PER_WARP,
    DISPATCH,
    FIRST_PIPE,
    HBM_LATENCY,
    HBM_RATE,
    L2_LATENCY,
    L2_RATE,
    LOOP_DEPTH,
    LSU_QUEUE,
    RECORD_COLUMNS,
    REPLACE,
    SCOREBOARDS,
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

Process = Generator[simpy.Event, Any, None]
SUB_PARTITIONS = 4
ISSUE, WAIT_SCOREBOARD, COMMIT, WAIT_GROUP, BARRIER, LOOP, END, SKIP, EXIT, DEPEND = (int(op) for op in Opcode)
SHARED, LOAD, TO_SMEM = int(Path.SMEM), int(Path.GLOBAL_LOAD), int(Path.GLOBAL_TO_SMEM)
WAITS = (WAIT_SCOREBOARD, WAIT_GROUP, DEPEND)
BUNDLE = 1  # the column of a code row that names its bundle
MILLION = 1_000_000


class _Clock:
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


class _Sm:
    """What one SM's warps share: the SMEM port and its share of L2 and HBM, each first come, first served."""

    def __init__(self, job: Job) -> None:
        self.free, self.used = [0, 0, 0], [0, 0, 0]
        self.missed = [0] * max(1, len(job.miss_ppm))
        self.rate, self.latency, self.miss_ppm = job.rate.tolist(), job.latency.tolist(), job.miss_ppm.tolist()

    def queue(self, port: int, tick: int, cost: int) -> int:
        self.free[port] = max(tick, self.free[port]) + cost
        self.used[port] += cost
        return self.free[port]

    def memory(self, tick: int, size: int, tensor: int) -> int:
        """When ``size`` bytes asked for at ``tick`` arrive; L2 misses are spread evenly over a tensor's requests."""
        rate, latency = self.rate, self.latency
        done: int = self.queue(1, tick, size * rate[L2_RATE][0] // rate[L2_RATE][1]) + latency[L2_LATENCY]
        if tensor >= 0:
            self.missed[tensor] += self.miss_ppm[tensor]
            if self.missed[tensor] >= MILLION:
                self.missed[tensor] -= MILLION
                cost = size * rate[HBM_RATE][0] // rate[HBM_RATE][1]
                done = max(done, self.queue(2, tick, cost) + latency[HBM_LATENCY])
        return done


class _Warp:
    """One warp: its number, where it lives, and what it waits for."""

    def __init__(self, number: int, lane: int, sm: int, slot: int) -> None:
        self.number, self.lane, self.sm, self.slot = number, lane, sm, slot
        self.ready = False
        self.since = self.row_start = self.left = self.done_bytes = self.result_at = self.open_until = 0
        self.tile = self.pc = self.blocker = 0
        self.row: list[int] = []
        self.board = [0] * SCOREBOARDS
        self.groups: list[int] = []  # when each closed cp.async group has landed
        self.served: simpy.Event | None = None  # happens when the warp may go on after its bundle

    def begin(self, tile: int, pc: int) -> None:
        self.tile, self.pc = tile, pc
        self.board, self.groups, self.open_until = [0] * SCOREBOARDS, [], 0

    def due(self, op: int, arg: int) -> tuple[int, int]:
        """When what a waiting row waits for has arrived, and the stall it is booked under."""
        if op == DEPEND:
            return self.result_at, STALL_LATENCY
        if op == WAIT_SCOREBOARD:
            return self.board[arg], STALL_SCOREBOARD
        number = len(self.groups) - arg
        return (self.groups[number - 1] if number > 0 else 0), STALL_GROUP


class _SubPartition:
    """Issue port and pipes of a quarter SM. Round robin among the warps that wait for it, one bundle at a time."""

    def __init__(self, machine: _Machine, number: int) -> None:
        self.machine, self.number = machine, number
        self.members: list[_Warp] = []
        self.port_free, self.pipe_free = 0, [0] * len(PIPES)
        self.served = 0
        self.wake: int | None = None
        self.busy = [0] * (len(PIPES) + 1)

    def soonest(self, warp: _Warp) -> int:
        """When the port and every pipe that the warp's bundle uses are free."""
        at = self.port_free
        for pipe in self.machine.uses[warp.row[BUNDLE]]:
            if self.pipe_free[pipe] > at:
                at = self.pipe_free[pipe]
        return at

    def blocker(self, warp: _Warp, tick: int) -> int:
        """What the warp waits for: the last pipe to become free if that is later than the port, else the port."""
        late = STALL_PORT
        for pipe in self.machine.uses[warp.row[BUNDLE]]:
            if self.pipe_free[pipe] > self.port_free and self.pipe_free[pipe] == tick:
                late = pipe
        return late

    def arbitrate_at(self, tick: int) -> None:
        if self.wake is None or tick < self.wake:
            self.wake = tick
            event = self.machine.clock.at(tick, self.machine.warps + self.number)
            assert event.callbacks is not None
            event.callbacks.append(lambda _: self.arbitrate(tick))

    def arbitrate(self, tick: int) -> None:
        if self.wake != tick:
            return  # an earlier wake-up took this one's place
        self.wake = None
        if self.port_free <= tick:
            n = len(self.members)
            for step in range(1, n + 1):
                rank = (self.served + step) % n
                if self.members[rank].ready and self.soonest(self.members[rank]) <= tick:
                    self.served = rank
                    self.machine.grant(self, self.members[rank])
                    break
        waiting = min((self.soonest(w) for w in self.members if w.ready), default=None)
        if waiting is not None:
            self.arbitrate_at(waiting)


class _Machine:
    """The job, its SMs, sub-partitions and warps, and what is counted."""

    def __init__(self, job: Job) -> None:
        self.job, self.clock = job, _Clock()
        self.code, self.bundles, self.latency = job.code.tolist(), job.bundles.tolist(), job.latency.tolist()
        self.expressions = job.expressions.tolist()
        self.uses = [tuple(p for p, cost in enumerate(row[FIRST_PIPE:]) if cost) for row in self.bundles]
        self.per_cta = len(job.warp_start)
        self.warps = job.sms * job.slots * self.per_cta
        self.sms = [_Sm(job) for _ in range(job.sms)]
        self.quarters = [_SubPartition(self, i) for i in range(job.sms * SUB_PARTITIONS)]
        self.slots: list[list[_Warp]] = []
        self.homes: list[_SubPartition] = []  # by warp number
        for slot in range(job.sms * job.slots):
            sm = slot // job.slots
            team = [_Warp(slot * self.per_cta + i, i, sm, slot) for i in range(self.per_cta)]
            for warp in team:
                self.homes.append(self.home(warp))
                self.homes[-1].members.append(warp)
            self.slots.append(team)
        self.stalls = [[[0] * len(STALLS) for _ in range(self.per_cta)] for _ in range(job.sms)]
        self.issued = [0] * len(job.bundles)
        self.ctas = np.zeros((len(job.queue), 5), np.int64)
        self.records: list[tuple[int, ...]] = []
        self.head, self.last, self.ended = 0, 0, 0

    def home(self, warp: _Warp) -> _SubPartition:
        lane = warp.number % (self.job.slots * self.per_cta)
        return self.quarters[warp.sm * SUB_PARTITIONS + lane % SUB_PARTITIONS]

    def stall(self, warp: _Warp, reason: int, amount: int) -> None:
        self.stalls[warp.sm][warp.lane][reason] += amount

    # --- CTAs ---

    def run(self) -> None:
        job = self.job
        for slot in range(job.sms * job.slots):  # the first round: every SM's first slot, then every SM's second
            order = (slot % job.slots) * job.sms + slot // job.slots
            if order < len(job.queue):
                self.head = max(self.head, order + 1)
                self.start_cta(slot, order, (slot % job.slots) * self.latency[DISPATCH], 0)
        self.clock.env.run()
        if self.ended < self.head:
            stuck = self.head - self.ended
            raise RuntimeError(f"deadlock at tick {self.last}: no event is left and {stuck} tiles have not ended")

    def start_cta(self, slot: int, order: int, tick: int, asked: int) -> None:
        tile, job = int(self.job.queue[order]), self.job
        self.ctas[order, :4] = tile, slot // job.slots, slot % job.slots, tick
        cta = _Cta(self, order, slot, tile)
        for warp in self.slots[slot]:
            self.stall(warp, STALL_LAUNCH, tick - asked)
            self.clock.env.process(cta.warp(warp, self.clock.at(tick, warp.number)))

    def end_cta(self, cta: _Cta) -> None:
        now = self.clock.now
        self.ctas[cta.order, 4] = now
        self.ended += 1
        if self.head < len(self.job.queue):
            self.head += 1
            self.start_cta(cta.slot, self.head - 1, now + self.latency[REPLACE], now)

    # --- one bundle ---

    def grant(self, quarter: _SubPartition, warp: _Warp) -> None:
        """Give ``warp`` its bundle: hold port, pipe and queues, and wake the warp when it may go on."""
        row, now = warp.row, self.clock.now
        bundle = row[BUNDLE]
        port, gap, result, path, smem, *pipes = self.bundles[bundle]
        warp.ready = False
        quarter.port_free = now + port
        quarter.busy[-1] += port
        for pipe, cost in enumerate(pipes):
            if cost:
                quarter.pipe_free[pipe] = now + cost
                quarter.busy[pipe] += cost
        self.issued[bundle] += 1
        self.stall(warp, warp.blocker, now - warp.since)
        resume = now + gap
        warp.result_at = max(warp.result_at, now + port + result)
        sm = self.sms[warp.sm]
        if smem:
            drained = sm.queue(0, now, smem)
            if path == SHARED:
                if row[3] >= 0:
                    warp.board[row[3]] = max(warp.board[row[3]], drained + self.latency[SMEM_LATENCY])
                full = drained - self.latency[LSU_QUEUE]
                self.stall(warp, STALL_SMEM, max(0, full - resume))
                resume = max(resume, full)
        if path >= LOAD:
            moved = row[4] * (row[2] - warp.left + 1) // row[2] - warp.done_bytes
            warp.done_bytes += moved
            arrives = sm.memory(now, moved, row[5])
            if path == TO_SMEM:
                warp.open_until = max(warp.open_until, arrives)
            elif path == LOAD:
                warp.board[row[3]] = max(warp.board[row[3]], arrives)
        warp.left -= 1
        if warp.left == 0 and len(self.records) < self.job.record_limit:
            slot = warp.slot % self.job.slots
            self.records.append((warp.row_start, resume, warp.sm, slot, warp.lane, warp.tile, warp.pc))
        assert warp.served is not None
        self.clock.fire(warp.served, resume, warp.number)


class _Cta:
    """A tile on a slot: its arguments, its barriers and how many of its warps still run."""

    def __init__(self, machine: _Machine, order: int, slot: int, tile: int) -> None:
        self.machine, self.order, self.slot, self.tile = machine, order, slot, tile
        self.args: list[int] = machine.job.tile_args[tile].tolist()
        self.alive = machine.per_cta
        self.arrived: dict[int, list[tuple[_Warp, simpy.Event, int]]] = {}

    def arrive(self, barrier: int, warp: _Warp) -> simpy.Event:
        """Join ``barrier``; the event happens for all warps at once after the last one has come."""
        machine, clock = self.machine, self.machine.clock
        team = self.arrived.setdefault(barrier, [])
        event = clock.env.event()
        team.append((warp, event, clock.now))
        if len(team) == machine.per_cta:
            latency = machine.latency
            release = clock.now + latency[BARRIER_BASE] + latency[BARRIER_PER_WARP] * machine.per_cta
            for member, waiting, since in team:
                machine.stall(member, STALL_BARRIER, release - since)
                clock.fire(waiting, release, member.number)
            self.arrived[barrier] = []
        return event

    def expression(self, number: int, loops: list[int]) -> int:
        const, arg, arg_coef, depth, coef, outer, outer_coef = self.machine.expressions[number]
        total: int = const
        total += arg_coef * self.args[arg] if arg >= 0 else 0
        total += coef * loops[depth] if depth >= 0 else 0
        return total + (outer_coef * loops[outer] if outer >= 0 else 0)

    def warp(self, warp: _Warp, start: simpy.Event) -> Process:
        """The life of one warp: wait for the launch, run its code, leave."""
        yield start
        machine, code = self.machine, self.machine.code
        clock = machine.clock
        warp.begin(self.tile, int(machine.job.warp_start[warp.lane]))
        loops, trips = [0] * LOOP_DEPTH, [0] * LOOP_DEPTH
        while True:
            machine.last = max(machine.last, clock.now)
            row = code[warp.pc]
            op, arg, jump = row[0], row[3], row[7]
            if op == ISSUE:
                yield from self.issue(warp, row)
            elif op in WAITS:
                until, reason = warp.due(op, arg)
                if until > clock.now:
                    machine.stall(warp, reason, until - clock.now)
                    yield clock.at(until, warp.number)
            elif op == COMMIT:
                warp.groups.append(max(warp.groups[-1] if warp.groups else 0, warp.open_until))
                warp.open_until = 0
            elif op == BARRIER:
                yield self.arrive(arg, warp)
            elif op == LOOP:
                depth = code[jump][6]
                loops[depth], trips[depth] = 0, self.expression(arg, loops)
                if trips[depth] <= 0:
                    warp.pc = jump
            elif op == END:
                depth = row[6]
                loops[depth] += 1
                if loops[depth] < trips[depth]:
                    warp.pc = jump
                else:
                    loops[depth] = 0
            elif op == SKIP:
                if self.expression(arg, loops) < 0:
                    warp.pc = jump - 1
            else:
                break
            warp.pc += 1
        self.alive -= 1
        if self.alive == 0:
            machine.end_cta(self)

    def issue(self, warp: _Warp, row: list[int]) -> Process:
        """Issue one row of code, bundle by bundle."""
        clock, quarter = self.machine.clock, self.machine.homes[warp.number]
        warp.row, warp.left, warp.done_bytes, warp.row_start = row, row[2], 0, clock.now
        while warp.left:
            warp.ready, warp.since, warp.served = True, clock.now, clock.env.event()
            soonest = max(clock.now, quarter.soonest(warp))
            warp.blocker = quarter.blocker(warp, soonest)
            quarter.arbitrate_at(soonest)
            yield warp.served


def run(job: Job) -> Run:
    """Simulate ``job``: the same Run as the fast engine, hundreds of times slower."""
    machine = _Machine(job)
    machine.run()
    busy = np.array([q.busy for q in machine.quarters], np.int64)
    return Run(
        ticks=machine.last,
        ctas=machine.ctas,
        busy=busy.reshape(job.sms, SUB_PARTITIONS, -1),
        shared=np.array([sm.used for sm in machine.sms], np.int64),
        stalls=np.array(machine.stalls, np.int64),
        issued=np.array(machine.issued, np.int64),
        records=np.array(machine.records, np.int64).reshape(-1, len(RECORD_COLUMNS)),
        events=machine.clock.events,
    )
