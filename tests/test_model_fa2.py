"""FA2's registers and tiles: what its binaries use and spill, and tiles in the order measured."""

from __future__ import annotations

import csv
import tomllib
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import get_schedule
from flashsim.model.schedules.fa2 import BUILDS
from flashsim.model.schedules.fa2_tiles import MOST_REGISTERS, STATE_REGISTERS, FA2Tile, demand, l1_holds
from flashsim.model.tiling import Footprint, occupancy
from flashsim.sim.predict import Result, simulate

FILES = [resources.files("flashsim.model.profiles") / f"fa2_{build}.toml" for build in BUILDS]
PROFILES: list[dict[str, Any]] = [row for file in FILES for row in tomllib.loads(file.read_text())["loop"]]
RELEASED = [row for row in PROFILES if "stack_bytes" not in row]
CHIPS = {"sm_80": "a100-80gb", "sm_90": "h100"}
DATA = Path(str(resources.files("flashsim.validate"))) / "data"


def tile_of(row: dict[str, Any]) -> FA2Tile:
    return FA2Tile(block_q=row["block_q"], block_kv=row["block_kv"], warps=row["warps"], head_dim=row["head_dim"])


def test_state_registers_are_the_median_of_the_binaries_clear_of_the_limit() -> None:
    rows = [row for row in RELEASED if row["head_dim"] >= 192]
    left = []
    for row in rows:
        need = demand(tile_of(row))
        left.append(row["registers"] - (max(need.scores, need.softmax, need.values) - STATE_REGISTERS))
    assert len(rows) == 8
    assert median(sorted(set(left))) == pytest.approx(STATE_REGISTERS, abs=1)


@pytest.mark.parametrize("row", RELEASED, ids=lambda r: f"{r['build']} {r['architecture']} D{r['head_dim']}")
def test_a_tile_is_said_to_spill_exactly_where_its_binary_spills(row: dict[str, Any]) -> None:
    need = demand(tile_of(row))
    assert (need.under_scores + need.under_softmax > 0) == (row["spill_bytes"] > 0)
    assert need.registers <= MOST_REGISTERS


def test_a_frame_that_l1_does_not_hold_comes_back_from_l2() -> None:
    """256 x 64 with four warps: 600 B a thread, two CTAs of 128 threads, and 97 KB of an A100's 192 KB are SMEM."""
    a = Attention(batch=1, heads_q=1, seqlen_q=512, head_dim=64, dtype="fp16")
    gpu = load_gpu("a100-80gb")
    (spilling,) = get_schedule("fa2", build="flash-attn", block_q=256, block_kv=64).lower(gpu, a)
    cta = Footprint(name="fa2_fwd", warps=4, registers=spilling.registers, smem_bytes=spilling.smem_bytes)
    assert not l1_holds(gpu, cta, 600)
    assert l1_holds(gpu, cta, 300)
    names = {name for bundle in spilling.bundles for name, _ in bundle}
    assert "ldl_far" in names
    assert "ldl" not in names
    (near,) = get_schedule("fa2", build="flash-attn", block_q=64, block_kv=256).lower(gpu, a)
    assert {name for bundle in near.bundles for name, _ in bundle} & {"ldl", "ldl_far", "stl"} == {"ldl", "stl"}


