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


def of_tile(gpu: str, head_dim: int, block_q: int, block_kv: int, warps: int, build: str = "flash-attn") -> Result:
    a = Attention(batch=8, heads_q=32, seqlen_q=2048, head_dim=head_dim, dtype="fp16")
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


def test_the_released_tiles_are_the_best_on_an_a100_and_spills_the_worst() -> None:
    """flash_fwd_launch_template.h, head_dim 64, N=2048: 2 warps 5 % slower, 8 warps 18 %, 64x256 27 %, 256x64 85 % (spills);
    head_dim 128: 8 warps 28 % slower, as 128x128 and as 256x64. By the compiler of that time; at head_dim 64 in time: a tile that
    keeps the tensor cores busier runs at a lower clock. 8 warps and 64x256 are predicted alike; an H200 has 8 warps slower.
    """
    own = of_tile("a100-80gb", 64, 128, 128, 4, build="flash-attn-2.0").ms
    others = [(128, 128, 8), (64, 256, 4), (256, 64, 4)]
    slower = [of_tile("a100-80gb", 64, *tile, build="flash-attn-2.0").ms / own - 1 for tile in others]
    assert all(0.1 < share < 0.3 for share in slower[:2])
    assert 0 < of_tile("a100-80gb", 64, 64, 128, 2, build="flash-attn-2.0").ms / own - 1 < slower[0]
    assert slower[-1] > 2 * max(slower[:2])
    wide = of_tile("a100-80gb", 128, 128, 64, 4, build="flash-attn-2.0").cycles
    assert all(of_tile("a100-80gb", 128, *tile, build="flash-attn-2.0").cycles > wide for tile in ((128, 128, 8), (256, 64, 8)))


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
