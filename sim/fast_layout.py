"""Where the fast engine keeps what it knows: one row of integers an SM for its machine, one for what lies outside.

*The machine* is all that decides when a warp goes on, but for two things that lie *outside* of it: when loads land, and how loops
and tiles follow each other. The machine only asks about those (:mod:`.fast_outside`). So two moments with equal machine rows,
times taken from the moment's tick, go on alike as long as the answers are alike, and :mod:`.fast_memo` remembers how.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..model.program import IntArray, Opcode
from .engine import COPY_GROUPS, GROUPS, LOOP_DEPTH, SCOREBOARDS, STALLS, Job, longest_fetch, warpgroups
from .fast_code import AWAY, COMES, TABLE_COLUMNS
from .fast_lru import TILE_SIZE
from .fast_parts import N_PIPES, NEVER, NEVER_ISSUED
from .fast_share import KEPT, MOST_TURNS, QUEUE_SIZE

QUARTERS = 4
ISSUE, LOOP, END, EXIT = int(Opcode.ISSUE), int(Opcode.LOOP), int(Opcode.END), int(Opcode.EXIT)
NAMED = 16  # named barriers of a CTA
TOGETHER = -2 - NAMED  # what a warp waits for until its warpgroup's others have come to their products

#: How a number of the machine's row is seen from a tick: as it is, as a time that no longer matters once it is past, or as the
#: time of an event, NEVER where there is none.
#: HELD: the end of a product without what holds it up on its sub-partition, NEVER_ISSUED where there is none; TOTAL: how much
#: that is.
PLAIN, TIME, EVENT, HELD, TOTAL = range(5)

#: A warp's numbers, after the events at the row's beginning. LANDING: bits of the scoreboards that a load in flight will set;
#: BEGUN: ISSUED where it has issued products that it has not committed, GATHERED where it asks for the first. CODE_AT: when its
#: bundle's code is at hand; GIVEN: when it was given its last bundle, and the longest fetch later.
PC, LEFT, DONE_BYTES, READY, REASON, WAITS_FOR, LANDING, AGAIN, BEGUN, SINCE, RESULT_AT, PRODUCT_UNTIL = range(12)
CODE_AT, GIVEN, BOARD = range(12, 15)
PRODUCTS = BOARD + SCOREBOARDS  # when the last GROUPS groups of products are done, newest first
STEPS = PRODUCTS + GROUPS  # of each ring
GATHERED, ISSUED = 1, 2
WARP_KINDS = [PLAIN] * 9 + [EVENT, TIME, HELD, TIME, TIME] + [TIME] * SCOREBOARDS + [HELD] * GROUPS
#: An mbarrier's. LANDS: a copy in flight is part of its phase. UNKNOWN + parity: when that phase was over is known outside only.
PENDING, BYTES_DUE, PHASE, LANDS, UNKNOWN, OVER_AT, DONE, MBARRIER_SIZE = 0, 1, 2, 3, 4, 6, 7, 9
MBARRIER_KINDS = [PLAIN] * 6 + [TIME] * 3
#: A sub-partition's.
SERVED, PORT_FREE, PRODUCT_RUNS, PIPE_FREE = range(4)
HELD_UP, ENDS = PIPE_FREE + N_PIPES, PIPE_FREE + N_PIPES + 1  # by how much in all, and of the last products, oldest first
QUARTER_KINDS = [PLAIN] + [TIME] * (2 + N_PIPES) + [TOTAL]
#: The SM's. FETCH_FREE: when its fetch port is, and the longest fetch later.
TENSOR_FREE, SMEM_FREE, FETCH_FREE = range(3)

#: Outside: of a warp, cp.async's open group, how many are closed, what its row has moved, when the last COPY_GROUPS landed, and
#: when loads to its scoreboards do.
OPEN, CLOSED, MOVED, GROUP, LAND = 0, 1, 2, 3, 3 + COPY_GROUPS
OUTSIDE_WARP = LAND + SCOREBOARDS
#: Of an mbarrier: when the copies of its phase land, and when the last phase of each parity was over.
COPIES, OVER, OUTSIDE_MBARRIER = 0, 1, 3

#: What is counted of an SM, in this order: busy ticks of each sub-partition's pipes and port, of the SMEM port, events, stalls
#: of each warp of the CTA, and after those bundles issued.
BUSY, USED_SMEM = 0, QUARTERS * (N_PIPES + 1)
EVENTS, STALLED = USED_SMEM + 1, USED_SMEM + 2
N_STALLS = len(STALLS)

#: How an SM is run (State.control). PATH: answers since the segment began; SCRIPT: how many of them are known before they are
#: asked for; GOES_ON: a warp that stopped amid its rows to let other SMs catch up, at NOW.
MODE, BEGAN, SEGMENT, NODE, PATH, SCRIPT, GOES_ON, NOW, DUE, LAST, RECORDING, CONTROL_SIZE = range(12)
#: State.counters: the queue's head, CTAs that have ended, records kept.
HEAD, FINISHED, RECORDS = range(3)


class Plan(NamedTuple):
    """What does not change while a job runs: its arrays, sizes, and where each part of a machine's row begins."""

    code: Any
    expressions: Any
    tile_args: Any
    warp_start: Any
    warpgroups: Any
    queue: Any
    bundles: Any
    latency: Any
    rate: Any
    miss_ppm: Any
    mbarriers: Any
    full_count: Any
    multicast: Any
    blocks: Any
    block_bytes: Any
    stretch: Any
    stretch_size: Any
    code_held: int
    fetch_pace: int
    longest_fetch: int
    kinds: Any
    tensors: Any
    numbers: Any
    sizes: Any
    writes: Any
    capacity: int
    chip: bool
    dynamic: bool
    persistent: bool
    strict: bool
    record_limit: int
    sms: int
    slots: int
    per_cta: int
    warps: int
    instances: int
    wrap: int
    anchor: int
    first_warp: int
    warp_size: int
    first_mbarrier: int
    first_named: int
    first_quarter: int
    first_shared: int
    first_code: int
    code_rows: int
    quarter_size: int
    outside_mbarrier: int
    outside_ports: int


