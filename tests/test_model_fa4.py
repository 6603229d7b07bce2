"""FA4's forward: the paper's bounds from the chip's numbers and the Program's counts, budgets, refusals, roles and numbers."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPU, load_gpu
from flashsim.model.instructions import INSTRUCTIONS, Path, umma
from flashsim.model.meaning_tmem import emulated_columns
from flashsim.model.profiles import _file, kernel_profile
from flashsim.model.program import Program
from flashsim.model.reference import forward
from flashsim.model.schedules import get_schedule
from flashsim.model.tiling import occupancy
from flashsim.sim import values
from flashsim.sim.engine import RESULT, SMEM, TICKS_PER_CYCLE
from flashsim.sim.predict import ENGINES, simulate
from flashsim.sim.pricing import bundle_table, product_ticks

BLACKWELL = ("b200", "gb200", "b300", "gb300")
DIMS = ((64, 64), (96, 96), (128, 128), (64, 128), (192, 128))


def problem(seqlen_q: int = 4096, seqlen_kv: int | None = None, **fields: Any) -> Attention:
    given = {"batch": 1, "heads_q": 2, "heads_kv": 2, "head_dim": 128, "dtype": "bf16"} | fields
    return Attention(seqlen_q=seqlen_q, seqlen_kv=seqlen_q if seqlen_kv is None else seqlen_kv, **given)


def lowered(gpu: str = "b200", attention: Attention | None = None, **switches: Any) -> Program:
    (program,) = get_schedule("fa4", **switches).lower(load_gpu(gpu), attention or problem())
    return program


def per_block(q_stages: int, **switches: Any) -> dict[str, int]:
    """Instructions that a CTA issues for one more K/V block."""
    few, more = (
        lowered(attention=problem(1024, kv), q_stages=q_stages, counts="ideal", exp2_emulation=0.0, **switches)
        for kv in (1024, 1152)
    )
    a, b = few.instruction_counts(0), more.instruction_counts(0)
    return {name: b[name] - a[name] for name in b if b[name] != a[name]}


def unit_cycles(gpu: GPU, counts: dict[str, int], q_stages: int) -> tuple[float, float, float]:
    """Cycles of the SM's tensor cores, SMEM port (products' operands) and MUFU (scores' exponentials, not a row's factor)."""
    assert gpu.tcgen05 is not None
    products = {name: n for name, n in counts.items() if INSTRUCTIONS[name].path == Path.TCGEN05}
    tensor = sum(n * INSTRUCTIONS[name].columns for name, n in products.items()) * gpu.tcgen05.cycles_per_column
    smem = sum(n * INSTRUCTIONS[name].smem_bytes for name, n in products.items()) / gpu.smem.bytes_per_clk
    factors = 4 * q_stages
    return tensor, smem, (counts["ex2"] - factors) * gpu.pipe.ex2 / gpu.sm.subpartitions


@pytest.mark.parametrize(("q_stages", "cycles"), [(1, (1024, 768, 1024)), (2, (2048, 1536, 2048))])
def test_bounds_are_the_papers(q_stages: int, cycles: tuple[int, int, int]) -> None:
    """Tables 1 and 3: 128x128 and 256x128 at head_dim 128, in cycles of MMA, SMEM and EXP."""
    assert unit_cycles(load_gpu("b200"), per_block(q_stages, cta_pair=False), q_stages) == cycles


def test_a_pair_reads_half_of_b_and_b300_halves_the_exponentials() -> None:
    counts = per_block(2, cta_pair=True)
    assert unit_cycles(load_gpu("b200"), counts, 2) == (2048, 1024, 2048)
    assert unit_cycles(load_gpu("b300"), counts, 2) == (2048, 1024, 1024)


@pytest.mark.parametrize(
    ("name", "interval", "smem"),
    [
        (umma(64, fp8=False, from_tmem=False), 48, 48),
        (umma(64, fp8=False, from_tmem=True), 32, 16),
        (umma(128, fp8=False, from_tmem=False), 64, 64),
        (umma(256, fp8=False, from_tmem=False), 128, 96),
        (umma(256, fp8=False, from_tmem=True), 128, 64),
        (umma(128, fp8=True, from_tmem=False, rows=64), 64, 48),
        (umma(256, fp8=False, from_tmem=False, pair=True), 128, 64),
        (umma(256, fp8=False, from_tmem=True, pair=True), 128, 32),
    ],
)
def test_a_product_takes_its_columns_or_its_operands(name: str, interval: int, smem: int) -> None:
    """The interval is the larger of N/2 and the operands' bytes over 128 (the measured rule); M = 64 costs as much as 128."""
    program = lowered()
    object.__setattr__(program, "bundles", (((name, 1),),))
    (row,) = bundle_table(program, load_gpu("b200"))
    assert (row[RESULT], row[SMEM]) == (interval * TICKS_PER_CYCLE, smem * TICKS_PER_CYCLE)


