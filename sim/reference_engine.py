"""The reference engine: the contract of :mod:`.engine` as SimPy processes, written to be read.

Every warp is a process, every sub-partition an arbiter. All events go through :meth:`.reference_parts.Clock.fire`, which hands
SimPy the contract's static key as the event's priority: at equal ticks warps resume by number, then sub-partitions arbitrate by
number. Insertion order never decides.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from ..model.instructions import Path
from ..model.program import Opcode
from ..model.rows import ARG, BARRIER, BUNDLE, BYTES, COUNT, INDEX, JUMP, OPCODE, RING, TENSOR

# isort: off
from .engine import (
    BARRIER_BASE, BARRIER_PER_WARP, DISPATCH, LANE, LSU_QUEUE, MBARRIER, PRODUCT, RECORD_COLUMNS, REPLACE, SMEM_LATENCY,
    STALL_BARRIER, STALL_LAUNCH, STALL_MBARRIER, STALL_SMEM, STALLS, TMA, Job, Run, deadlock, warpgroups,
)  # fmt: skip
from .reference_memory import ChipMemory, Landing
from .reference_parts import SMEM_PORT, SUB_PARTITIONS, Bundle, Clock, Mbarrier, NamedBarrier, Sm, SubPartition, Tile, Warp
from .reference_parts import TENSOR as TENSOR_PIPE
# isort: on

Process = Generator[simpy.Event, Any, None]
Waiting = list[tuple[Warp, simpy.Event]]
ISSUE, EXIT, MMA_WAIT = int(Opcode.ISSUE), int(Opcode.EXIT), int(Opcode.MMA_WAIT)
SHARED, LOAD, TO_SMEM, TMA_LOAD = int(Path.SMEM), int(Path.GLOBAL_LOAD), int(Path.GLOBAL_TO_SMEM), int(Path.TMA_LOAD)
WGMMA, TCGEN05 = int(Path.WGMMA), int(Path.TCGEN05)
PREVIOUS, ELECTED, AFTER_PRODUCTS = 1, 1, 1  # MB_WAIT's count and arg, MB_ARRIVE's arg


class _Machine:
    """The job, its SMs, sub-partitions and warps, and what is counted."""

    def __init__(self, job: Job) -> None:
        self.job, self.clock = job, Clock()
        self.code, self.latency = job.code.tolist(), job.latency.tolist()
        self.bundles = [Bundle.of(row) for row in job.bundles.tolist()]
        self.expressions, self.mbarriers = job.expressions.tolist(), job.mbarriers.tolist()
        self.per_cta, self.warpgroups = len(job.warp_start), warpgroups(job.warp_start).tolist()
        self.chip = ChipMemory(job) if job.l2 is not None else None
        self.follows: dict[int, int] = {}  # the CTA after each in a persistent slot
        warps = job.sms * job.slots * self.per_cta
        self.sms = [Sm(job) for _ in range(job.sms)]
        codes = [sm.code for sm in self.sms for _ in range(SUB_PARTITIONS)]
        self.quarters = [SubPartition(self.clock, warps + i, job, each, self.bundles, self.grant) for i, each in enumerate(codes)]
        self.homes: list[SubPartition] = []  # by warp number
        self.ctas: list[_Cta | None] = [None] * (job.sms * job.slots)  # by slot
        self.slots: list[list[Warp]] = []
        for slot in range(job.sms * job.slots):
            sm = slot // job.slots
            self.slots.append([Warp(slot * self.per_cta + i, i, sm, slot, len(job.rings)) for i in range(self.per_cta)])
            for warp in self.slots[-1]:
                lane = warp.number % (job.slots * self.per_cta)
                self.homes.append(self.quarters[sm * SUB_PARTITIONS + lane % SUB_PARTITIONS])
                self.homes[-1].members.append(warp)
        self.stalls = [[[0] * len(STALLS) for _ in range(self.per_cta)] for _ in range(job.sms)]
        self.issued, self.table = [0] * len(job.bundles), np.zeros((len(job.queue), 5), np.int64)  # Run.issued, Run.ctas
        self.records: list[tuple[int, ...]] = []
        self.head, self.last, self.ended = 0, 0, 0
        self.after_copies = self.latency[TMA] + self.latency[MBARRIER]

    def stall(self, warp: Warp, reason: int, amount: int) -> None:
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
        if self.ended < len(job.queue):
            stuck = next(warp for team in self.slots for warp in team if warp.held)
            raise RuntimeError(deadlock(self.last, stuck.tile, stuck.lane, stuck.pc))

    def start_cta(self, slot: int, order: int, tick: int, asked: int) -> None:
        """A CTA that was asked for at ``asked`` starts at ``tick``, with nothing left of the one before."""
        cta = self.ctas[slot] = _Cta(self, slot)
        cta.begin(order, tick)
        for warp in self.slots[slot]:
            self.stall(warp, STALL_LAUNCH, tick - asked)
            self.clock.env.process(cta.life(warp, order, self.clock.at(tick, warp.number)))

    def end_tile(self, tile: Tile, slot: int) -> None:
        now = self.clock.now
        self.table[tile.order, 4] = now
        self.ended += 1
        if self.head < len(self.job.queue) and not self.job.persistent:
            self.head += 1
            self.start_cta(slot, self.head - 1, now + self.latency[REPLACE], now)

    def following(self, order: int) -> int:
        """The next CTA of a persistent slot: decided when the first of its warps asks."""
        if order not in self.follows:
            self.follows[order] = self.head if self.job.dynamic else order + self.job.sms * self.job.slots
            self.head += self.job.dynamic
        return self.follows[order]

    def hold(self, warp: Warp, waiting: Waiting) -> simpy.Event:
        """The warp joins ``waiting``; the event happens when those are released."""
        warp.since, warp.held = self.clock.now, True
        event = self.clock.env.event()
        waiting.append((warp, event))
        return event

    def release(self, waiting: Waiting, tick: int, reason: int) -> None:
        for warp, event in waiting:
            late, warp.late, warp.held = warp.late, 0, False
            self.stall(warp, reason, tick + late - warp.since)
            self.clock.fire(event, tick + late, warp.number)
        waiting.clear()

    def book(self, mbarrier: Mbarrier, arrivals: int, size: int, at: int) -> None:
        """Count towards the phase of ``mbarrier``; if that ends it, its waiters go on when it is over."""
        if mbarrier.book(arrivals, size, at):
            over = mbarrier.complete(self.clock.now, self.latency[MBARRIER])
            for each, _ in mbarrier.waiting:
                each.looks_again = over.l2 > 0
            self.release(mbarrier.waiting, self.until(over, self.after_copies), STALL_MBARRIER)

    def until(self, landing: Landing, after: int = 0) -> int:
        """When something lands, as far as is known now. ``after``: from the answers of a shared L2 and HBM on."""
        return landing.at if self.chip is None else self.chip.until(landing, after)

    # --- one bundle ---

    def grant(self, quarter: SubPartition, warp: Warp) -> None:
        """Give ``warp`` its bundle: hold port, pipes and queues, and wake the warp when it may go on."""
        row, now = warp.row, self.clock.now
        bundle = self.bundles[row[BUNDLE]]
        warp.ready, warp.given = False, now
        self.issued[row[BUNDLE]] += 1
        self.stall(warp, warp.blocker, now - warp.since)
        cost = quarter.take(bundle, now)
        resume = now + cost.gap
        warp.result_at = max(warp.result_at, now + cost.port + bundle.result)
        if bundle.path in (WGMMA, TCGEN05):
            self.multiply(warp, bundle, quarter)
        elif bundle.smem:
            resume = self.share(warp, bundle, resume, quarter.product_until > now)
        if bundle.spill:
            self.sms[warp.sm].l2(now, bundle.spill)
            if self.chip is not None:
                self.chip.spill(now, warp.sm, bundle.spill)
        if LOAD <= bundle.path < WGMMA:
            self.move(warp, bundle.path)
        warp.left -= 1
        if warp.left == 0 and len(self.records) < self.job.record_limit:
            slot = warp.slot % self.job.slots
            self.records.append((warp.row_start, resume, warp.sm, slot, warp.lane, warp.tile, warp.pc))
        assert warp.served is not None
        self.clock.fire(warp.served, resume, warp.number)

    def multiply(self, warp: Warp, bundle: Bundle, quarter: SubPartition) -> None:
        """An asynchronous product: what it reads in SMEM does not queue, and it is done when its tensor cores are."""
        sm = self.sms[warp.sm]
        sm.used[SMEM_PORT] += bundle.smem
        if bundle.path == WGMMA:
            warp.begun = True
            done = quarter.pipe_free[TENSOR_PIPE] - quarter.held_up + bundle.result
        else:
            done = sm.multiply(self.clock.now, bundle.result) + self.latency[PRODUCT]
            for each in self.quarters[warp.sm * SUB_PARTITIONS :][:SUB_PARTITIONS]:
                each.busy[TENSOR_PIPE] += bundle.result
        warp.product_until = max(warp.product_until, done)

    def share(self, warp: Warp, bundle: Bundle, resume: int, beside: bool) -> int:
        """Queue at the SMEM port; when the warp may go on, which a full queue delays."""
        sm, late = self.sms[warp.sm], bundle.smem_beside - bundle.smem if beside else 0
        drained = sm.queue(SMEM_PORT, self.clock.now, bundle.smem + late)
        sm.used[SMEM_PORT] -= late  # the products' own reads, which count as theirs
        if bundle.path != SHARED:
            return resume
        board = warp.row[ARG]
        if board >= 0:
            warp.board[board] = max(warp.board[board], drained + self.latency[SMEM_LATENCY])
        full = drained - self.latency[LSU_QUEUE]
        self.stall(warp, STALL_SMEM, max(0, full - resume))
        return int(max(resume, full))

    def move(self, warp: Warp, path: int) -> None:
        """Ask L2 (and HBM) for this bundle's part of the row's bytes, and tell what counts their arrival."""
        row = warp.row
        moved = row[BYTES] * (row[COUNT] - warp.left + 1) // row[COUNT] - warp.done_bytes
        warp.done_bytes += moved
        sm, tensor, now = self.sms[warp.sm], row[TENSOR], self.clock.now
        block = warp.value(self.expressions[row[INDEX]]) if tensor >= 0 else -1
        size = sm.asked(tensor, block, moved)
        left = sm.l2(now, size)
        if self.chip is None:
            landing = Landing(sm.memory(now, size, tensor, left))
        else:
            whole = sm.asked(tensor, block, row[BYTES]) if warp.done_bytes == row[BYTES] else 0
            landing = self.chip.request(now, warp.sm, size, whole, tensor, row[BUNDLE], block, warp.args, sm.used, left)
        if path in (TO_SMEM, Path.TMA_STORE):
            landing = landing if path == TO_SMEM else Landing(sm.read_out(now, size, left))
            warp.open_until = warp.open_until.with_(landing)
        elif path == LOAD:
            warp.loads[row[ARG]] = warp.loads[row[ARG]].with_(landing)
        elif path == TMA_LOAD:
            cta = self.ctas[warp.slot]
            assert cta is not None
            mbarrier = cta.mbarrier(warp, row)[0]
            mbarrier.lands(landing, self.latency[TMA])
            self.book(mbarrier, 0, -moved, 0)


class _Cta:
    """A CTA on a slot: its barriers, and the tiles that its warps have begun."""

    def __init__(self, machine: _Machine, slot: int) -> None:
        self.machine, self.slot = machine, slot
        self.named: dict[int, NamedBarrier] = {}
        self.gathered: dict[int, Waiting] = {}  # warps of each warpgroup that have come to their next products
        self.mbarriers = [[Mbarrier(count) for _ in range(stages)] for _, count, stages in machine.mbarriers]
        self.tiles: dict[int, Tile] = {}
        self.steps: dict[int, Callable[[Warp, list[int]], simpy.Event | None]] = {
            Opcode.WAIT_SCOREBOARD: self.wait, Opcode.WAIT_GROUP: self.wait, Opcode.DEPEND: self.wait, Opcode.MMA_WAIT: self.wait,
            Opcode.COMMIT: self.commit, Opcode.MMA_COMMIT: self.mma_commit, Opcode.BARRIER: self.sync, Opcode.LOOP: self.loop,
            Opcode.NAMED_ARRIVE: self.arrive, Opcode.MB_ARRIVE: self.mbarrier_arrive, Opcode.MB_WAIT: self.mbarrier_wait,
            Opcode.ADVANCE: self.advance, Opcode.TILE: self.tile, Opcode.END: self.end, Opcode.SKIP_IF_NEGATIVE: self.skip,
        }  # fmt: skip

    # --- tiles ---

    def begin(self, order: int, tick: int) -> None:
        """The first of the CTA's warps begins the tile at ``order`` of the queue."""
        machine, slots = self.machine, self.machine.job.slots
        tile = self.tiles[order] = Tile(machine.job, order, machine.per_cta)
        machine.table[order, :4] = tile.number, self.slot // slots, self.slot % slots, tick

    def life(self, warp: Warp, order: int, start: simpy.Event) -> Process:
        """Wait for the launch, run the warp's code, leave; in a persistent Program go on with the CTA's next tiles."""
        yield start
        machine, job = self.machine, self.machine.job
        warp.begin(int(job.warp_start[warp.lane]))
        while order < len(job.queue):
            if order not in self.tiles:
                self.begin(order, machine.clock.now)
            tile = self.tiles[order]
            warp.tile, warp.args = tile.number, tile.args
            yield from self.run(warp)
            tile.alive -= 1
            if tile.alive == 0:
                machine.end_tile(tile, self.slot)
            if not job.persistent:
                return
            order = machine.following(order)
            warp.pc = warp.again

    def run(self, warp: Warp) -> Process:
        """Run the warp's code up to EXIT."""
        machine, code = self.machine, self.machine.code
        while True:
            machine.last = max(machine.last, machine.clock.now)
            row = code[warp.pc]
            op = row[OPCODE]
            if op == ISSUE:
                yield from self.issue(warp, row)
            elif op == EXIT:
                return
            else:
                while (until := self.steps[op](warp, row)) is not None:
                    yield until
                    if not warp.looks_again:
                        break
            warp.pc += 1

    def issue(self, warp: Warp, row: list[int]) -> Process:
        """Issue one row of code, bundle by bundle."""
        quarter = self.machine.homes[warp.number]
        warp.row, warp.left, warp.done_bytes, warp.row_start = row, row[COUNT], 0, self.machine.clock.now
        if not warp.begun and self.machine.bundles[row[BUNDLE]].path == WGMMA and (others := self.gather(warp)) is not None:
            yield others
        while warp.left:
            quarter.ask(warp)
            assert warp.served is not None
            yield warp.served

    def gather(self, warp: Warp) -> simpy.Event | None:
        """The warp comes to a group's first product; what it waits for where others of its warpgroup have not."""
        first, last = self.machine.warpgroups[warp.lane]
        if len(waiting := self.gathered.setdefault(first, [])) + 1 < last - first:
            return self.machine.hold(warp, waiting)
        self.machine.release(waiting, self.machine.clock.now, STALL_BARRIER)
        return None

    # --- one row each; the event, if any, is what the warp waits for ---

    def wait_until(self, warp: Warp, tick: int, reason: int) -> simpy.Event | None:
        clock = self.machine.clock
        if tick <= clock.now:
            return None
        self.machine.stall(warp, reason, tick - clock.now)
        return clock.at(tick, warp.number)

    def wait(self, warp: Warp, row: list[int]) -> simpy.Event | None:
        machine, (at, landing, reason) = self.machine, warp.due(row[OPCODE], row[ARG])
        at += machine.homes[warp.number].held_up if row[OPCODE] == MMA_WAIT else 0
        lands = machine.until(landing)
        # products may be held up while the warp waits for them, loads put off by what other SMs ask for
        warp.looks_again = row[OPCODE] == MMA_WAIT or (landing.l2 > 0 and lands > machine.clock.now)
        return self.wait_until(warp, max(at, lands), reason)

    def commit(self, warp: Warp, row: list[int]) -> None:
        warp.groups.append(warp.groups[-1].with_(warp.open_until) if warp.groups else warp.open_until)
        warp.open_until = Landing()

    def mma_commit(self, warp: Warp, row: list[int]) -> None:
        warp.products.append(warp.product_until)
        warp.begun = False

    def sync(self, warp: Warp, row: list[int]) -> simpy.Event:
        warp.looks_again = False
        event = self.machine.hold(warp, self.named.setdefault(row[ARG], NamedBarrier()).waiting)
        self.arrive(warp, row)
        return event

    def arrive(self, warp: Warp, row: list[int]) -> None:
        machine, barrier = self.machine, self.named.setdefault(row[ARG], NamedBarrier())
        barrier.arrived += 1
        if barrier.arrived == row[COUNT]:
            barrier.arrived = 0
            ticks = machine.latency[BARRIER_BASE] + machine.latency[BARRIER_PER_WARP] * row[COUNT]
            machine.release(barrier.waiting, machine.clock.now + ticks, STALL_BARRIER)

    def mbarrier(self, warp: Warp, row: list[int]) -> tuple[Mbarrier, int]:
        """The mbarrier stage that the warp's ring names, and the number of its phase."""
        stages = self.mbarriers[row[BARRIER]]
        turn, stage = divmod(warp.steps[row[RING]], len(stages))
        return stages[stage], turn

    def mbarrier_arrive(self, warp: Warp, row: list[int]) -> None:
        at = self.machine.clock.now
        if row[ARG] == AFTER_PRODUCTS:
            at = max(at, warp.product_until + self.machine.homes[warp.number].held_up)
        self.machine.book(self.mbarrier(warp, row)[0], row[COUNT], row[BYTES], at)

    def mbarrier_wait(self, warp: Warp, row: list[int]) -> simpy.Event | None:
        mbarrier, turn = self.mbarrier(warp, row)
        parity = (turn + (row[COUNT] == PREVIOUS)) % 2
        late = self.machine.latency[LANE] if row[ARG] == ELECTED else 0
        if mbarrier.phase % 2 == parity:
            warp.late = late
            return self.machine.hold(warp, mbarrier.waiting)
        over = mbarrier.done_at[parity]
        warp.looks_again = over.l2 > 0
        tick = self.machine.until(over, self.machine.after_copies)
        return self.wait_until(warp, tick + late if tick > self.machine.clock.now else tick, STALL_MBARRIER)

    def advance(self, warp: Warp, row: list[int]) -> None:
        warp.steps[row[RING]] += 1

    def tile(self, warp: Warp, row: list[int]) -> None:
        warp.again = warp.pc + 1

    # --- control flow ---

    def loop(self, warp: Warp, row: list[int]) -> None:
        depth = self.machine.code[row[JUMP]][INDEX]
        trips = warp.value(self.machine.expressions[row[ARG]])
        if trips <= 0:
            warp.pc = row[JUMP]
        else:
            warp.loops[depth], warp.trips[depth] = 0, trips

    def end(self, warp: Warp, row: list[int]) -> None:
        depth, trip = row[INDEX], warp.loops[row[INDEX]] + 1
        again = trip < warp.trips[depth]
        warp.loops[depth] = trip if again else 0
        warp.pc = row[JUMP] if again else warp.pc

    def skip(self, warp: Warp, row: list[int]) -> None:
        if warp.value(self.machine.expressions[row[ARG]]) < 0:
            warp.pc = row[JUMP] - 1


def run(job: Job) -> Run:
    """Simulate ``job``: the same Run as the fast engine, hundreds of times slower."""
    machine = _Machine(job)
    machine.run()
    busy = np.array([q.busy for q in machine.quarters], np.int64)
    return Run(
        ticks=machine.last, ctas=machine.table, busy=busy.reshape(job.sms, SUB_PARTITIONS, -1),
        shared=np.array([sm.used for sm in machine.sms], np.int64), stalls=np.array(machine.stalls, np.int64),
        issued=np.array(machine.issued, np.int64), events=machine.clock.events,
        records=np.array(machine.records, np.int64).reshape(-1, len(RECORD_COLUMNS)),
        **({"traffic": np.array(chip.traffic), "l2": np.array(chip.table())} if (chip := machine.chip) else {}),
    )  # fmt: skip
