"""The problem: defaults, the mask in closed form, FLOPs, compulsory bytes, and refusals in sentences."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim.model.attention import Attention

SIZE = st.integers(1, 40)
SMALL: dict[str, Any] = {"batch": 2, "heads_q": 4, "seqlen_q": 8, "head_dim": 16}


@st.composite
def problems(draw: st.DrawFn) -> Attention:
    heads_kv = draw(st.integers(1, 3))
    return Attention(
        batch=draw(st.integers(1, 3)),
        heads_q=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        seqlen_q=draw(SIZE),
        seqlen_kv=draw(SIZE),
        head_dim=draw(SIZE),
        head_dim_v=draw(SIZE),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bf16", "fp16", "fp8", "fp32"])),
        pass_=draw(st.sampled_from(["fwd", "bwd", "fwd+bwd"])),
    )


def with_pass(a: Attention, pass_: str) -> Attention:
    return Attention(**{**vars(a), "pass_": pass_})


def test_kv_sides_default_to_their_query_twins() -> None:
    a = Attention(**SMALL)
    assert (a.heads_kv, a.seqlen_kv, a.head_dim_v, a.group) == (4, 8, 16, 1)
    assert a == Attention(**SMALL, heads_kv=4, seqlen_kv=8, head_dim_v=16)
    assert (a.dtype_bytes, a.softmax_scale) == (2, 0.25)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_unmasked_pairs_are_those_of_the_mask(a: Attention) -> None:
    offset = a.seqlen_kv - a.seqlen_q
    seen = [sum(not a.causal or j <= i + offset for j in range(a.seqlen_kv)) for i in range(a.seqlen_q)]
    assert [a.visible_keys(i) for i in range(a.seqlen_q)] == seen
    assert a.unmasked_pairs == sum(seen)
    assert seen[-1] == a.seqlen_kv, "the last query sees every key"


@given(problems())
@settings(max_examples=200, deadline=None)
def test_flops_count_five_products_backward_against_two_forward(a: Attention) -> None:
    d, dv, heads = a.head_dim, a.head_dim_v, a.batch * a.heads_q
    forward = 2 * d + 2 * dv  # Q K^T, P V
    backward = 2 * d + 2 * dv + 2 * dv + 2 * d + 2 * d  # Q K^T, dO V^T, P^T dO, dS K, dS^T Q
    per_pair = {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[a.pass_]
    assert a.flops("exact") == heads * per_pair * a.unmasked_pairs
    assert a.flops() == a.flops("paper")
    assert a.flops() * (2 if a.causal else 1) == heads * per_pair * a.seqlen_q * a.seqlen_kv
    if d == dv:
        assert 2 * with_pass(a, "bwd").flops() == 5 * with_pass(a, "fwd").flops()


def test_flops_of_the_papers_shapes() -> None:
    shape: dict[str, Any] = {"batch": 1, "heads_q": 16, "seqlen_q": 16384, "head_dim": 128}
    assert Attention(**shape).flops() == 4 * 16384**2 * 128 * 16
    causal = Attention(**shape, causal=True)
    assert causal.flops() == 2 * 16384**2 * 128 * 16
    assert causal.flops("exact") == 4 * 128 * 16 * 16384 * 16385 // 2
    assert Attention(**shape, pass_="fwd+bwd").flops() * 2 == 7 * Attention(**shape).flops()


def test_rows_without_a_key_count_nothing() -> None:
    a = Attention(batch=1, heads_q=1, seqlen_q=5, seqlen_kv=2, head_dim=1, causal=True)
    assert [a.visible_keys(i) for i in range(5)] == [0, 0, 0, 1, 2]
    assert a.flops("exact") == 4 * 3


@given(problems())
@settings(max_examples=200, deadline=None)
def test_compulsory_bytes_move_each_tensor_once(a: Attention) -> None:
    e = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}[a.dtype]
    q = e * a.batch * a.heads_q * a.seqlen_q * a.head_dim
    k = e * a.batch * a.heads_kv * a.seqlen_kv * a.head_dim
    v = e * a.batch * a.heads_kv * a.seqlen_kv * a.head_dim_v
    o = e * a.batch * a.heads_q * a.seqlen_q * a.head_dim_v
    lse = 4 * a.batch * a.heads_q * a.seqlen_q
    fwd, bwd, both = (with_pass(a, p) for p in ("fwd", "bwd", "fwd+bwd"))
    assert (fwd.compulsory_read_bytes, fwd.compulsory_write_bytes) == (q + k + v, o + lse)
    assert (bwd.compulsory_read_bytes, bwd.compulsory_write_bytes) == (q + k + v + o + o + lse, q + k + v)
    assert both.compulsory_read_bytes == fwd.compulsory_read_bytes + bwd.compulsory_read_bytes
    assert both.compulsory_write_bytes == fwd.compulsory_write_bytes + bwd.compulsory_write_bytes


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({}, "B2 H4 N8 D16 bf16 fwd"),
        ({"heads_kv": 2, "seqlen_kv": 9, "head_dim_v": 8, "causal": True}, "B2 H4/2 N8x9 D16,8 bf16 fwd causal"),
        ({"dtype": "fp8", "pass_": "fwd+bwd"}, "B2 H4 N8 D16 fp8 fwd+bwd"),
    ],
)
def test_label_says_what_differs(change: dict[str, Any], label: str) -> None:
    assert Attention(**{**SMALL, **change}).label == label


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *(
            ({field: bad}, f"{field} is {bad!r}; it must be a whole number of at least 1: change {field}")
            for field in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")
            for bad in (0, 1.5, True)
        ),
        (
            {"heads_kv": 3},
            "heads_q is 4 and heads_kv is 3; heads_q must be a multiple of heads_kv: change either",
        ),
        ({"causal": "no"}, "causal is 'no'; it must be True or False: change causal"),
        ({"causal": 1}, "causal is 1; it must be True or False: change causal"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of bf16, fp16, fp8, fp32: change dtype"),
        ({"pass_": "back"}, "pass is 'back'; it must be one of fwd, bwd, fwd+bwd: change pass_"),
    ],
)
def test_refusals_say_got_allowed_and_what_to_change(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Attention(**{**SMALL, **change})


def test_unknown_convention_and_row_are_refused() -> None:
    a = Attention(**SMALL)
    sentence = "FLOP convention is 'half'; it must be one of paper, exact: change convention"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        a.flops("half")
    sentence = "row is 8; it must be from 0 to seqlen_q - 1 = 7: change row"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        a.visible_keys(8)