@pytest.mark.parametrize(("pair", "latency"), [(False, 136), (True, 170)])
def test_a_commit_arrives_when_the_product_was_measured_to(pair: bool, latency: int) -> None:
    """From a lone product's issue to the waiting thread: its cycles, then this, of which the wait is the mbarrier's."""
    gpu = load_gpu("b200")
    assert gpu.async_ is not None
    assert gpu.tcgen05 is not None
    waited = product_ticks(lowered(cta_pair=pair), gpu) / TICKS_PER_CYCLE + gpu.async_.mbarrier_cycles
    assert waited == latency + gpu.tcgen05.batch_cycles


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("q_stages", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gpu", BLACKWELL)
def test_tiles_fit(gpu: str, causal: bool, q_stages: int, dims: tuple[int, int], dtype: str) -> None:
    """512 TMEM columns, a CTA's SMEM, and the registers of 16 warps that traded them."""
    attention = problem(causal=causal, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    program = lowered(gpu, attention, q_stages=q_stages)
    chip = load_gpu(gpu)
    assert chip.tmem is not None
    tiles = [b for b in program.buffers if b.space == "tmem" and "." not in b.name]
    assert program.tmem_columns == sum(b.cols for b in tiles) == q_stages * (128 + dims[1]) <= chip.tmem.columns
    assert all(b.rows == 128 for b in tiles)
    assert occupancy(chip, program).ctas_per_sm == 1
    assert program.warps + program.idle_warps == 16
    other = program.roles[-1].registers
    assert sum(role.warps * role.registers for role in program.roles) + program.idle_warps * other <= 65536 // 32


def test_p_lies_on_s() -> None:
    """P has half of S's bytes and no columns of its own."""
    buffers = {b.name: b for b in lowered().buffers}
    for w in range(2):
        assert buffers[f"S{w}.P"].size_bytes * 2 == buffers[f"S{w}"].size_bytes


@pytest.mark.parametrize(("switches", "stages", "smem"), [({"cta_pair": False}, 3, 231424), ({}, 6, 231424)])
def test_k_and_v_take_what_q_and_o_leave(switches: dict[str, Any], stages: int, smem: int) -> None:
    """(224 KB - Q - O) / tile: three stages, six where each CTA of a pair holds half."""
    program = lowered(**switches)
    assert {b.stages for b in program.barriers if b.name.startswith("kv_")} == {stages}
    assert program.smem_bytes == smem


@pytest.mark.parametrize(
    ("causal", "counts", "registers"),
    [(False, "ideal", (192, 80, 48)), (False, "binary", (184, 80, 64)), (True, "binary", (192, 72, 56))],
)
def test_roles_and_registers(causal: bool, counts: str, registers: tuple[int, int, int]) -> None:
    softmax, correction, other = registers
    roles = [(role.name, role.warps, role.registers) for role in lowered(attention=problem(causal=causal), counts=counts).roles]
    assert roles == [
        ("softmax0", 4, softmax), ("softmax1", 4, softmax), ("correction", 4, correction),
        ("mma", 1, other), ("epilogue", 1, other), ("load", 1, other),
    ]  # fmt: skip


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("h100", {}, {}, "fa4 keeps S and O in TMEM; h100 has none: choose fa3, or gpu b200"),
    ("a100-80gb", {}, {}, "fa4 keeps S and O in TMEM; a100-80gb has none: choose fa2, or gpu b200"),
    ("b200", {}, {"pass_": "bwd"}, "fa4 has a forward schedule only, got pass 'bwd': choose --pass fwd"),
    ("b200", {}, {"dtype": "fp32"}, "fa4 runs bf16, fp16 or fp8, got dtype 'fp32': change dtype"),
    *(
        (
            "b200", {}, {"head_dim": d, "head_dim_v": dv},
            f"fa4 has no tile for head_dim {d} with head_dim_v {dv}; each may be up to 128, or 192 with 128: change head_dim or"
            " head_dim_v",
        )
        for d, dv in ((192, 192), (160, 128), (128, 192), (256, 256), (64, 512))
    ),
    (
        "b200", {"rescale_threshold": 5.0}, {"dtype": "fp8"},
        "fa4 has rescale_threshold=5; it must lie between 0 and 4.8: change rescale_threshold",
    ),
    ("b200", {"block_kv": 256}, {}, "fa4 has block_kv=256; it must be 32, 64, 96 or 128 (a thread holds a row): change block_kv"),
    ("b200", {"q_stages": 3}, {}, "fa4 has q_stages=3; it must be 1 or 2 (two S and two O fill TMEM): change q_stages"),
    (
        "b200", {"cta_pair": True}, {"causal": True},
        "fa4 runs causal tiles one CTA at a time (a pair's rows end at different blocks): set cta_pair=false",
    ),
    (
        "b200", {"kv_stages": 4, "cta_pair": False}, {},
        "fa4 has kv_stages=4; tiles of 32768 B of K and V fit 3 times beside Q and O, and 2 are needed: change kv_stages",
    ),
    (
        "b200", {"exp2_emulation": 0.75}, {},
        "fa4 has exp2_emulation=0.75; it must lie between 0 and 0.5 of a row: change exp2_emulation",
    ),
    (
        "b200", {"rescale_threshold": -1.0}, {},
        "fa4 has rescale_threshold=-1; it must lie between 0 and 64: change rescale_threshold",
    ),
    ("b200", {"rescale_rate": 2.0}, {}, "fa4 has rescale_rate=2; it must lie between 0 and 1: change rescale_rate"),
    ("b200", {"counts": "guess"}, {}, "fa4 has counts='guess'; it must be one of binary, ideal"),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "switches", "fields", "sentence"), REFUSED)
