"""From a Program and a chip to a :class:`.engine.Job`: what each bundle costs, latencies and rates, all in ticks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..model.code_stretches import INSTRUCTION_BYTES, instructions, stretches
from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS, PIPES, Instruction, Path
from ..model.program import IntArray, Opcode, Program
from ..model.rows import ARG, OPCODE, tabulated

# isort: off
from .engine import (
    BUNDLE_COLUMNS, COPY_GROUPS, DELAY, FIRST_BESIDE, FIRST_PIPE, GAP, GAP_BESIDE, GROUPS, INSTRUCTIONS_OF, Job, PATH, PORT,
    PORT_BESIDE, RESULT, SMEM, SMEM_BESIDE, SPILL, SharedL2, TICKS_PER_CYCLE, TMEM, WARPGROUP, ticks,
)  # fmt: skip
# isort: on


#: SMs of a chip that the compiled engine tells apart where they share L2 and HBM (``fast_share.SM_BITS``).
MOST_SMS = 4096


def bundle_table(program: Program, gpu: GPU) -> IntArray:
    """One row per bundle, columns BUNDLE_COLUMNS: the sums of its instructions' costs on ``gpu``, in ticks."""
    names, counts = tabulated(program.bundles)
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
    prices[:, SPILL] = [round(kind.spill_bytes * _slower_at_home(gpu)) for kind in kinds]
    left = gpu.beside.smem_bytes_per_clk if gpu.beside else gpu.smem.bytes_per_clk
    prices[:, SMEM_BESIDE] = [ticks(kind.smem_bytes / left) for kind in kinds]
    prices.setflags(write=False)
    return prices


def _slower_at_home(gpu: GPU) -> float:
    """How much longer L2 takes for what was written, of which no partition but its own has a copy, while all SMs ask."""
    whole = min(float(gpu.l2.bytes_per_clk), gpu.l2.bytes_per_clk_one_sm * gpu.sm.count)
    return max(1.0, whole / (gpu.l2.home_bytes_per_clk or whole))


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
    """One k-step of a warpgroup product: the tensor pipe for its columns, or for as long as its operands take from shared memory
    (of which each of its four warps counts a quarter), the warp for its own issue."""
    if gpu.wgmma is None:
        raise ValueError(f"{kind.sass} needs warpgroup products (wgmma), and {gpu.name} has none: choose another schedule or gpu")
    tensor = PIPES.index("tensor")
    operands = kind.smem_bytes * WARPGROUP / gpu.smem.bytes_per_clk
    held = max(ticks(kind.columns * gpu.wgmma.cycles_per_column), ticks(operands))
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
    _check_limits(program, sms=int(gpu.sm.count) if l2 else 1)
    starts = [role.start for role in program.roles for _ in range(role.warps)]
    sizes = [tensor.block_sizes() for tensor in program.tensors]
    numbers = np.array([len(each) for each in sizes], np.int64)
    code = stretches(program)
    share = gpu.fetch.bytes_per_clk / gpu.sm.count / INSTRUCTION_BYTES
    fetched = [(n, ticks(n / share)) for n in code.sizes] if code.total_bytes > gpu.fetch.cache_bytes else []
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
        rate=_rates(gpu, clock_mhz, shares, hbm_bytes_per_s, shared=l2 is not None),
        miss_ppm=miss_ppm.astype(np.int64),
        mbarriers=program.barrier_table,
        rings=np.array([ring.stages for ring in program.rings], dtype=np.int64),
        multicast=np.array([tensor.multicast for tensor in program.tensors], dtype=np.int64),
        product_queue=int(gpu.wgmma.queue) if gpu.wgmma else 1,
        blocks=np.column_stack((np.cumsum(numbers) - numbers, numbers)),
        block_bytes=np.concatenate(sizes) if sizes else np.zeros(0, np.int64),
        stretch=code.rows if fetched else code.rows[:0],
        stretch_size=np.array(fetched, np.int64).reshape(-1, 2),
        code_held=int(gpu.fetch.cache_bytes) // INSTRUCTION_BYTES,
        fetch_pace=ticks(gpu.fetch.warp_cycles),
        persistent=program.persistent,
        dynamic=program.dynamic and l2 is not None,
        l2=l2,
        record_limit=record_limit,
    )


def at_clock(job: Job, program: Program, gpu: GPU, *, clock_mhz: float, shares: float, hbm_bytes_per_s: float) -> Job:
    """What :func:`make_job` gives for another clock: what is in ns, and bytes a second, take other numbers of cycles."""
    rate = _rates(gpu, clock_mhz, shares, hbm_bytes_per_s, shared=job.l2 is not None)
    return replace(job, latency=_latencies(program, gpu, clock_mhz), rate=rate)


def _rates(gpu: GPU, clock_mhz: float, shares: float, hbm_bytes_per_s: float, *, shared: bool) -> IntArray:
    """``Job.rate``: one SM's with one of ``shares`` equal shares of L2 and HBM, or (``shared``) where all SMs share both."""
    l2_clocks = gpu.l2.clock_mhz / clock_mhz if gpu.l2.clock_mhz else 1.0
    whole_l2, whole_hbm = gpu.l2.bytes_per_clk * l2_clocks, hbm_bytes_per_s / (clock_mhz * 1e6)
    if shared:
        l2_rate, hbm_rate = gpu.l2.bytes_per_clk_one_sm * l2_clocks, whole_hbm
    else:
        l2_rate = min(float(gpu.l2.bytes_per_clk_one_sm), gpu.l2.bytes_per_clk / shares) * l2_clocks
        hbm_rate = min(whole_hbm / shares, l2_rate)
    return np.array([_ratio(v) for v in (l2_rate, hbm_rate, whole_l2, _store_rate(gpu, shares))], dtype=np.int64)


def _check_limits(program: Program, *, sms: int) -> None:
    """Raises ValueError for more SMs than the engines tell apart, or a wait that leaves more groups in flight than they keep."""
    if sms > MOST_SMS:
        raise ValueError(f"chip scope runs at most {MOST_SMS} SMs, and sm.count is {sms}: lower it, or use SM scope")
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