class State(NamedTuple):
    """What changes. One row an SM, but for what stands after ``row_start``: that belongs to the launch."""

    machine: Any
    outside: Any
    loops: Any
    trips: Any
    tile_of: Any
    order_of: Any
    totals: Any
    counted: Any  # since the segment began
    ports: Any  # busy ticks at L2 and HBM
    control: Any
    path: Any
    row_start: Any
    left_of: Any
    follows: Any  # the CTA that follows each in its slot, once that is known
    ctas: Any
    counters: Any
    records: Any
    tiles: Any
    held: Any  # bytes in L2
    traffic: Any
    marks_of: Any  # beside each time in `outside`: to which marks L2 and HBM have to come as well
    queues: Any  # L2's and HBM's, as in fast_share
    marks: Any
    heaps: Any
    turns: Any
    changes: Any
    rides: Any  # up to which mark of HBM each SM's last tile is filled, by whomever


def plan(job: Job) -> Plan:
    per_cta, rings = len(job.warp_start), max(1, len(job.rings))
    warps, instances = job.slots * per_cta, int(job.mbarriers[:, 2].sum())
    warp_size = STEPS + rings
    kinds: list[int] = [EVENT] * (warps + QUARTERS)
    firsts = []
    blocks = ((warps, [*WARP_KINDS, *[PLAIN] * rings]), (job.slots * instances, MBARRIER_KINDS))
    quarter = [*QUARTER_KINDS, *[HELD] * job.product_queue]
    code_rows = len(job.stretch_size) + 2 if len(job.stretch_size) else 0
    table = (code_rows, [PLAIN, PLAIN, TIME])
    for number, each in (*blocks, (job.slots * NAMED, [PLAIN]), (QUARTERS, quarter), (3, [TIME]), table):
        firsts.append(len(kinds))
        kinds += each * number
    outside_mbarrier = warps * OUTSIDE_WARP
    ports = outside_mbarrier + job.slots * instances * OUTSIDE_MBARRIER
    stages = [int(n) for n in job.mbarriers[:, 2]]
    l2, nothing = job.l2, np.zeros((1, 1), np.int64)
    return Plan(
        code=job.code, expressions=job.expressions, tile_args=job.tile_args, warp_start=job.warp_start,
        warpgroups=warpgroups(job.warp_start), queue=job.queue,
        bundles=job.bundles, latency=job.latency, rate=job.rate, miss_ppm=job.miss_ppm, mbarriers=job.mbarriers,
        full_count=np.repeat(job.mbarriers[:, 1], job.mbarriers[:, 2]), multicast=job.multicast,
        blocks=job.blocks, block_bytes=job.block_bytes, stretch=job.stretch, stretch_size=job.stretch_size,
        code_held=job.code_held, fetch_pace=job.fetch_pace, longest_fetch=longest_fetch(job) if code_rows else 0,
        kinds=np.array(kinds, np.int64), tensors=l2.tensors if l2 else nothing, numbers=l2.numbers if l2 else nothing[0],
        sizes=l2.sizes if l2 else nothing[0], writes=l2.writes if l2 else nothing[0], capacity=l2.capacity if l2 else 0,
        chip=l2 is not None, dynamic=job.dynamic, persistent=job.persistent, strict=job.record_limit > 0,
        record_limit=job.record_limit, sms=job.sms, slots=job.slots, per_cta=per_cta, warps=warps, instances=instances,
        wrap=int(np.lcm.reduce([2 * n for n in stages or [1]])), anchor=_anchor(job), first_warp=firsts[0], warp_size=warp_size,
        first_mbarrier=firsts[1], first_named=firsts[2], first_quarter=firsts[3],
        first_shared=firsts[4], first_code=firsts[5], code_rows=code_rows,
        quarter_size=len(quarter), outside_mbarrier=outside_mbarrier, outside_ports=ports,
    )  # fmt: skip


