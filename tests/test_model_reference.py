"""Reference numbers against the definition, finite differences, explicit repeats and the papers' recurrences."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flashsim.model.reference import backward, forward, online_softmax, round_bf16, round_fp16

Array = NDArray[Any]
ROWS = st.integers(1, 13)


@dataclass(frozen=True, kw_only=True)
class Case:
    q: Array
    k: Array
    v: Array
    do: Array
    causal: bool

    @property
    def qkv(self) -> tuple[Array, Array, Array]:
        return self.q, self.k, self.v


@st.composite
def cases(draw: st.DrawFn, rows: st.SearchStrategy[int] = ROWS) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n_q, n_kv, d, dv = draw(rows), draw(rows), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    heads = heads_kv * group
    return Case(
        q=3 * rng.standard_normal((batch, heads, n_q, d)),
        k=rng.standard_normal((batch, heads_kv, n_kv, d)),
        v=rng.standard_normal((batch, heads_kv, n_kv, dv)),
        do=rng.standard_normal((batch, heads, n_q, dv)),
        causal=draw(st.booleans()),
    )


def close(a: Array, b: Array, tolerance: float = 1e-11) -> None:
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@given(cases())
@settings(max_examples=80, deadline=None)
def test_forward_is_the_definition_row_by_row(c: Case) -> None:
    o, lse = forward(*c.qkv, causal=c.causal)
    batch, heads, n_q, d = c.q.shape
    group, n_kv = heads // c.k.shape[1], c.k.shape[2]
    for b, h, i in np.ndindex(batch, heads, n_q):
        seen = [j for j in range(n_kv) if not c.causal or j <= i + n_kv - n_q]
        scores = [sum(c.q[b, h, i] * c.k[b, h // group, j]) / math.sqrt(d) for j in seen]
        total = math.fsum(math.exp(s) for s in scores)
        if not seen:
            assert not o[b, h, i].any()
            assert lse[b, h, i] == -np.inf
            continue
        values = [math.exp(s) / total * c.v[b, h // group, j] for s, j in zip(scores, seen, strict=True)]
        close(o[b, h, i], np.sum(values, axis=0))
        close(lse[b, h, i], np.asarray(math.log(total)))


@given(cases(), st.integers(1, 15), st.integers(1, 15), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_tiles_and_their_order_change_nothing(
    c: Case, block_q: int, block_kv: int, deferred: bool, rng: Any
) -> None:
    order = list(range(-(-c.k.shape[2] // block_kv)))
    rng.shuffle(order)
    o, lse = forward(*c.qkv, causal=c.causal)
    tiled_o, tiled_lse = online_softmax(
        *c.qkv, block_q=block_q, block_kv=block_kv, causal=c.causal, deferred=deferred, order=order
    )
    close(tiled_o, o)
    close(tiled_lse, lse)


@pytest.mark.parametrize("deferred", [True, False])
@given(c=cases())
@settings(max_examples=60, deadline=None)
def test_a_shift_of_all_scores_moves_only_lse(deferred: bool, c: Case) -> None:
    """A constant column in Q and K adds the same to every score: 900 would overflow exp without the row maximum."""
    scale, shift = 0.5, 900.0
    q = np.concatenate([c.q, np.ones((*c.q.shape[:-1], 1))], axis=-1)
    k = np.concatenate([c.k, np.full((*c.k.shape[:-1], 1), shift / scale)], axis=-1)
    o, lse = forward(*c.qkv, causal=c.causal, scale=scale)
    for shifted_o, shifted_lse in (
        forward(q, k, c.v, causal=c.causal, scale=scale),
        online_softmax(q, k, c.v, block_kv=3, causal=c.causal, scale=scale, deferred=deferred),
    ):
        close(shifted_o, o, 1e-10)
        close(shifted_lse, lse + shift, 1e-10)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_permuting_keys_changes_nothing_without_a_mask(c: Case) -> None:
    turn = np.random.default_rng(0).permutation(c.k.shape[2])
    o, lse = forward(*c.qkv)
    turned_o, turned_lse = forward(c.q, c.k[:, :, turn], c.v[:, :, turn])
    close(turned_o, o)
    close(turned_lse, lse)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_grouped_heads_equal_explicit_repeats(c: Case) -> None:
    heads_kv = c.k.shape[1]
    group = c.q.shape[1] // heads_kv
    k, v = (np.stack([x[:, h // group] for h in range(heads_kv * group)], axis=1) for x in (c.k, c.v))
    o, lse = forward(*c.qkv, causal=c.causal)
    repeated_o, repeated_lse = forward(c.q, k, v, causal=c.causal)
    close(repeated_o, o)
    close(repeated_lse, lse)
    dq, dk, dv = backward(*c.qkv, o, lse, c.do, causal=c.causal)
    repeated = backward(c.q, k, v, o, lse, c.do, causal=c.causal)
    close(dq, repeated[0])
    for h in range(heads_kv):
        members = slice(h * group, (h + 1) * group)
        close(dk[:, h], repeated[1][:, members].sum(axis=1))
        close(dv[:, h], repeated[2][:, members].sum(axis=1))


@pytest.mark.parametrize("scale", [None, 0.3])
@given(c=cases(st.integers(1, 4)))
@settings(max_examples=25, deadline=None)
def test_backward_agrees_with_finite_differences(scale: float | None, c: Case) -> None:
    o, lse = forward(*c.qkv, causal=c.causal, scale=scale)
    gradients = backward(*c.qkv, o, lse, c.do, causal=c.causal, scale=scale)
    step = 1e-5
    for which, gradient in enumerate(gradients):
        assert gradient.shape == c.qkv[which].shape
        for at in np.ndindex(gradient.shape):
            loss = []
            for sign in (1, -1):
                moved = [x.copy() for x in c.qkv]
                moved[which][at] += sign * step
                loss.append(float((forward(*moved, causal=c.causal, scale=scale)[0] * c.do).sum()))
            assert gradient[at] == pytest.approx((loss[0] - loss[1]) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("n_q", "n_kv"), [(7, 3), (3, 7), (1, 1), (1, 9), (9, 1), (129, 65)])
@pytest.mark.parametrize("deferred", [True, False])
def test_causal_is_aligned_bottom_right(n_q: int, n_kv: int, deferred: bool) -> None:
    """With equal scores, O of query i is the mean of the values it sees, and LSE the logarithm of their number."""
    v = np.arange(n_kv, dtype=np.float64).reshape(1, 1, n_kv, 1)
    q, k = np.zeros((1, 1, n_q, 2)), np.zeros((1, 1, n_kv, 2))
    seen = np.clip(np.arange(n_q) + 1 + n_kv - n_q, 0, None)
    with np.errstate(divide="ignore"):
        want_lse = np.log(seen)
    for o, lse in (
        forward(q, k, v, causal=True),
        online_softmax(q, k, v, block_q=4, block_kv=4, causal=True, deferred=deferred),
    ):
        close(o[0, 0, :, 0], np.where(seen > 0, (seen - 1) / 2, 0))
        close(lse[0, 0], want_lse)
    dq, dk, dv = backward(q, k, v, *forward(q, k, v, causal=True), np.ones((1, 1, n_q, 1)), causal=True)
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))
    close(dv.sum(), np.asarray(float((seen > 0).sum())))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_rounding_is_to_the_nearest_with_ties_to_even(seed: int) -> None:
    """Random bit patterns reach every exponent. fp16 is compared with numpy's, bf16 with its two neighbours."""
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 2**32, 400, dtype=np.uint32).view(np.float32)
    around_fp16 = np.ldexp(1 + rng.integers(0, 8192, 800) / 8192, rng.integers(-28, 17, 800)).astype(np.float32)
    x = np.concatenate([any_bits, around_fp16])
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(round_fp16(x), x.astype(np.float16).astype(np.float32))
    x = x[np.isfinite(x)]
    x = x[np.abs(x) < 3.3e38]
    bits = x.view(np.uint32)
    below = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    above = ((bits & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32).astype(np.float64)
    odd = (bits >> 16) & 1
    to_below, to_above = np.abs(x - below), np.abs(above - x)
    want = np.where((to_below < to_above) | ((to_below == to_above) & (odd == 0)), below, above)
    np.testing.assert_array_equal(round_bf16(x), want)


@pytest.mark.parametrize("rounding", [round_bf16, round_fp16])
def test_rounding_keeps_special_values_shape_and_sign(rounding: Any) -> None:
    kept = np.array([[0.0, -0.0, np.inf], [-np.inf, 1.5, -2.0]], np.float32)
    out = rounding(kept)
    assert (out.dtype, out.shape) == (np.float32, (2, 3))
    np.testing.assert_array_equal(out.view(np.uint32), kept.view(np.uint32))
    low_bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(rounding(low_bits)).all(), "a NaN whose payload lies in the dropped bits stays a NaN"
    assert rounding(3.0).shape == ()
    np.testing.assert_array_equal(rounding(out), out)


def test_rounding_at_the_edges() -> None:
    close(round_bf16([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]), np.array([1, 1 + 2**-6, 1 + 2**-7]), 0)
    assert round_bf16(np.finfo(np.float32).max) == np.inf
    close(round_fp16([65519.0, 2**-25, 3 * 2**-25, 2**-25 * 1.001]), np.array([65504, 0, 2**-23, 2**-24]), 0)
    np.testing.assert_array_equal(round_fp16([65520.0, -65520.0, 1e39]), [np.inf, -np.inf, np.inf])


X: Array = np.zeros((1, 2, 3, 4))
TWO: Array = np.zeros((2, 2, 3, 4))
FOUR_AXES = "it must be (batch, heads, rows, head_dim), none of them 0"


@pytest.mark.parametrize(
    ("q", "k", "v", "sentence"),
    [
        (X[0], X, X, f"Q has the shape (2, 3, 4); {FOUR_AXES}: reshape Q"),
        (X, X[:, :, :0], X, f"K has the shape (1, 2, 0, 4); {FOUR_AXES}: reshape K"),
        (X, X, TWO, "Q, K and V have the batches (1, 1, 2); they must be equal: change the first axis"),
        (X, X, X[:, :, :2], "K has (heads, rows) (2, 3), V has (2, 2); they must be equal: change K or V"),
        (X, X[..., :3], X, "Q has head_dim 4 and K has 3; they must be equal: change Q or K"),
        (
            X,
            np.zeros((1, 3, 3, 4)),
            np.zeros((1, 3, 3, 4)),
            "Q has 2 heads and K has 3; heads_q must be a multiple of heads_kv: change either",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q: Array, k: Array, v: Array, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        forward(q, k, v)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        online_softmax(q, k, v, block_kv=2)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        backward(q, k, v, X, X[..., 0], X)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"o": X[:, :, :2]}, "O has the shape (1, 2, 2, 4); with this Q and V it must be (1, 2, 3, 4): change O"),
        ({"do": X[0]}, "dO has the shape (2, 3, 4); with this Q and V it must be (1, 2, 3, 4): change dO"),
        ({"lse": X}, "LSE has the shape (1, 2, 3, 4); with this Q and V it must be (1, 2, 3): change LSE"),
    ],
)
def test_backward_refuses_foreign_results(change: dict[str, Array], sentence: str) -> None:
    results: dict[str, Any] = {"o": X, "lse": X[..., 0], "do": X, **change}
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        backward(X, X, X, **results)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block_kv": 0}, "block_kv is 0; it must be at least 1: change block_kv"),
        ({"block_kv": 2, "block_q": 0}, "block_q is 0; it must be at least 1: change block_q"),
        (
            {"block_kv": 2, "order": [0, 0]},
            "order is [0, 0]; it must name each of the 2 K/V blocks of 2 keys once: change order or block_kv",
        ),
    ],
)
def test_online_softmax_refuses_bad_blocks(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        online_softmax(X, X, X, **change)