def test_refusals(gpu: str, switches: dict[str, Any], fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        lowered(gpu, problem(**fields), **switches)


def test_packed_arithmetic_and_tensor_memory_need_blackwell() -> None:
    program = lowered()
    for name, sentence in (
        ("ffma2", "FFMA2 works on two FP32 values at once, and h200 cannot: choose gpu b200 or b300"),
        ("ldtm_x32", "LDTM.x32 needs tensor memory, and h200 has none: choose another schedule or gpu b200"),
        (umma(128, fp8=False, from_tmem=False), "UTCHMMA needs tcgen05, and h200 has none: choose another schedule or gpu b200"),
    ):
        object.__setattr__(program, "bundles", (((name, 1),),))
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            bundle_table(program, load_gpu("h200"))


# --- switches ---


@pytest.mark.parametrize(
    ("gpu", "fields", "emulated"),
    [
        ("b200", {}, 24), ("b200", {"causal": True}, 16), ("b200", {"head_dim": 64}, 16), ("b300", {}, 0),
        ("b200", {"dtype": "fp8"}, 24), ("b200", {"dtype": "fp8", "causal": True}, 32), ("b300", {"dtype": "fp8"}, 0),
        ("b200", {"head_dim": 192, "head_dim_v": 128, "causal": True}, 8),
    ],
)
def test_released_share_of_emulated_exponentials(gpu: str, fields: dict[str, Any], emulated: int) -> None:
    """Of every 10 (pairs at head_dim 128) or 16 values of two quarters the last four; none where the MUFU is fast."""
    exps = {s.attrs["emulated"] for s in lowered(gpu, problem(**fields)).statements if s.kind == "lane_exp2"}
    assert exps == {emulated}
    assert emulated_columns(128, emulated).sum() == emulated
    assert not emulated_columns(128, emulated)[[*range(32), *range(96, 128)]].any()


def test_an_emulated_pair_trades_two_exponentials_for_ten_instructions() -> None:
    """Range reduction (two clamps, three FADD2), Horner (three FFMA2), and two shift-adds (IMAD)."""
    none, some = (lowered(counts="ideal", exp2_emulation=share).instruction_counts(0) for share in (0.0, 0.125))
    blocks, pairs = 4096 // 128, 8
    warps = 8 * blocks * pairs
    names = {"ex2": -2, "fmnmx": 2, "fadd2": 3, "ffma2": 3, "imad": 2}
    assert {name: some[name] - none[name] for name in names} == {name: n * warps for name, n in names.items()}


@pytest.mark.parametrize("emulation", [None, 0.0, 0.25])
def test_a_binarys_counts_follow_the_emulated_share(emulation: float | None) -> None:
    """105 exponentials a row and block where the binary emulates 24; another share changes them one for one."""
    few, more = (lowered(attention=problem(1024, kv), exp2_emulation=emulation) for kv in (1024, 1152))
    exponentials = (more.instruction_counts(0)["ex2"] - few.instruction_counts(0)["ex2"]) / 8
    assert exponentials == {None: 105, 0.0: 129, 0.25: 97}[emulation]


@pytest.mark.parametrize(
    ("threshold", "rate", "rescales"),
    [(8.0, None, 0), (0.0, None, 26), (8.0, 0.1, 3), (8.0, 1.0, 31), (2.0, None, 7), (0.0, 0.0, 0)],
)
def test_rescales_that_the_timing_run_takes(threshold: float, rate: float | None, rescales: int) -> None:
    """32 blocks: 31 of them may rescale. Normal scores never pass threshold 8, and pass 0 in 26.25 on average."""
    program = lowered(counts="ideal", rescale_threshold=threshold, rescale_rate=rate)
    per_rescale = 128 // 16 * 4 * 2
    loads = program.instruction_counts(0)["ldtm_x16"] // per_rescale - 1  # one more at the end, to store O
    assert loads == rescales


def test_profiles_agree_with_the_ideal_products() -> None:
    """What the binaries issue to the tensor cores per block is what the tile asks for: (Q K^T and P V) of two tiles."""
    checked = 0
    for arch, d, causal, pair, dtype in product(("sm_100", "sm_103"), (64, 96, 128, 192), *2 * [(False, True)], ("bf16", "fp8")):
        profile = kernel_profile("fa4", architecture=arch, head_dim=d, causal=causal, pair=pair, dtype=dtype)
        if profile is not None:
            step = 16 if dtype == "bf16" else 32
            assert sum(phase["tensor"] for phase in profile["mma"]) == 2 * (d // step + 128 // step)
            assert sum(phase["xu"] for phase in profile["full"]) == 128 - profile["emulated"] + 1
            checked += 1
    assert checked == len(_file("fa4")["loop"]) >= 19


@pytest.mark.parametrize(("dims", "dtype"), [((192, 128), "bf16"), ((96, 96), "bf16"), ((64, 64), "bf16"), ((128, 128), "fp8")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gpu", ["b200", "b300"])
def test_shapes_are_predicted_from_their_binaries(gpu: str, causal: bool, dims: tuple[int, int], dtype: str) -> None:
    program = lowered(gpu, problem(causal=causal, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype))
    assert program.profile.startswith("sass: flash-attn-4")


# --- DeepSeek's shape and FP8 ---


DEEPSEEK = {"head_dim": 192, "head_dim_v": 128}


def test_deepseeks_pair_emulates_from_the_first_quarter_on() -> None:
    exps = [s.attrs for s in lowered(attention=problem(**DEEPSEEK)).statements if s.kind == "lane_exp2"]
    assert {(a["emulated"], a["emulated_from"]) for a in exps} == {(24, 0.0)}
    chosen = emulated_columns(128, 24, 0.0)
    assert chosen.sum() == 24
    assert chosen[:32].any()
    assert not chosen[96:].any()


@pytest.mark.parametrize(("causal", "stages", "smem"), [(True, 3, 224 * 1024), (False, 5, 96 * 1024 + 5 * 24 * 1024)])
def test_deepseeks_stages_and_o_in_qs_place(causal: bool, stages: int, smem: int) -> None:
    """Q 96 KB, in whose place O leaves; of three stages a K (48 KB), a V (32 KB) and a K, or five of half a K."""
    program = lowered(attention=problem(causal=causal, **DEEPSEEK))
    assert {b.stages for b in program.barriers if b.name.startswith("kv_")} == {stages}
    statistics = 2 * 2 * 128 * 4
    assert program.smem_bytes == smem + statistics
    assert {"Qs0.O", "Qs1.O"} <= {b.name for b in program.buffers}


def test_a_k_that_comes_back_to_the_first_stage_waits_for_the_next_one() -> None:
    """With uneven stages it reaches into the place of the K two loads before; every third block."""
    program = lowered(attention=problem(2048, causal=True, **DEEPSEEK))
    load = next(i for i, role in enumerate(program.roles) if role.name == "load")
    for tile, blocks in ((0, 16), (len(program.tiles) - 1, 2)):  # the longest, and the shortest
        names = [(s.kind, s.attrs.get("ring"), s.reads) for s, _, _ in program.walk(tile, load)]
        early = [
            sum(reads == ("K",) for _, _, reads in names[:i])
            for i, (kind, ring, _) in enumerate(names)
            if kind == "mbarrier_wait" and ring == "v" and names[i + 1][:2] == ("mbarrier_wait", "k")
        ]
        assert early == list(range(3, blocks, 3))


def test_8_bit_operands_halve_the_products_and_ps_place() -> None:
    """Twice the rate: half the k-steps. P has a quarter of S's bytes and leaves in stores of eight columns."""
    wide, narrow = (lowered(attention=problem(dtype=dtype), counts="ideal") for dtype in ("bf16", "fp8"))
    steps = [
        sum(n for name, n in p.instruction_counts(0).items() if INSTRUCTIONS[name].path == Path.TCGEN05) for p in (wide, narrow)
    ]
    assert steps[0] == 2 * steps[1]
    buffers = {b.name: b for b in narrow.buffers}
    assert buffers["S0"].size_bytes == 4 * buffers["S0.P"].size_bytes
    counts = narrow.instruction_counts(0)
    stores = 8 * 32 * 4  # softmax warps, blocks, quarters
    assert (counts["sttm_x8"], counts["f2fp8"]) == (stores, 8 * 32 * 64)
    assert {s.attrs["threshold_log2"] for s in narrow.statements if s.kind == "lane_max"} == {0.0}
    assert narrow.tensor("O").bytes_per_element == 2


# --- numbers and time ---


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "switches", [{}, {"cta_pair": False}, {"q_stages": 1}, {"rescale_threshold": 0.0}, {"exp2_emulation": 0.25, "kv_stages": 2}]
)
@pytest.mark.parametrize("head_dim", [128, 192])
def test_numbers_are_attention(switches: dict[str, Any], causal: bool, head_dim: int) -> None:
    """Ragged lengths, grouped heads, large scores (O is rescaled), roles in any order."""
    attention = problem(300, 620, heads_kv=1, causal=causal, head_dim=head_dim, head_dim_v=128)
    rng = np.random.default_rng(1)
    shapes = ((2, 300, head_dim), (1, 620, head_dim), (1, 620, 128))
    q, k, v = (rng.standard_normal((1, *shape)).astype(np.float32) for shape in shapes)
    want_o, want_lse = forward(4 * q, k, v, causal=causal)[:2]
    schedule = get_schedule("fa4", **switches)
    for seed in (None, 7):
        out = values.run(schedule, load_gpu("b200"), attention, 4 * q, k, v, operands="fp32", seed=seed)
        np.testing.assert_allclose(out["O"], want_o, atol=1e-3)
        np.testing.assert_allclose(out["LSE"], want_lse, atol=1e-3)


@pytest.mark.parametrize(
    ("switches", "fields"),
    [
        ({}, {}), ({"cta_pair": False, "rescale_rate": 0.5}, {}), ({"q_stages": 1}, {}), ({}, {"dtype": "fp8", "causal": True}),
        ({}, DEEPSEEK), ({}, DEEPSEEK | {"causal": True}), ({"cta_pair": False}, DEEPSEEK),
    ],
)  # fmt: skip
def test_engines_agree(switches: dict[str, Any], fields: dict[str, Any]) -> None:
    attention = problem(512, heads_q=4, heads_kv=4, **fields)
    result = simulate(get_schedule("fa4", **switches), load_gpu("b200"), attention)
    (launch,) = result.launches
    assert launch.run.differences(ENGINES["simpy"](launch.job)) == []


def test_what_ideas_are_worth() -> None:
    """Signs: without emulation, with one Q tile in flight and with a rescale in every block the kernel is slower."""

    def cycles(gpu: str = "b200", **switches: Any) -> float:
        attention = problem(8192, heads_q=16, heads_kv=16)
        return float(simulate(get_schedule("fa4", **switches), load_gpu(gpu), attention, clock=1850).cycles)

    base = cycles()
    assert cycles(exp2_emulation=0.0) > base
    assert cycles(q_stages=1) > 1.2 * base
    assert cycles(rescale_rate=1.0) > base
    assert cycles("b300") < base
