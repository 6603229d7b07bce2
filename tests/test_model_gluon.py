"""Gluon's attention kernel for Blackwell: FA4's pipeline without the paper's ideas, its tiles' order, its time beside FA4's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.profiles import kernel_profile
from flashsim.model.program import Program
from flashsim.model.schedules import get_schedule
from flashsim.sim.predict import simulate

SHAPE: dict[str, Any] = {"batch": 1, "heads_q": 2, "head_dim": 128}


def gluon(seqlen: int = 4096, gpu: str = "b200", **changed: Any) -> Program:
    (program,) = get_schedule("gluon").lower(load_gpu(gpu), Attention(**{**SHAPE, **changed}, seqlen_q=seqlen))
    return program


def test_gluon_rescales_always_emulates_nothing_and_hands_p_over_whole() -> None:
    program = gluon(causal=True)
    assert not any(s.attrs.get("emulated") for s in program.statements if s.kind == "lane_exp2")
    assert {s.attrs["asked"] for s in program.statements if s.kind == "vote_scale"} == {False}
    assert not any(b.name.startswith("p_full_last") for b in program.barriers)
    assert program.persistent
    assert program.strided
    assert program.profile.startswith("sass: triton 3.6.0")


def test_gluons_causal_tiles_go_in_order_of_rows_for_four_heads_at_a_time() -> None:
    tiles = gluon(1024, heads_q=8, causal=True).tiles
    assert tiles.column("n_blocks").tolist() == [n for _ in range(2) for n in (2, 4, 6, 8) for _ in range(4)]
    assert tiles.column("plane_q")[:8].tolist() == [0, 1, 2, 3] * 2
    assert gluon(1024, heads_q=8).tiles.column("plane_q")[:8].tolist() == [0] * 4 + [1] * 4
    assert set(tiles.column("n_masked").tolist()) == {2}


def test_a_tile_gives_its_scores_place_back_when_the_correction_warps_have_its_sums() -> None:
    """The next tile's Q K^T waits for one arrival a block and one more; nothing of a tile's end overlaps it."""
    program = gluon(1024)
    arrivals = [s for s in program.statements if s.kind == "mbarrier_arrive" and s.attrs["barrier"] == "p_full0"]
    waits = [s for s in program.statements if s.kind == "mbarrier_wait" and s.attrs["barrier"] == "p_full0"]
    assert (len(arrivals), len(waits)) == (2, 3)  # a block's and the tile's; first scores, first P, a block's P
    last = next(i for i, s in enumerate(program.statements) if s is arrivals[-1])
    before = [s for s in program.statements[:last] if s.kind == "mbarrier_wait" and s.role == arrivals[-1].role]
    assert before[-1].attrs["barrier"] == "stats_empty0"


@pytest.mark.parametrize(("dtype", "head_dim", "stages"), [("bf16", 128, 3), ("bf16", 64, 6), ("fp8", 128, 4), ("fp8", 32, 8)])
def test_stages_are_those_of_the_kernel(dtype: str, head_dim: int, stages: int) -> None:
    rings = {ring.name: ring.stages for ring in gluon(dtype=dtype, head_dim=head_dim).rings}
    assert rings["k"] == rings["v"] == stages
    assert ("turn" in rings) is (head_dim == 64)


@pytest.mark.parametrize("gpu", ["b200", "b300"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_every_binarys_row_has_one_exponential_for_each_key_and_one_for_its_factor(
    gpu: str, dtype: str, head_dim: int, causal: bool
) -> None:
    keys = {"architecture": load_gpu(gpu).architecture, "dtype": dtype, "head_dim": head_dim, "causal": causal}
    profile = kernel_profile("gluon", **keys)
    assert profile is not None
    for kind in ("full", "masked") if causal else ("full",):
        assert sum(p["xu"] for p in profile[kind]) == 128 + 1
    assert sum(p["tensor"] for p in profile["mma"]) == (head_dim + 128) // (16 if dtype == "bf16" else 32) * 2


@pytest.mark.parametrize(
    ("gpu", "fields", "changed", "message"),
    [
        ("h100", {}, {}, "gluon keeps S and O in TMEM; h100 has none: choose triton, or gpu b200"),
        ("b200", {}, {"pass_": "bwd"}, "gluon has a forward schedule only, got pass 'bwd': choose --pass fwd"),
        ("b200", {}, {"head_dim": 192}, "gluon has no tile for head_dim 192; the largest is 128: reduce head_dim"),
        (
            "b200", {"kv_stages": 4}, {},
            "gluon has kv_stages=4; it keeps 3 at head_dim 128 in bf16, and 2 are needed: change kv_stages",
        ),
    ],
)  # fmt: skip
def test_what_gluon_cannot_run_is_refused(gpu: str, fields: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        get_schedule("gluon", **fields).lower(load_gpu(gpu), Attention(**{**SHAPE, **changed}, seqlen_q=512))


def test_gluon_is_slower_than_fa4() -> None:
    gpu, attention = load_gpu("b200"), Attention(**{**SHAPE, "heads_q": 32}, seqlen_q=2048)
    fa4, gluon = (simulate(get_schedule(name), gpu, attention, clock=1850).cycles for name in ("fa4", "gluon"))
    assert gluon > 1.1 * fa4