def of_tile(
    gpu: str, head_dim: int, block_q: int, block_kv: int, warps: int, build: str = "flash-attn", *, causal: bool = False
) -> Result:
    """Of the release's own benchmark: 16,384 tokens, 2,048 dimensions of all heads."""
    a = Attention(batch=8, heads_q=2048 // head_dim, seqlen_q=2048, head_dim=head_dim, dtype="fp16", causal=causal)
    schedule = get_schedule("fa2", build=build, block_q=block_q, block_kv=block_kv, warps=warps)
    return simulate(schedule, load_gpu(gpu), a)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_are_in_the_order_measured_on_an_h200(head_dim: int) -> None:
    with (DATA / "h200_fa2_tiles.csv").open() as file:
        rows = [r for r in csv.DictReader(line for line in file if line[0] != "#") if int(r["head_dim"]) == head_dim]
    measured, predicted = {}, {}
    for row in rows:
        switches = dict(part.split("=") for part in row["variant"].split(";"))
        key = tuple(int(switches[name]) for name in ("block_q", "block_kv", "warps"))
        measured[key] = float(row["cycles"])
        predicted[key] = of_tile("h200", head_dim, *key).cycles
    assert sorted(predicted, key=lambda k: predicted[k]) == sorted(measured, key=lambda k: measured[k])


@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_head_dim_64_are_in_the_order_that_its_author_found_on_an_a100(causal: bool) -> None:
    """flash_fwd_launch_template.h, N=2048: 128x128 with four warps, then 2 warps (5 % slower), 8 warps (18 %), 64x256 (27 %) and
    256x64 (85 %, which spills). By the compiler of that time, in time: what moves more bytes a product has a lower clock, too.
    """
    order = [(128, 128, 4), (64, 128, 2), (128, 128, 8), (64, 256, 4), (256, 64, 4)]
    ms = [of_tile("a100-80gb", 64, *tile, build="flash-attn-2.0", causal=causal).ms for tile in order]
    assert ms == sorted(ms)
    assert ms[-1] / ms[0] - 1 > 2 * (ms[-2] / ms[0] - 1) > 0.2


@pytest.mark.parametrize("causal", [False, True])
def test_eight_warps_of_head_dim_128_are_slower_on_an_a100(causal: bool) -> None:
    """The same comments: 28 % slower as 128x128 and as 256x64. In cycles; predicted are 5 to 10 %."""
    wide = of_tile("a100-80gb", 128, 128, 64, 4, build="flash-attn-2.0", causal=causal).cycles
    for tile in ((128, 128, 8), (256, 64, 8)):
        assert of_tile("a100-80gb", 128, *tile, build="flash-attn-2.0", causal=causal).cycles > 1.03 * wide


def test_what_was_spilled_comes_at_the_rate_of_its_home_partition() -> None:
    """An A100's L2 has no second copy of what was just written: 4.0 TB/s instead of 5.4, which only a tile that spills feels."""
    gpu = load_gpu("a100-80gb")
    evenly = gpu.replace_number("l2.home_bytes_per_clk", float(gpu.l2.bytes_per_clk))
    a = Attention(batch=1, heads_q=108, seqlen_q=2048, head_dim=64, dtype="fp16")
    spilling, other = (get_schedule("fa2", build="flash-attn-2.0", block_q=q, block_kv=kv) for q, kv in ((256, 64), (64, 256)))
    assert simulate(spilling, gpu, a).cycles > 1.1 * simulate(spilling, evenly, a).cycles
    assert simulate(other, gpu, a).cycles == simulate(other, evenly, a).cycles
    assert simulate(spilling, gpu, a).bytes == simulate(spilling, evenly, a).bytes


with (DATA / "h200_fa2_counters.csv").open() as counters:
    COUNTED = list(csv.DictReader(line for line in counters if line[0] != "#"))


@pytest.mark.parametrize("row", COUNTED, ids=lambda r: f"D{r['head_dim']} {r['seqlen_q']} causal={r['causal']}")
def test_instructions_are_those_that_a_profiler_counts(row: dict[str, str]) -> None:
    """All warps of all CTAs: start, first and masked blocks, loops and epilogue, as the binaries have them."""
    sizes = {name: int(row[name]) for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim")}
    problem = Attention(**sizes, causal=row["causal"] == "1")
    predicted = simulate(get_schedule("fa2"), load_gpu("h200"), problem).instructions["total"]
    assert predicted == pytest.approx(float(row["inst"]), rel=0.02)


SHORT = [(64, 512, 5023), (64, 1024, 8344), (128, 256, 5066), (128, 512, 7502)]


@pytest.mark.parametrize(("head_dim", "seqlen", "counted"), SHORT)
def test_short_causal_tiles_run_the_instructions_of_their_binaries(head_dim: int, seqlen: int, counted: int) -> None:
    """Of a warp and tile (profiler, H200, 16,384 tokens): half or more of them stand before the loop."""
    problem = Attention(batch=16384 // seqlen, heads_q=2048 // head_dim, seqlen_q=seqlen, head_dim=head_dim, causal=True)
    result = simulate(get_schedule("fa2"), load_gpu("h200"), problem)
    warps = 4 * problem.batch * problem.heads_q * seqlen // 128
    assert result.instructions["total"] / warps == pytest.approx(counted, rel=0.02)


def test_the_first_block_does_not_rescale_an_output_that_is_zero() -> None:
    (program,) = get_schedule("fa2").lower(load_gpu("h200"), Attention(batch=1, heads_q=1, seqlen_q=512, head_dim=64))
    kinds = [statement.kind for statement in program.statements]
    assert kinds.count("row_max") == 2
    assert kinds.count("rescale") == 1
    assert kinds.index("rescale") > kinds.index("loop")


def test_register_counts_share_their_code_where_the_same_ctas_fit() -> None:
    """192 x 32 spills. Three CTAs leave no room for that in L1, two do: their code reloads from there."""
    attention, h100 = Attention(batch=1, heads_q=16, seqlen_q=2048, head_dim=128), load_gpu("h100")
    counts = (128, 168, 255)
    few, more, all_ = (get_schedule("fa2", block_q=192, block_kv=32, registers=n).lower(h100, attention)[0] for n in counts)
    assert (few.registers, more.registers, all_.registers) == counts
    assert [occupancy(h100, program).ctas_per_sm for program in (few, more, all_)] == [3, 3, 2]
    assert few.code is more.code
    loads = [{name for bundle in program.bundles for name, _ in bundle} & {"ldl", "ldl_far"} for program in (few, more, all_)]
    assert loads == [{"ldl_far"}, {"ldl_far"}, {"ldl"}]
