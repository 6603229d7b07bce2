"""The engines' contract: what goes in, what comes out, and what every engine must do to the same event at the same tick.

Time is integer: TICKS_PER_CYCLE ticks an SM cycle. An engine takes a :class:`Job` and returns a :class:`Run`; two engines given
the same Job return equal Runs, array by array.

What happens at a tick, in this order: warps resume (by global warp number), then sub-partitions arbitrate (by number).
Global warp number = (sm * slots + slot) * warps + warp. A resumed warp runs its code until a row blocks it:

* ISSUE asks for one bundle after the other. A bundle waits until its sub-partition's port and all pipes it uses are free;
  among waiting warps the first after the last one served goes next (round robin). It holds the port and each pipe for the
  sum of its instructions' costs; its warp goes on when the longest of those and of the warp's own issue gaps is over.
  Bundles that move data also queue, first come first served, at the SM's shared-memory port or at L2 and HBM; their arrival
  time is known then. Spilled registers queue at L2; nothing waits for them but what is asked for later. A bulk store joins its
  warp's open group until STORE ticks after shared memory has been read, at STORE_RATE and as the SM's port to L2 takes it.
* WAIT_SCOREBOARD, WAIT_GROUP, DEPEND resume the warp when what it waits for has arrived.
* BARRIER and NAMED_ARRIVE count a warp in; the last of ``count`` releases those that wait, ``barrier`` ticks later.
* MB_ARRIVE and a bulk copy's bytes complete a phase of an mbarrier when all arrivals and bytes of it are known; it is over when
  the last of them is (a copy's landing time is known when it is issued). Waiters resume MBARRIER ticks after that; one lane of
  a warp (``arg`` = 1) that was not told at once LANE ticks later still.
* A product (path WGMMA) queues at its sub-partition's tensor pipe in the order of issue; its warp goes on after ``gap``. It is
  not issued while ``product_queue`` others, whichever warp's, are not done. Of warps that wait with a product those go first
  whose group has begun. MMA_COMMIT closes a group, MMA_WAIT waits for groups to be done. While a product runs, other bundles
  of that sub-partition cost what the ``beside`` columns say, at the shared-memory port too, and those of FMA class hold up by
  ``delay`` all products that are not done.
* A product of path TCGEN05 queues, first come first served, at the SM's tensor cores for ``result`` ticks; an MB_ARRIVE with
  ``arg`` = 1 counts when all products of its warp are done, PRODUCT ticks after the last.
* A request of a block that ends with its tensor moves what there is of it.
* Where a Program has more code than an SM's instruction cache holds, a row that begins a stretch of it looks there:
  the SM holds the stretches that its warps began last, as many as fit. One that it does not hold is fetched, first come, first
  served, from when the warp was given its last bundle (at most the longest bundle's fetch before it asks). Its instructions
  come one by one, and no warp's bundle is given before its own have come.
* With a shared L2 each request also queues for the whole L2, and a read waits until its tile has been filled. The first request
  for a tile that L2 does not hold fills all of it from HBM; the first that writes a tile queues there as well. L2 and HBM serve
  all SMs that wait evenly, each SM's requests in order (:mod:`.fast_share`), so what other SMs ask for later puts off when loads
  land: a warp that waits for one looks again when it would land if nobody else asked.
* EXIT of a CTA's last warp frees its slot; the next tile of the SM's queue starts ``replace`` ticks later, its barriers
  empty. In a persistent Program each warp goes on by itself with the slot's next tile, and barriers keep their phases.

Sources: the port and pipe costs are the chip's (``model/gpus``); the order of events is this file's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache

import numpy as np

from ..model.code_stretches import INSTRUCTION_BYTES, instructions, stretches
from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS, PIPES, Instruction, Path
from ..model.program import IntArray, Opcode, Program
from ..model.rows import ARG, OPCODE

TICKS_PER_CYCLE = 100

#: Columns of ``Job.bundles``: ticks of the port, of the warp until it may go on, until the result, and at the SMEM port.
#: Then the same port, gap and pipes beside a running product, how much that product is delayed, bytes of local memory that
#: are written through to L2, and how many instructions of a binary it stands for.
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
    With ``l2`` all SMs share L2 and HBM, and ``miss_ppm`` is not used.
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
    l2: IntArray = field(default_factory=lambda: np.zeros((0, 6), np.int64))
    events: int = field(compare=False, default=0)

    def differences(self, other: Run) -> list[str]:
        """Names of the fields in which two runs differ; empty when equal."""
        return [f.name for f in fields(self) if f.compare and not np.array_equal(getattr(self, f.name), getattr(other, f.name))]


Engine = Callable[[Job], Run]


def deadlock(tick: int, tile: int, warp: int, row: int) -> str:
    """What an engine says when no event is left and CTAs have not ended."""
    return f"deadlock at tick {tick}: no event is left and tile {tile} has not ended; its warp {warp} waits at code row {row}"


def longest_fetch(job: Job) -> int:
    """Ticks until all instructions of a bundle have come, of the longest one."""
    return job.fetch_pace * int(job.bundles[:, INSTRUCTIONS_OF].max(initial=0))


def ticks(cycles: float) -> int:
    return round(cycles * TICKS_PER_CYCLE)


def bundle_table(program: Program, gpu: GPU) -> IntArray:
    """One row per bundle, columns BUNDLE_COLUMNS: the sums of its instructions' costs on ``gpu``, in ticks."""
    names = tuple(sorted({name for bundle in program.bundles for name, _ in bundle}))
    column = {name: i for i, name in enumerate(names)}
    counts = np.zeros((len(program.bundles), len(names)), np.int64)
    for i, bundle in enumerate(program.bundles):
        for name, n in bundle:
            counts[i, column[name]] = n
    kinds, prices = [INSTRUCTIONS[name] for name in names], _prices(names, gpu)
    rows: IntArray = counts @ prices
    rows[:, INSTRUCTIONS_OF] = instructions(program)
    rows[:, RESULT] = (np.minimum(counts, 1)[:, :, None] * prices[None, :, [RESULT]]).max(axis=1, initial=0)[:, 0]
    rows[:, PATH] = (np.minimum(counts, 1) * np.array([int(kind.path) for kind in kinds], np.int64)).max(axis=1, initial=0)
    products = {kind.name: _cta_product if kind.path == Path.TCGEN05 else _product for kind in kinds if kind.columns}
    for row, bundle in zip(rows, program.bundles, strict=True):
        for name, _ in bundle if products else ():
            if name in products:
                products[name](row, INSTRUCTIONS[name], gpu)
    runs_on = np.isin(rows[:, PATH], (Path.WGMMA, Path.TCGEN05))  # asynchronous, as is what TMEM transfers
    pipes, beside = rows[:, FIRST_PIPE : FIRST_PIPE + TMEM].max(axis=1), rows[:, FIRST_BESIDE : FIRST_BESIDE + TMEM].max(axis=1)
    rows[:, GAP] = np.maximum(rows[:, GAP], np.where(runs_on, 0, pipes))
    rows[:, GAP_BESIDE] = np.maximum(np.maximum(rows[:, GAP_BESIDE], rows[:, GAP]), np.where(runs_on, 0, beside))
    return rows


