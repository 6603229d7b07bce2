"""Gluon's attention kernel for Blackwell: FA4's pipeline without the paper's ideas, its tiles' order, its time beside FA4's."""

from __future__ import annotations

from typing import Any

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import get_schedule
from flashsim.sim.predict import simulate

SHAPE: dict[str, Any] = {"batch": 1, "heads_q": 2, "head_dim": 128}


def test_gluon_rescales_always_emulates_nothing_and_hands_p_over_whole() -> None:
    (program,) = get_schedule("gluon").lower(load_gpu("b200"), Attention(**SHAPE, seqlen_q=4096, causal=True))
    assert {s.attrs["emulated"] for s in program.statements if s.kind == "lane_exp2"} == {0}
    assert not any(s.attrs.get("barrier") == "p_full_last0" for s in program.statements)
    assert program.persistent
    assert program.strided
    assert program.tiles.column("n_plain").max() == 0
    lengths = program.tiles.column("n_blocks")
    assert lengths[0] == lengths.min()  # longest last
    assert program.profile.startswith("assumed: FA4's instruction counts")


def test_gluon_is_slower_than_fa4() -> None:
    gpu, attention = load_gpu("b200"), Attention(**{**SHAPE, "heads_q": 32}, seqlen_q=2048)
    fa4, gluon = (simulate(get_schedule(name), gpu, attention, clock=1850).cycles for name in ("fa4", "gluon"))
    assert gluon > 1.1 * fa4
