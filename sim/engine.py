"""The engines' contract: what goes in, what comes out, and what every engine must do to the same event at the same tick.

Time is integer: TICKS_PER_CYCLE ticks an SM cycle. An engine takes a :class:`Job` and returns a :class:`Run`; two engines given
the same Job return equal Runs, array by array.

What happens at a tick, in this order: warps resume (by global warp number), then sub-partitions arbitrate (by number).
Global warp number = (sm * slots + slot) * warps + warp. A resumed warp runs its code until a row blocks it:

* ISSUE asks for one bundle after the other. A bundle waits until its sub-partition's port and all pipes it uses are free;
  among waiting warps the first after the last one served goes next (round robin). It holds the port and each pipe for the
  sum of its instructions' costs; its warp goes on when the longest of those and of the warp's own issue gaps is over.
  Bundles that move data also queue, first come first served, at the SM's shared-memory port or at L2 and, with ``miss_ppm`` of
  their bytes, at HBM; their arrival time is known then. Spilled registers queue at L2; nothing waits for them but what is asked
  for later. A bulk store joins its warp's open group until STORE ticks after shared memory has been read, at STORE_RATE and as
  the SM's port to L2 takes it.
* WAIT_SCOREBOARD, WAIT_GROUP, DEPEND resume the warp when what it waits for has arrived.
* BARRIER and NAMED_ARRIVE count a warp in; the last of ``count`` releases those that wait, ``barrier`` ticks later.
* MB_ARRIVE and a bulk copy's bytes complete a phase of an mbarrier when all arrivals and bytes of it are known; it is over when
  the last of them is (a copy's landing time is known when it is issued). Waiters resume MBARRIER ticks after that; one lane of
  a warp (``arg`` = 1) that was not told at once LANE ticks later still.
* A product (path WGMMA) queues at its sub-partition's tensor pipe in the order of issue; its warp goes on after ``gap``. A warp
  asks for a group's first product once all warps of its warpgroup (:func:`warpgroups`) have come to theirs; the last goes on, the
  others resume at that tick. A product is not issued while ``product_queue`` others, whichever warp's, are not done. Of warps
  that wait with a product and have its code, those go first whose group has begun. MMA_COMMIT closes a group, MMA_WAIT waits for
  groups to be done. While a product runs, other bundles of that sub-partition cost what the ``beside`` columns say, at the
  shared-memory port too, and those of FMA class hold up by ``delay`` all products that are not done.
* A product of path TCGEN05 queues, first come first served, at the SM's tensor cores for ``result`` ticks; an MB_ARRIVE with
  ``arg`` = 1 counts when all products of its warp are done, PRODUCT ticks after the last.
* A request of a block that ends with its tensor moves what there is of it.
* Where a Program has more code than an SM's instruction cache holds, a row that begins a stretch of it looks there:
  the SM holds the stretches that its warps began last, as many as fit. One that it does not hold is fetched, first come, first
  served, from when the warp was given its last bundle (at most the longest bundle's fetch before it asks). Its instructions
  come one by one, and no warp's bundle is given before its own have come.
* With a shared L2 each request also queues for the whole L2. Of a tile that L2 does not hold, a read asks HBM for ``miss_ppm`` of
  its bytes and the last of its row for the rest of the row's, as far as nobody has; it waits until all is there that was asked
  for. An SM that finds less to ask for rides along: it is served at HBM again when that is there. The first write to a tile
  queues there as well. L2 and HBM serve all SMs that wait evenly, each SM's requests in order (:mod:`.fast_share`), so what
  other SMs ask for later puts off when loads land: a warp that waits for one looks again when it would land if nobody else asked.
* EXIT of a CTA's last warp frees its slot; the next tile of the SM's queue starts ``replace`` ticks later, its barriers
  empty. In a persistent Program each warp goes on by itself with the slot's next tile, and barriers keep their phases.

Sources: the port and pipe costs are the chip's (``model/gpus``); the order of events is this file's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np

from ..model.instructions import PIPES
from ..model.program import IntArray

TICKS_PER_CYCLE = 100

#: Columns of ``Job.bundles``: ticks of the port, of the warp until it may go on, until the result, and at the SMEM port.
#: Then the same port, gap and pipes beside a running product, how much that product is delayed, bytes of local memory that
#: pass L2 (as many as are read there in the same time), and how many instructions of a binary it stands for.
BUNDLE_COLUMNS = (
    "port", "gap", "result", "path", "smem", *PIPES, "port_beside", "gap_beside", *(f"{p}_beside" for p in PIPES), "delay",
    "spill", "smem_beside", "instructions",
)  # fmt: skip
PORT, GAP, RESULT, PATH, SMEM, FIRST_PIPE = range(6)
PORT_BESIDE, GAP_BESIDE, FIRST_BESIDE = (FIRST_PIPE + len(PIPES) + i for i in range(3))
DELAY = FIRST_BESIDE + len(PIPES)
SPILL, SMEM_BESIDE, INSTRUCTIONS_OF = DELAY + 1, DELAY + 2, DELAY + 3
TMEM = PIPES.index("tmem")  # the last pipe: it does not hold the warp that uses it

SCOREBOARDS = 6
COPY_GROUPS, GROUPS = 16, 8  # groups that a warp may have in flight: of cp.async, of products
LOOP_DEPTH = 4
WARPGROUP = 4  # warps that issue a product together

#: Why a warp waited, columns of ``Run.stalls``.
STALLS = (
    *PIPES, "port", "smem", "scoreboard", "cp_async", "barrier", "launch", "latency", "mbarrier", "product", "fetch",
)  # fmt: skip
(
    STALL_PORT, STALL_SMEM, STALL_SCOREBOARD, STALL_GROUP, STALL_BARRIER, STALL_LAUNCH, STALL_LATENCY, STALL_MBARRIER,
    STALL_PRODUCT, STALL_FETCH,
) = range(len(PIPES), len(STALLS))  # fmt: skip

#: Rows of ``Job.latency``.
(
    SMEM_LATENCY, L2_LATENCY, HBM_LATENCY, BARRIER_BASE, BARRIER_PER_WARP, DISPATCH, REPLACE, LSU_QUEUE, MBARRIER, TMA,
    PRODUCT, STORE, LANE,
) = range(13)  # fmt: skip

#: Rows of ``Job.rate``: ticks per byte (numerator, denominator) of an SM's port to L2, HBM, the whole L2, reads for bulk stores.
L2_RATE, HBM_RATE, CHIP_RATE, STORE_RATE = range(4)

#: Columns of ``Run.records``.
RECORD_COLUMNS = ("start", "end", "sm", "slot", "warp", "tile", "row")


@dataclass(frozen=True, kw_only=True)
class SharedL2:
    """L2 and HBM of all SMs: which tile is where, decided as accesses happen (tables as in :mod:`.fast_lru`).

    ``numbers``: row of ``tensors`` of each of the program's; ``sizes``: bytes of blocks; ``held``: bytes in L2 at the start;
    ``writes``: 1 for each bundle that writes.
    """

    tensors: IntArray
    numbers: IntArray
    sizes: IntArray
    tiles: IntArray
    held: int
    capacity: int
    writes: IntArray


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kernel on ``sms`` SMs as flat arrays. ``miss_ppm[t]``: share of tensor t's bytes that L2 does not hold, in millionths.

    ``queue``: tile numbers in the order in which free slots take them; persistent CTAs take every (sms x slots)-th, or with
    ``dynamic`` the next one when their first warp asks. ``bundles`` has one row per bundle and the columns of BUNDLE_COLUMNS.
    ``mbarriers``: Program.barrier_table; ``rings``: stages of each ring; ``multicast``: CTAs that share tensor t's requests;
    ``product_queue``: warpgroup products that a sub-partition holds, with the one that runs. ``block_bytes``: of each tensor's
    blocks, of which tensor t's are ``blocks[t]`` (first, number); a block that ends with the tensor asks for less. ``stretch``:
    of each row of code that of ``Stretches.rows``; ``stretch_size``: of each stretch instructions and ticks at the fetch port,
    none where all of the code is at hand anyway; ``code_held``: how many instructions an SM holds; ``fetch_pace``: ticks from
    one to the next.
    With ``l2`` all SMs share L2 and HBM, and ``miss_ppm`` is how much of what it reads one of those that read a tile asks for.
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
    mbarriers: IntArray
    rings: IntArray
    multicast: IntArray
    product_queue: int = 1
    stretch: IntArray = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    stretch_size: IntArray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    code_held: int = 0
    fetch_pace: int = 0
    persistent: bool = False
    dynamic: bool = False
    blocks: IntArray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    block_bytes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    l2: SharedL2 | None = None
    record_limit: int = 0

    def equals(self, other: Job) -> bool:
        """Whether all that an engine reads of jobs without a shared L2 is the same."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name != "l2")
        return all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in pairs)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What happened, in ticks. ``ctas`` rows: tile, sm, slot, start, end. ``busy[sm, sub-partition]``: PIPES then port.

    ``shared[sm]``: smem, l2 and hbm ports. ``stalls[sm, warp of the CTA]``: STALLS. ``issued``: times each bundle was issued.
    Of a shared L2: ``traffic`` by tensor (L2 read, L2 written, HBM read, HBM written) and ``l2``, the table of tiles at the end.
    """

    ticks: int
    ctas: IntArray
    busy: IntArray
    shared: IntArray
    stalls: IntArray
    issued: IntArray
    records: IntArray
    traffic: IntArray = field(default_factory=lambda: np.zeros((0, 4), np.int64))
    l2: IntArray = field(default_factory=lambda: np.zeros((0, 7), np.int64))
    events: int = field(compare=False, default=0)

    def differences(self, other: Run) -> list[str]:
        """Names of the fields in which two runs differ; empty when equal."""
        return [f.name for f in fields(self) if f.compare and not np.array_equal(getattr(self, f.name), getattr(other, f.name))]


Engine = Callable[[Job], Run]


def deadlock(tick: int, tile: int, warp: int, row: int) -> str:
    """What an engine says when no event is left and CTAs have not ended."""
    return f"deadlock at tick {tick}: no event is left and tile {tile} has not ended; its warp {warp} waits at code row {row}"


def warpgroups(warp_start: IntArray) -> IntArray:
    """Of each warp of a CTA the first one of its warpgroup, and the one after its last: a role's warps by fours."""
    starts = warp_start.tolist()
    role = [starts.index(start) for start in starts]  # its first warp
    end = [first + starts.count(start) for first, start in zip(role, starts, strict=True)]
    firsts = [warp - (warp - first) % WARPGROUP for warp, first in enumerate(role)]
    return np.array([(first, min(first + WARPGROUP, last)) for first, last in zip(firsts, end, strict=True)], np.int64)


def longest_fetch(job: Job) -> int:
    """Ticks until all instructions of a bundle have come, of the longest one."""
    return job.fetch_pace * int(job.bundles[:, INSTRUCTIONS_OF].max(initial=0))


def ticks(cycles: float) -> int:
    return round(cycles * TICKS_PER_CYCLE)
