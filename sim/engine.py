"""The engines' contract: what goes in, what comes out, and what every engine must do to the same event at the same tick.

Time is integer: TICKS_PER_CYCLE ticks an SM cycle. An engine takes a :class:`Job` and returns a :class:`Run`; two engines given
the same Job return equal Runs, array by array.

What happens at a tick, in this order: warps resume (by global warp number), then sub-partitions arbitrate (by number).
Global warp number = (sm * slots + slot) * warps + warp. A resumed warp runs its code until a row blocks it:

* ISSUE asks for one bundle after the other. A bundle waits until its sub-partition's port and all pipes it uses are free;
  among waiting warps the first after the last one served goes next (round robin). It holds the port and each pipe for the
  sum of its instructions' costs; its warp goes on when the longest of those and of the warp's own issue gaps is over.
  Bundles that move data also queue, first come first served, at the SM's shared-memory port or at L2 and HBM; their arrival
  time is known then.
* WAIT_SCOREBOARD, WAIT_GROUP, DEPEND resume the warp when what it waits for has arrived.
* BARRIER releases all warps of the CTA ``barrier`` ticks after the last one arrives.
* EXIT of a CTA's last warp frees its slot; the next tile of the SM's queue starts ``replace`` ticks later.

Sources: the port and pipe costs are the chip's (``model/gpus``); the order of events is this file's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np

from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS, PIPES
from ..model.program import IntArray, Program

TICKS_PER_CYCLE = 100

#: Columns of ``Job.bundles``: ticks of the port, of the warp until it may go on, until the result, and at the SMEM port.
BUNDLE_COLUMNS = ("port", "gap", "result", "path", "smem", *PIPES)
PORT, GAP, RESULT, PATH, SMEM, FIRST_PIPE = range(6)

SCOREBOARDS = 6
GROUPS = 8  # cp.async groups a warp may have in flight
LOOP_DEPTH = 4

#: Why a warp waited, columns of ``Run.stalls``.
STALLS = (
    "fma",
    "alu",
    "mufu",
    "tensor",
    "lsu",
    "control",
    "port",
    "smem",
    "scoreboard",
    "cp_async",
    "barrier",
    "launch",
    "latency",
)
STALL_PORT, STALL_SMEM, STALL_SCOREBOARD, STALL_GROUP, STALL_BARRIER, STALL_LAUNCH, STALL_LATENCY = 6, 7, 8, 9, 10, 11, 12

#: Rows of ``Job.latency``.
SMEM_LATENCY, L2_LATENCY, HBM_LATENCY, BARRIER_BASE, BARRIER_PER_WARP, DISPATCH, REPLACE, LSU_QUEUE = range(8)

#: Rows of ``Job.rate``: ticks per byte as (numerator, denominator).
L2_RATE, HBM_RATE = range(2)

#: Columns of ``Run.records``.
RECORD_COLUMNS = ("start", "end", "sm", "slot", "warp", "tile", "row")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kernel on ``sms`` SMs as flat arrays. ``miss_ppm[t]``: share of tensor t's bytes that L2 does not hold, in millionths.

    ``queue``: tile numbers in the order in which free slots take them. ``bundles`` has one row per bundle and the columns of
    BUNDLE_COLUMNS.
    """

    code: IntArray
    expressions: IntArray
    tile_args: IntArray
    warp_start: IntArray
    queue: IntArray
    sms: int
    slots: int
    bundles: IntArray
    latency: IntArray
    rate: IntArray
    miss_ppm: IntArray
    record_limit: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What happened, in ticks. ``ctas`` rows: tile, sm, slot, start, end. ``busy[sm, sub-partition]``: PIPES then port.

    ``shared[sm]``: smem, l2 and hbm ports. ``stalls[sm, warp of the CTA]``: STALLS. ``issued``: times each bundle was issued.
    """

    ticks: int
    ctas: IntArray
    busy: IntArray
    shared: IntArray
    stalls: IntArray
    issued: IntArray
    records: IntArray
    events: int = field(compare=False, default=0)

    def differences(self, other: Run) -> list[str]:
        """Names of the fields in which two runs differ; empty when equal."""
        return [f.name for f in fields(self) if f.compare and not np.array_equal(getattr(self, f.name), getattr(other, f.name))]


Engine = Callable[[Job], Run]


def ticks(cycles: float) -> int:
    return round(cycles * TICKS_PER_CYCLE)


def bundle_table(program: Program, gpu: GPU) -> IntArray:
    """One row per bundle, columns BUNDLE_COLUMNS: the sums of its instructions' costs on ``gpu``, in ticks."""
    rows = np.zeros((len(program.bundles), len(BUNDLE_COLUMNS)), dtype=np.int64)
    for row, bundle in zip(rows, program.bundles, strict=True):
        for name, n in bundle:
            kind = INSTRUCTIONS[name]
            port = ticks(getattr(gpu.port, kind.cost))
            row[PORT] += n * port
            row[GAP] += n * max(ticks(getattr(gpu.warp, kind.cost)), port)
            row[RESULT] = max(row[RESULT], ticks(getattr(gpu.result, kind.cost)))
            row[PATH] = max(row[PATH], int(kind.path))
            row[SMEM] += n * ticks(kind.smem_bytes / gpu.smem.bytes_per_clk)
            row[FIRST_PIPE + PIPES.index(kind.pipe)] += n * max(ticks(getattr(gpu.pipe, kind.cost)), port)
        row[GAP] = max(row[GAP], row[FIRST_PIPE:].max())
    return rows


def make_job(
    program: Program,
    gpu: GPU,
    *,
    clock_mhz: float,
    slots: int,
    queue: IntArray,
    miss_ppm: IntArray,
    active_sms: int,
    hbm_bytes_per_s: float,
    record_limit: int = 0,
) -> Job:
    """Price ``program`` for one SM of ``gpu`` that shares L2 and HBM fairly with ``active_sms`` - 1 others."""
    cycles_per_ns = clock_mhz / 1e3
    l2_share = min(float(gpu.l2.bytes_per_clk_one_sm), gpu.l2.bytes_per_clk / active_sms)
    hbm_share = hbm_bytes_per_s / (clock_mhz * 1e6) / active_sms
    hbm_share = min(hbm_share, l2_share)
    near_far_ns = (gpu.l2.latency_near_ns + gpu.l2.latency_far_ns) / 2
    latency = [
        gpu.latency.lds,
        near_far_ns * cycles_per_ns,
        gpu.hbm.latency_ns * cycles_per_ns,
        gpu.latency.barrier_base,
        gpu.latency.barrier_per_warp,
        gpu.launch.second_cta_cycles,
        gpu.launch.cta_replace_cycles,
        gpu.latency.lsu_queue,
    ]
    starts = [role.start for role in program.roles for _ in range(role.warps)]
    return Job(
        code=program.code,
        expressions=program.expression_table,
        tile_args=program.tiles.values.astype(np.int64),
        warp_start=np.array(starts, dtype=np.int64),
        queue=queue.astype(np.int64),
        sms=1,
        slots=slots,
        bundles=bundle_table(program, gpu),
        latency=np.array([ticks(v) for v in latency], dtype=np.int64),
        rate=np.array([_ratio(l2_share), _ratio(hbm_share)], dtype=np.int64),
        miss_ppm=miss_ppm.astype(np.int64),
        record_limit=record_limit,
    )


def _ratio(bytes_per_cycle: float) -> tuple[int, int]:
    """Ticks per byte as an integer fraction: ticks = bytes * numerator // denominator."""
    return TICKS_PER_CYCLE * 1000, max(1, round(bytes_per_cycle * 1000))
