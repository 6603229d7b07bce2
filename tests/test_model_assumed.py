"""Notes of a prediction on what a library would do otherwise."""

from __future__ import annotations

from dataclasses import replace

from flashsim.model.assumed import assumptions
from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import get_schedule

USUAL = Attention(batch=1, heads_q=8, seqlen_q=2048, head_dim=128)


def test_what_a_library_would_do_otherwise_is_told() -> None:
    chip, fa2 = load_gpu("h100"), get_schedule("fa2")
    assert assumptions(fa2, chip, USUAL) == ()
    assert assumptions(fa2, chip) == ()
    (decode,) = assumptions(fa2, chip, replace(USUAL, heads_kv=2, seqlen_q=1, seqlen_kv=2048))
    assert "not their decode" in decode
    (odd,) = assumptions(fa2, chip, replace(USUAL, head_dim=100, head_dim_v=100))
    assert "pad them to 104" in odd
    (fp8,) = assumptions(get_schedule("fa3"), chip, replace(USUAL, head_dim=72, head_dim_v=72, dtype="fp8"))
    assert "pad them to 80" in fp8


def test_what_nobody_has_read_is_told_of_the_schedule_alone() -> None:
    (guess,) = assumptions(get_schedule("cudnn"), load_gpu("h100"))
    assert guess
    assert assumptions(get_schedule("cudnn"), load_gpu("h100"), USUAL) == (guess,)