@lru_cache(maxsize=64)  # what candidates of a sweep have in common
def _prices(names: tuple[str, ...], gpu: GPU) -> IntArray:
    """One row per instruction: what it adds to its bundle's, columns BUNDLE_COLUMNS. A product's own times are not among it."""
    kinds = [INSTRUCTIONS[name] for name in names]
    prices = np.array([_vector(kind, gpu) if not kind.columns else _zeros() for kind in kinds]).reshape(-1, len(BUNDLE_COLUMNS))
    prices[:, SMEM] = [ticks(kind.smem_bytes / gpu.smem.bytes_per_clk) for kind in kinds]
    prices[:, SPILL] = [kind.spill_bytes for kind in kinds]
    left = gpu.beside.smem_bytes_per_clk if gpu.beside else gpu.smem.bytes_per_clk
    prices[:, SMEM_BESIDE] = [ticks(kind.smem_bytes / left) for kind in kinds]
    prices.setflags(write=False)
    return prices


def _zeros() -> IntArray:
    return np.zeros(len(BUNDLE_COLUMNS), np.int64)


def _vector(kind: Instruction, gpu: GPU) -> IntArray:
    """What one instruction costs, columns BUNDLE_COLUMNS but for SMEM and path. All but the result adds up."""
    row = _zeros()
    if kind.name in ("stall", "fmul_off", "refetch"):
        row[GAP] = ticks(gpu.latency.branch if kind.name == "refetch" else 1)
        return row
    pipe = PIPES.index(kind.pipe)
    port, held, gap, row[RESULT] = _costs(kind, gpu)
    row[PORT], row[GAP], row[FIRST_PIPE + pipe] = port, max(gap, port), held
    beside = gpu.beside
    if beside is None or kind.pipe in ("lsu", "control", "tensor", "tmem"):
        row[PORT_BESIDE], row[FIRST_BESIDE + pipe] = port, held
        return row
    if kind.pipe == "fma":
        row[PORT_BESIDE], row[DELAY] = ticks(beside.port_fma), ticks(beside.tensor_per_fma)
    else:
        row[PORT_BESIDE] = ticks(beside.port_mufu if kind.pipe == "mufu" else beside.alu)
    own = {"alu": beside.alu, "mufu": beside.mufu, "fma": beside.port_fma}[kind.pipe]
    row[FIRST_BESIDE + pipe] = max(held, ticks(own))
    return row


