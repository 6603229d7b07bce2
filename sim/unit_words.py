"""What the units and numbers of a chip are, in a few words: ``words("beside.tensor_per_fma")`` -> "product held up by FMA issue".

The docstrings of the sections in :mod:`flashsim.model.gpu` say the same at length.
"""

from __future__ import annotations

from ..model.instructions import INSTRUCTIONS


def counted(n: int, word: str) -> str:
    """``1 CTA``, ``2 CTAs``."""
    return f"{n:,} {word}{'' if n == 1 else 's'}"


#: Units of :func:`flashsim.sim.whatif.units`, and sections.
UNITS = {
    "fma": "FMA pipe: multiply, add, moves", "alu": "ALU pipe: max, convert, integer", "mufu": "MUFU: exponentials",
    "lsu": "load/store pipe, shuffles", "tensor": "tensor cores: products", "port": "issue and register port",
    "warp": "gap to a warp's next instruction", "result": "wait for a result", "pipe": "all pipes", "smem": "shared-memory port",
    "l2": "L2 read rate", "l2 latency": "L2 access time", "fetch latency": "fetch of a warp's instruction",
    "hbm": "HBM bandwidth", "hbm latency": "HBM access time",
    "tmem": "TMEM load and store rate", "tmem latency": "TMEM access and allocation", "power limit": "watts of the board",
    "sm": "what an SM holds", "clock": "clocks", "latency": "barriers and SMEM loads", "fetch": "instruction fetch",
    "launch": "kernel and CTA starts",
    "power": "power and energies", "wgmma": "warpgroup products",
    "beside": "SMEM and work beside a product", "beside latency": "vector work beside a product",
    "async": "bulk stores; TMA, mbarriers", "async latency": "TMA and mbarriers", "tcgen05": "products in TMEM",
    "packed": "f32x2 arithmetic",
}  # fmt: skip
#: An instruction's number in the sections that have one for each.
COSTS = {"pipe": "time on its pipe", "port": "time on the port", "warp": "gap to the warp's next", "result": "to its result"}
NUMBERS = {
    "sm.count": "SMs of the chip", "sm.subpartitions": "sub-partitions an SM", "sm.max_warps": "warps an SM",
    "sm.max_ctas": "CTAs an SM", "sm.tensor_flop_per_clk": "FLOPs a cycle at the peak", "sm.registers": "registers an SM",
    "sm.register_alloc_unit": "registers given out at a time", "sm.max_registers_per_thread": "registers a thread, most",
    "sm.smem_bytes": "shared memory an SM", "sm.smem_per_cta_bytes": "shared memory a CTA, most",
    "sm.smem_reserved_per_cta_bytes": "shared memory the system keeps", "sm.smem_alloc_unit_bytes": "SMEM given out at a time",
    "sm.l1_bytes": "L1 and shared memory together", "clock.boost_mhz": "highest SM clock",
    "clock.tensor_peak_mhz": "clock behind the tensor peak", "latency.lds": "shared-memory load to use",
    "latency.barrier_base": "CTA barrier", "latency.barrier_per_warp": "CTA barrier, for each warp",
    "fetch.cache_bytes": "code that an SM holds", "fetch.bytes_per_clk": "code for all SMs",
    "fetch.warp_cycles": "fetch of a warp's instruction", "latency.branch": "taken branch to its target",
    "latency.lsu_queue": "how far warps run ahead of SMEM", "smem.bytes_per_clk": "shared-memory port",
    "l2.size_bytes": "L2 size", "l2.resident_bytes": "L2 that keeps data for rereads", "l2.bytes_per_clk": "L2 read rate",
    "l2.bytes_per_clk_one_sm": "what one SM can pull from L2", "l2.latency_near_ns": "near L2 partition",
    "l2.latency_far_ns": "far L2 partition", "l2.home_bytes_per_clk": "L2 rate of what was written",
    "l2.clock_mhz": "L2's own clock", "hbm.size_bytes": "HBM size",
    "hbm.peak_bytes_per_s": "HBM peak", "hbm.read_bytes_per_s": "HBM rate, reads", "hbm.write_bytes_per_s": "HBM rate, writes",
    "hbm.copy_bytes_per_s": "HBM rate, half and half", "hbm.latency_ns": "HBM access time",
    "launch.stream_us": "gap between kernels", "launch.host_op_us": "host time a framework call",
    "launch.events_us": "events around a call",
    "latency.argument_line_cycles": "first read of a line of arguments",
    "launch.cta_dispatch_ns": "start of a CTA", "launch.second_cta_cycles": "an SM's second CTA after its first",
    "launch.cta_replace_cycles": "next CTA after one that ends", "launch.ramp_cycles": "start and end of a kernel",
    "power.limit_w": "board's power limit", "power.regulated_share": "share of the limit that is held",
    "power.idle_w": "power at rest", "power.voltage_floor": "lowest voltage over the highest",
    "power.tensor_stretch": "SM clock beside busy tensor cores", "power.hold_ms": "until the power limit is held",
    "power.peak_core_w": "watts of the SMs until then", "power.hmma_pj": "energy of an mma.sync",
    "power.hmma_fp16_pj": "energy of an mma.sync of FP16",
    "power.vector_pj": "energy of a vector instruction", "power.ex2_pj": "energy of an exponential",
    "power.smem_pj_per_byte": "energy of a byte of SMEM", "power.l2_pj_per_byte": "energy of a byte of L2",
    "power.smem_write_pj_per_byte": "energy of a byte written to SMEM", "power.hbm_pj_per_byte": "energy of a byte of HBM",
    "power.zero_fill_pj_per_byte": "energy of a byte of zeros written",
    "wgmma.cycles_per_column": "product, for each column",
    "wgmma.wait_cycles": "product's end to the warp waiting", "wgmma.wait_register_cycles": "the same, A in registers",
    "wgmma.queue": "products a sub-partition queues", "wgmma.pj_per_column": "energy of a product",
    "wgmma.pj_per_column_fp16": "energy of an FP16 product", "wgmma.pj_per_column_fp8": "energy of an FP8 product",
    "beside.alu": "ALU slowed by a product", "beside.mufu": "exponentials slowed by a product",
    "beside.port_fma": "FMA issue slowed by a product", "beside.port_mufu": "MUFU issue slowed by a product",
    "beside.tensor_per_fma": "product held up by FMA issue", "beside.smem_bytes_per_clk": "SMEM port beside a product",
    "async.tma_ns": "TMA on top of L2 or HBM", "async.store_bytes_per_clk": "shared memory read by a bulk store",
    "async.store_cycles": "a bulk store beside its bytes", "async.store_bytes_per_clk_all": "the same, all SMs together",
    "async.tma_issue_cycles": "issue of a TMA copy", "async.mbarrier_cycles": "mbarrier's last arrival to waiter",
    "async.mbarrier_lane_cycles": "mbarrier's last arrival to one lane",
    "async.mbarrier_try_cycles": "mbarrier's answer to a try",
    "tcgen05.cycles_per_column": "product, for each column", "tcgen05.batch_cycles": "start of a batch of products",
    "tcgen05.issue_cycles": "gap between products' issues", "tcgen05.latency_cycles": "product to waiter, A in SMEM",
    "tcgen05.latency_a_tmem_cycles": "product to waiter, A in TMEM",
    "tcgen05.pair_latency_cycles": "pair's product to waiter, A in SMEM",
    "tcgen05.pair_latency_a_tmem_cycles": "pair's product to waiter, A in TMEM",
    "tcgen05.pj_per_column": "energy of a product",
    "tcgen05.pj_per_column_fp16": "energy of an FP16 product", "tcgen05.pj_per_column_fp8": "energy of an FP8 product",
    "tmem.columns": "TMEM columns", "tmem.load_bytes_per_clk": "TMEM load rate", "tmem.store_bytes_per_clk": "TMEM store rate",
    "tmem.latency_cycles": "TMEM access time", "tmem.alloc_cycles": "TMEM allocation", "packed.pipe": "f32x2 on the FMA pipe",
    "packed.port": "f32x2 on the issue port", "packed.warp": "f32x2 to the warp's next", "packed.result": "f32x2 to its result",
}  # fmt: skip


def words(name: str) -> str:
    """What a unit, a number, a section or an instruction is; empty for what is none of them (several changes together)."""
    spaced = name.replace("_", " ")
    if name in NUMBERS or name in UNITS or spaced in UNITS:
        return NUMBERS.get(name) or UNITS.get(name) or UNITS[spaced]
    section, _, cost = name.partition(".")
    if section in COSTS and cost.isidentifier():
        return f"{cost}: {COSTS[section]}"
    return "its pipe, port, gap and result" if name in INSTRUCTIONS or name == "exp2" else ""
