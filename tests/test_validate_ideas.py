"""What each idea is worth: signs and order as the papers print them, bytes by the closed forms, and FA2's tiles in order."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.model.traffic import fa1_bytes, standard_bytes
from flashsim.sim.hazards import check
from flashsim.sim.predict import simulate
from flashsim.validate import ideas as table
from flashsim.validate.ideas import IDEAS, Idea, ideas, meetings

BY_NAME = {idea.name: idea for idea in IDEAS}
PRESENT = [idea.name for idea in IDEAS if not idea.missing]
PUBLISHED = [name for name in PRESENT if BY_NAME[name].loses]


@cache
def row(name: str, gpu: str = "") -> dict[str, Any]:
    """The idea on its own chip, or another."""
    (found,) = ideas([name], [gpu or BY_NAME[name].gpus[0]])
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_the_papers_measured_has_their_sign(name: str) -> None:
    assert row(name)["times"] > 1.0


#: Pairs of ideas of which the first is worth more, as printed.
MORE = (
    ("ping-pong", "overlap in a warpgroup"),  # FA3 section 3.1: 570 -> 620-640 -> 640-661 TFLOP/s
    ("warp specialisation", "overlap in a warpgroup"),  # FA3 table 2: 661 -> 570 and 661 -> 582
    ("tiling", "causal blocks skipped"),  # FA1 table 18: 1.96x; FA2 section 3.1: 1.7 to 1.8x
    ("causal blocks skipped", "FP8"),  # FA3 figures 5 and 7: 1.56x
    ("FP8", "ping-pong"),  # 1.09 to 1.12x
    ("ping-pong", "longest tiles first"),  # FA4 section 3.3: 1.04 to 1.08x
)


@pytest.mark.parametrize(("more", "less"), MORE)
def test_ideas_are_in_the_papers_order(more: str, less: str) -> None:
    published = [BY_NAME[name].loses for name in (more, less)]
    assert published[0] is not None
    assert published[1] is not None
    assert published[0][0] >= published[1][0], "the order of the table below is the papers'"
    if BY_NAME[more].missing or BY_NAME[less].missing:
        assert row(more)["reason"] or row(less)["reason"]
        return
    assert row(more)["times"] > row(less)["times"]


def test_what_each_idea_is_meant_to_save_is_what_it_saves() -> None:
    def ratio(name: str, what: str) -> float:
        return float(row(name)["without"][what] / row(name)["with"][what])

    assert ratio("tiling", "hbm_bytes") > 2.5
    assert ratio("split Q instead of K", "smem_bytes") > 2
    assert ratio("split Q instead of K", "meetings_per_block") > 1.5
    assert row("sequence parallelism")["without"]["idle_sms"] == 108 - 32
    assert row("sequence parallelism")["with"]["idle_sms"] == 0
    assert ratio("TMA multicast", "l2_bytes") > 1.7
    assert ratio("CTA pair", "smem_bytes") > 1.3
    assert ratio("FP8", "hbm_bytes") > 1.5


def test_emulation_pays_where_the_mufu_is_slow() -> None:
    """B300's MUFU is twice as fast: its kernels emulate no exponential, so the switch changes nothing there."""
    assert row("emulated exponentials")["times_cycles"] > 1
    assert row("emulated exponentials", "b300")["times_cycles"] == 1


def test_fa1s_bytes_are_the_closed_forms_and_fall_with_the_block() -> None:
    """FA1 figure 2, middle: runtime and HBM bytes fall from 64 over 128 to 256 keys."""
    a = BY_NAME["tiling"].attention
    results = [simulate(get_schedule("fa1", block_kv=keys), load_gpu("a100-40gb"), a) for keys in (64, 128, 256)]
    moved = [r.bytes["hbm_read"] + r.bytes["hbm_write"] for r in results]
    assert moved == sorted(moved, reverse=True)
    assert [r.cycles for r in results] == sorted((r.cycles for r in results), reverse=True)
    asked = [results[-1].bytes["l2_sm"], fa1_bytes(a, block_q=16, block_kv=256).total_bytes]
    assert asked[0] == pytest.approx(asked[1], rel=0.05)
    standard = standard_bytes(a)
    assert row("tiling")["without"]["l2_bytes"] >= standard.total_bytes


#: Switched off, of the schedules of this project's oldest generations: each is a program of its own.
OFF = [dict(idea.without) for idea in IDEAS if idea.schedule == "fa2" and not idea.against and idea.without]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", [*OFF, {key: value for each in OFF for key, value in each.items()}], ids=str)
def test_fa2_without_its_ideas_is_clean(fields: dict[str, Any], causal: bool) -> None:
    for shape in ({"seqlen_q": 512}, {"seqlen_q": 300, "seqlen_kv": 421}, {"seqlen_q": 400, "seqlen_kv": 150}):
        a = Attention(batch=1, heads_q=2, heads_kv=1, head_dim=64, causal=causal, dtype="fp16", **shape)
        verdict = check(get_schedule("fa2", **fields), load_gpu("a100-80gb"), a)
        assert verdict.clean, str(verdict)


def test_barriers_a_block_are_counted() -> None:
    a = Attention(batch=1, heads_q=1, seqlen_q=4096, head_dim=64, dtype="fp16")
    (own,), (split,) = (get_schedule("fa2", split=s).lower(load_gpu("a100-80gb"), a) for s in ("q", "k"))
    assert meetings(own) == pytest.approx(2, abs=0.1)  # K and V have arrived
    assert meetings(split) == pytest.approx(4, abs=0.1)  # and maxima, sums and products of the other warps


def test_an_idea_whose_switch_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Idea(
        name="x", generation="FA2", schedule="fa2", attention=BY_NAME["tiling"].attention, gpus=("a100-80gb",), claim="",
        source="", without=(("levitation", False),),
    )  # fmt: skip
    monkeypatch.setattr(table, "IDEAS", (absent,))
    (found,) = ideas()
    assert found["reason"] == "fa2 has no switch levitation"
    assert "with" not in found


def test_an_idea_that_a_chip_cannot_run_says_so() -> None:
    (found,) = ideas(["ping-pong"], ["a100-80gb"])
    assert found["reason"].startswith("fa3 multiplies with wgmma and a100-80gb has none")


@pytest.mark.parametrize("idea", IDEAS, ids=lambda idea: idea.name)
def test_every_idea_changes_one_thing_and_has_a_source(idea: Idea) -> None:
    assert idea.schedule in SCHEDULES
    assert idea.claim
    assert idea.source
    assert bool(idea.against) + bool(idea.without and not idea.against) + bool(idea.dtype_without) + idea.unmasked == 1