def _costs(kind: Instruction, gpu: GPU) -> tuple[int, int, int, int]:
    """Ticks of the port and of the pipe, the warp's own gap, and ticks until the result of one instruction."""
    if kind.packed:
        if gpu.packed is None:
            raise ValueError(f"{kind.sass} works on two FP32 values at once, and {gpu.name} cannot: choose gpu b200 or b300")
        own = gpu.packed
        return ticks(own.port), max(ticks(own.pipe), ticks(own.port)), ticks(own.warp), ticks(own.result)
    port = ticks(getattr(gpu.port, kind.cost))
    held = max(kind.passes * ticks(getattr(gpu.pipe, kind.cost)), port)
    gap, result = ticks(getattr(gpu.warp, kind.cost)), ticks(getattr(gpu.result, kind.cost))
    if kind.name == "uldc":
        result = ticks(gpu.latency.argument_line_cycles)
    if kind.name == "try_wait" and gpu.async_:
        result = ticks(gpu.async_.mbarrier_try_cycles)
    if kind.pipe == "tmem":
        if gpu.tmem is None:
            raise ValueError(f"{kind.sass} needs tensor memory, and {gpu.name} has none: choose another schedule or gpu b200")
        rate = gpu.tmem.load_bytes_per_clk if kind.tmem_bytes > 0 else gpu.tmem.store_bytes_per_clk
        held = max(port, ticks(abs(kind.tmem_bytes) / (rate / gpu.sm.subpartitions)))
        result = held + ticks(gpu.tmem.latency_cycles if kind.tmem_bytes else gpu.tmem.alloc_cycles)
    return port, held, gap, result