def _anchor(job: Job) -> int:
    """The warp whose loop closes a segment: the first of the role with the longest code inside loops."""
    op, count = job.code[:, 0], job.code[:, 2]
    inside = np.cumsum((op == LOOP).astype(np.int64) - (op == END)) > 0
    issued = np.cumsum(np.where(inside & (op == ISSUE), count, 0))
    exits = np.flatnonzero(op == EXIT)
    roles, first = np.unique(job.warp_start, return_index=True)
    work = issued[exits[np.searchsorted(exits, roles)]] - np.where(roles > 0, issued[roles - 1], 0)
    return int(min(zip(-work, first, strict=True))[1])


def state(p: Plan, job: Job, most: int) -> State:
    """Nothing has begun. ``most``: answers that a segment may need."""

    def zeros(*shape: int) -> IntArray:
        return np.zeros(shape, np.int64)

    counted = STALLED + p.per_cta * N_STALLS + len(p.bundles)
    machine = zeros(p.sms, len(p.kinds))
    machine[:, p.kinds == EVENT] = NEVER
    machine[:, p.kinds == HELD] = NEVER_ISSUED
    for w in range(p.warps):
        machine[:, p.first_warp + w * p.warp_size + WAITS_FOR] = -1
    for c in range(p.slots * p.instances):
        machine[:, p.first_mbarrier + c * MBARRIER_SIZE + PENDING] = p.full_count[c % p.instances]
    _forget_code(p, machine)
    control = zeros(p.sms, CONTROL_SIZE)
    control[:, SEGMENT] = control[:, GOES_ON] = -1
    return State(
        machine=machine, outside=zeros(p.sms, p.outside_ports + 3),
        loops=zeros(p.sms, p.warps, LOOP_DEPTH), trips=zeros(p.sms, p.warps, LOOP_DEPTH),
        tile_of=np.full((p.sms, p.warps), -1), order_of=zeros(p.sms, p.warps), totals=zeros(p.sms, counted),
        counted=zeros(p.sms, counted), ports=zeros(p.sms, 2), control=control, path=np.empty((p.sms, most, 7), np.int64),
        row_start=zeros(p.sms, p.warps), left_of=np.full(len(p.queue), p.per_cta), follows=np.full(len(p.queue), -1),
        ctas=np.full((len(p.queue), 5), -1), counters=zeros(3), records=zeros(p.record_limit, 7),
        tiles=job.l2.tiles.copy() if job.l2 else zeros(1, TILE_SIZE),
        held=np.array([job.l2.held if job.l2 else 0], np.int64), traffic=zeros(len(p.tensors), 4),
        marks_of=zeros(p.sms, p.outside_ports, 2) if p.chip else zeros(1, 1, 2), queues=zeros(2, QUEUE_SIZE),
        marks=zeros(2, p.sms), heaps=zeros(2, p.sms + 1), turns=zeros(2, MOST_TURNS * p.sms + 1),
        changes=zeros(2, KEPT if p.chip else 1, 3), rides=zeros(p.sms),
    )  # fmt: skip


def _forget_code(p: Plan, machine: IntArray) -> None:
    """No SM holds any stretch of code."""
    tables = machine[:, p.first_code :].reshape(p.sms, p.code_rows, TABLE_COLUMNS)
    tables[:, :-2, :COMES] = AWAY
    tables[:, -2:-1, :COMES] = p.code_rows - 2