def _product(row: IntArray, kind: Instruction, gpu: GPU) -> None:
    """One k-step of a warpgroup product: the tensor pipe for its columns, the warp for its own issue."""
    if gpu.wgmma is None:
        raise ValueError(f"{kind.sass} needs warpgroup products (wgmma), and {gpu.name} has none: choose another schedule or gpu")
    tensor = PIPES.index("tensor")
    held = ticks(kind.columns * gpu.wgmma.cycles_per_column)
    row[PORT] = row[PORT_BESIDE] = ticks(1)
    row[GAP] = row[GAP_BESIDE] = ticks(1)
    row[RESULT] = ticks(gpu.wgmma.wait_register_cycles if kind.from_register else gpu.wgmma.wait_cycles)
    row[FIRST_PIPE + tensor] = row[FIRST_BESIDE + tensor] = held


def _cta_product(row: IntArray, kind: Instruction, gpu: GPU) -> None:
    """One k-step of a CTA's product: RESULT is its time on the SM's tensor cores, for its columns or its operands in SMEM."""
    if gpu.tcgen05 is None:
        raise ValueError(f"{kind.sass} needs tcgen05, and {gpu.name} has none: choose another schedule or gpu b200")
    row[PORT] = row[PORT_BESIDE] = ticks(1)
    row[GAP] = row[GAP_BESIDE] = max(ticks(1), ticks(gpu.tcgen05.issue_cycles))
    row[RESULT] = max(ticks(kind.columns * gpu.tcgen05.cycles_per_column), ticks(kind.smem_bytes / gpu.smem.bytes_per_clk))


def product_ticks(program: Program, gpu: GPU) -> int:
    """From the end of a CTA's last product to its arrival at an mbarrier (tcgen05.commit): what was measured from the issue of
    one product to the waiting thread, less the product and the wait itself."""
    if gpu.tcgen05 is None:
        return 0
    products = [kind for bundle in program.bundles for name, _ in bundle if (kind := INSTRUCTIONS[name]).path == Path.TCGEN05]
    if not products:
        return 0
    own, pair = gpu.tcgen05.latency_cycles, gpu.tcgen05.pair_latency_cycles
    latency = pair if any(kind.pair for kind in products) else own
    waited = gpu.async_.mbarrier_cycles if gpu.async_ else 0
    return ticks(max(0.0, latency + gpu.tcgen05.batch_cycles - waited))


def make_job(
    program: Program,
    gpu: GPU,
    *,
    bundles: IntArray | None = None,
    clock_mhz: float,
    slots: int,
    queue: IntArray,
    miss_ppm: IntArray,
    shares: float,
    hbm_bytes_per_s: float,
    l2: SharedL2 | None = None,
    record_limit: int = 0,
) -> Job:
    """Price ``program`` for one SM of ``gpu`` that gets one of ``shares`` equal shares of L2 and HBM.

    ``bundles``: its :func:`bundle_table`, where that is at hand. With ``l2`` for all SMs, which share it as they come.
    """
    _check_groups(program)
    l2_clocks = gpu.l2.clock_mhz / clock_mhz if gpu.l2.clock_mhz else 1.0
    whole_l2, whole_hbm = gpu.l2.bytes_per_clk * l2_clocks, hbm_bytes_per_s / (clock_mhz * 1e6)
    if l2 is None:
        l2_rate = min(float(gpu.l2.bytes_per_clk_one_sm), gpu.l2.bytes_per_clk / shares) * l2_clocks
        hbm_rate = min(whole_hbm / shares, l2_rate)
    else:
        l2_rate, hbm_rate = gpu.l2.bytes_per_clk_one_sm * l2_clocks, whole_hbm
    starts = [role.start for role in program.roles for _ in range(role.warps)]
    sizes = [tensor.block_sizes() for tensor in program.tensors]
    numbers = np.array([len(each) for each in sizes], np.int64)
    code = stretches(program)
    share = gpu.fetch.bytes_per_clk / gpu.sm.count / INSTRUCTION_BYTES
    sizes = [(n, ticks(n / share)) for n in code.sizes] if code.total_bytes > gpu.fetch.cache_bytes else []
    return Job(
        code=program.code,
        expressions=program.expression_table,
        tile_args=program.tiles.values.astype(np.int64, copy=False),
        warp_start=np.array(starts, dtype=np.int64),
        queue=queue.astype(np.int64),
        sms=1 if l2 is None else int(gpu.sm.count),
        slots=slots,
        bundles=bundle_table(program, gpu) if bundles is None else bundles,
        latency=_latencies(program, gpu, clock_mhz),
        rate=np.array([_ratio(v) for v in (l2_rate, hbm_rate, whole_l2, _store_rate(gpu, shares))], dtype=np.int64),
        miss_ppm=miss_ppm.astype(np.int64),
        mbarriers=program.barrier_table,
        rings=np.array([ring.stages for ring in program.rings], dtype=np.int64),
        multicast=np.array([tensor.multicast for tensor in program.tensors], dtype=np.int64),
        product_queue=int(gpu.wgmma.queue) if gpu.wgmma else 1,
        blocks=np.column_stack((np.cumsum(numbers) - numbers, numbers)),
        block_bytes=np.concatenate(sizes) if sizes else np.zeros(0, np.int64),
        stretch=code.rows if sizes else code.rows[:0],
        stretch_size=np.array(sizes, np.int64).reshape(-1, 2),
        code_held=int(gpu.fetch.cache_bytes) // INSTRUCTION_BYTES,
        fetch_pace=ticks(gpu.fetch.warp_cycles),
        persistent=program.persistent,
        dynamic=program.dynamic and l2 is not None,
        l2=l2,
        record_limit=record_limit,
    )


def _check_groups(program: Program) -> None:
    """Raises ValueError for a wait that leaves more groups in flight than the engines keep."""
    for opcode, op, kept in ((Opcode.WAIT_GROUP, "wait_group", COPY_GROUPS), (Opcode.MMA_WAIT, "mma_wait", GROUPS)):
        left = program.code[program.code[:, OPCODE] == opcode][:, ARG].max(initial=0)
        if left >= kept:
            raise ValueError(f"{program.name} has {op} arg={left}; at most {kept - 1} may stay in flight: use fewer stages")


def _latencies(program: Program, gpu: GPU, clock_mhz: float) -> IntArray:
    """Ticks, in the order of ``Job.latency``; what is not in the SM's clock domain is in ns."""
    cycles_per_ns = clock_mhz / 1e3
    cycles = [
        gpu.latency.lds,
        (gpu.l2.latency_near_ns + gpu.l2.latency_far_ns) / 2 * cycles_per_ns,
        gpu.hbm.latency_ns * cycles_per_ns,
        gpu.latency.barrier_base,
        gpu.latency.barrier_per_warp,
        gpu.launch.second_cta_cycles,
        gpu.launch.cta_replace_cycles,
        gpu.latency.lsu_queue,
        gpu.async_.mbarrier_cycles if gpu.async_ else 0,
        gpu.async_.tma_ns * cycles_per_ns if gpu.async_ else 0,
        product_ticks(program, gpu) / TICKS_PER_CYCLE,
        gpu.async_.store_cycles if gpu.async_ else 0,
        gpu.async_.mbarrier_lane_cycles - gpu.async_.mbarrier_cycles if gpu.async_ else 0,
    ]
    return np.array([ticks(v) for v in cycles], dtype=np.int64)


def _store_rate(gpu: GPU, shares: float) -> float:
    """Bytes a cycle that a bulk store reads of shared memory while ``shares`` SMs store."""
    own = gpu.async_
    return float(min(own.store_bytes_per_clk, own.store_bytes_per_clk_all / shares) if own else gpu.smem.bytes_per_clk)


def _ratio(bytes_per_cycle: float) -> tuple[int, int]:
    """Ticks per byte as an integer fraction: ticks = bytes * numerator // denominator."""
    return TICKS_PER_CYCLE * 1000, max(1, round(bytes_per_cycle * 1000))
