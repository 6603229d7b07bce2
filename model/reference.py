"""Exact attention in float64: what every schedule's numbers are compared with.

Shapes: Q (batch, heads_q, seqlen_q, d), K (batch, heads_kv, seqlen_kv, d), V (batch, heads_kv, seqlen_kv, d_v), O
and dO (batch, heads_q, seqlen_q, d_v), LSE (batch, heads_q, seqlen_q). heads_q / heads_kv query heads share a K/V
head. Causal is aligned bottom-right: query i sees the keys j <= i + seqlen_kv - seqlen_q; a row that sees no key
gives O = 0 and LSE = -inf. ``scale`` is 1 / sqrt(d) unless given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

BF16_DROPPED_BITS = 16  # of float32's 23 bits of mantissa, bf16 keeps 7
FP16_DROPPED_BITS = 13  # fp16 keeps 10
FP16_LEAST_NORMAL = 2.0**-14
FP16_LARGEST = 65504.0
FLOAT32_EXPONENT = 0x7F800000
FLOAT32_QUIET_NAN = 0x00400000


def forward(q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = False, scale: float | None = None) -> tuple[Array, Array]:
    """(O, LSE) of softmax(scale Q K^T) V, in float64, with the whole row of scores at hand.

    LSE is the natural logarithm of a row's sum of exp(scale q.k). Raises ValueError where the shapes do not fit.
    """
    q, k, v = _checked(q, k, v)
    s = _scores(q, k, causal=causal, scale=scale)
    m = _finite(s.max(axis=-1))
    p = np.exp(s - m[..., None])
    total = p.sum(axis=-1)
    return (p @ _repeat_heads(v, q.shape[1])) / _or_one(total)[..., None], _log_sum_exp(m, total)


def backward(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    o: ArrayLike,
    lse: ArrayLike,
    do: ArrayLike,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    """(dQ, dK, dV) in float64 from the forward's O and LSE and the gradient dO: P recomputed, D = rowsum(dO * O).

    dK and dV of a K/V head are summed over its group of query heads. FA2 algorithm 2 (FA1 algorithm 4 with LSE for
    m and l). Raises ValueError where the shapes do not fit.
    """
    q, k, v = _checked(q, k, v)
    o, lse, do = (np.asarray(x, np.float64) for x in (o, lse, do))
    expected = (*q.shape[:-1], v.shape[-1])
    for name, got, want in (("O", o.shape, expected), ("dO", do.shape, expected), ("LSE", lse.shape, q.shape[:-1])):
        if got != want:
            raise ValueError(f"{name} has the shape {got}; with this Q and V it must be {want}: change {name}")
    heads_q, heads_kv = q.shape[1], k.shape[1]
    factor = _scale(q, scale)
    no_key = np.where(np.isneginf(lse), np.inf, lse)  # exp(s - inf) = 0: a row that sees no key has no probabilities
    p = np.exp(_scores(q, k, causal=causal, scale=factor) - no_key[..., None])
    dp = do @ _repeat_heads(v, heads_q).swapaxes(-1, -2)
    ds = p * (dp - (do * o).sum(axis=-1, keepdims=True))
    dq = factor * (ds @ _repeat_heads(k, heads_q))
    dk = _sum_groups(factor * (ds.swapaxes(-1, -2) @ q), heads_kv)
    dv = _sum_groups(p.swapaxes(-1, -2) @ do, heads_kv)
    return dq, dk, dv


def online_softmax(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block_kv: int,
    block_q: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    deferred: bool = True,
    order: Sequence[int] | None = None,
) -> tuple[Array, Array]:
    """(O, LSE) by the papers' recurrence, ``block_q`` queries (None: all) against ``block_kv`` keys a step, in float64.

    ``deferred``: FA2 algorithm 1 (a Q block walks the K/V blocks; O stays unscaled until one divide at the end;
    only LSE leaves). Otherwise FA1 algorithm 1 (a K/V block walks the Q blocks; O is normalised, and kept with m
    and l, each step). ``order`` is that of the K/V blocks (None: ascending). Block sizes and order change nothing
    but rounding. Raises ValueError for block sizes below 1, an order that does not name each block once, and shapes
    that do not fit.
    """
    q, k, v = _checked(q, k, v)
    for name, size in (("block_q", block_q), ("block_kv", block_kv)):
        if size is not None and size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1: change {name}")
    q_blocks, kv_blocks = _blocks(q.shape[2], block_q or q.shape[2]), _blocks(k.shape[2], block_kv)
    walk = list(range(len(kv_blocks)) if order is None else order)
    if sorted(walk) != list(range(len(kv_blocks))):
        raise ValueError(
            f"order is {walk}; it must name each of the {len(kv_blocks)} K/V blocks of {block_kv} keys once:"
            " change order or block_kv"
        )
    s = _scores(q, k, causal=causal, scale=scale)
    values = _repeat_heads(v, q.shape[1])
    m, total = np.full(q.shape[:-1], -np.inf), np.zeros(q.shape[:-1])
    o = np.zeros((*q.shape[:-1], v.shape[-1]))
    if deferred:
        step, pairs = _deferred_step, [(i, j) for i in q_blocks for j in walk]
    else:
        step, pairs = _normalised_step, [(i, j) for j in walk for i in q_blocks]
    for rows, j in pairs:
        block, at = kv_blocks[j], np.s_[:, :, rows]
        o[at], m[at], total[at] = step(s[:, :, rows, block], values[:, :, block], o[at], m[at], total[at])
    if deferred:
        o /= _or_one(total)[..., None]
    return o, _log_sum_exp(_finite(m), total)


def round_bf16(x: ArrayLike) -> Array:
    """``x`` (taken as float32) rounded to the nearest bf16, ties to even, returned as float32 of the same shape.

    bf16 has float32's exponent and 7 bits of mantissa, so rounding is integer arithmetic on the upper half of the
    bits. Values past the largest finite bf16 become infinite, subnormals stay subnormal, a NaN stays a (quiet) NaN.
    """
    with np.errstate(over="ignore"):
        values = np.asarray(x, np.float32)
    return _round_mantissa(values, BF16_DROPPED_BITS)


def round_fp16(x: ArrayLike) -> Array:
    """``x`` (taken as float32) rounded to the nearest fp16, ties to even, as float32 of the same shape.

    fp16 keeps 10 bits of mantissa and 5 of exponent: 65520 and more become infinite, and below 2^-14 values are
    whole multiples of 2^-24, the spacing of float32 between 1/2 and 1. A NaN stays a (quiet) NaN.
    """
    with np.errstate(over="ignore"):
        values = np.asarray(x, np.float32)
    normal = _round_mantissa(values, FP16_DROPPED_BITS)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        subnormal = (np.abs(values) + np.float32(0.5)) - np.float32(0.5)
    size = np.where(np.abs(values) < FP16_LEAST_NORMAL, subnormal, np.abs(normal))
    out: Array = np.copysign(np.where(size > FP16_LARGEST, np.float32(np.inf), size), values)
    return out


def _round_mantissa(values: Array, dropped: int) -> Array:
    """float32 values with the lowest ``dropped`` bits of mantissa rounded away, nearest, ties to even."""
    bits = values.view(np.uint32)
    lowest_kept = (bits >> np.uint32(dropped)) & np.uint32(1)
    just_below_half = np.uint32((1 << (dropped - 1)) - 1)
    infinite_or_nan = (bits & np.uint32(FLOAT32_EXPONENT)) == FLOAT32_EXPONENT  # adding would carry into the exponent
    quiet = np.where(np.isnan(values), np.uint32(FLOAT32_QUIET_NAN), np.uint32(0))
    rounded = np.where(infinite_or_nan, bits | quiet, bits + just_below_half + lowest_kept)
    out: Array = np.asarray(rounded >> np.uint32(dropped) << np.uint32(dropped), np.uint32).view(np.float32)
    return out


def _deferred_step(s: Array, v: Array, o: Array, m: Array, total: Array) -> tuple[Array, Array, Array]:
    """FA2 algorithm 1, one K/V block: O and the row sums relative to the new row maximum, O not divided."""
    top = np.maximum(m, s.max(axis=-1))
    p = np.exp(s - _finite(top)[..., None])
    old = np.exp(m - _finite(top))
    return old[..., None] * o + p @ v, top, old * total + p.sum(axis=-1)


def _normalised_step(s: Array, v: Array, o: Array, m: Array, total: Array) -> tuple[Array, Array, Array]:
    """FA1 algorithm 1, one K/V block: its own row maxima and sums first, then merged with O, divided by the new sum."""
    block_m = s.max(axis=-1)
    p = np.exp(s - _finite(block_m)[..., None])
    top = np.maximum(m, block_m)
    old, new = np.exp(m - _finite(top)), np.exp(block_m - _finite(top))
    merged = old * total + new * p.sum(axis=-1)
    o = ((old * total)[..., None] * o + new[..., None] * (p @ v)) / _or_one(merged)[..., None]
    return o, top, merged


def _checked(q: ArrayLike, k: ArrayLike, v: ArrayLike) -> tuple[Array, Array, Array]:
    """Q, K and V as float64, or a sentence that says which shape does not fit."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for name, x in (("Q", q), ("K", k), ("V", v)):
        if x.ndim != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has the shape {x.shape}; it must be (batch, heads, rows, head_dim), none of them 0: reshape {name}"
            )
    batches = q.shape[0], k.shape[0], v.shape[0]
    if len(set(batches)) > 1:
        raise ValueError(f"Q, K and V have the batches {batches}; they must be equal: change the first axis")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"K has (heads, rows) {k.shape[1:3]}, V has {v.shape[1:3]}; they must be equal: change K or V")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"Q has head_dim {q.shape[3]} and K has {k.shape[3]}; they must be equal: change Q or K")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"Q has {q.shape[1]} heads and K has {k.shape[1]}; heads_q must be a multiple of heads_kv: change either"
        )
    return q, k, v


def _scale(q: Array, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _scores(q: Array, k: Array, *, causal: bool, scale: float | None) -> Array:
    """scale Q K^T, (batch, heads_q, seqlen_q, seqlen_kv), with -inf where the mask hides a key."""
    s: Array = _scale(q, scale) * (q @ _repeat_heads(k, q.shape[1]).swapaxes(-1, -2))
    if causal:
        rows, cols = s.shape[-2:]
        s[..., np.arange(cols)[None, :] > np.arange(rows)[:, None] + cols - rows] = -np.inf
    return s


def _repeat_heads(x: Array, heads_q: int) -> Array:
    """Each K/V head repeated for its group of query heads."""
    return np.repeat(x, heads_q // x.shape[1], axis=1)


def _sum_groups(x: Array, heads_kv: int) -> Array:
    """Gradients of repeated K/V heads added up to those of the heads they are copies of."""
    batch, heads_q, rows, d = x.shape
    out: Array = x.reshape(batch, heads_kv, heads_q // heads_kv, rows, d).sum(axis=2)
    return out


def _finite(m: Array) -> Array:
    """Row maxima to subtract: 0 for a row that has seen no key, since -inf - -inf is no number."""
    return np.where(np.isneginf(m), 0.0, m)


def _or_one(total: Array) -> Array:
    """Row sums to divide by: 1 for a row that has seen no key, whose O is 0."""
    return np.where(total > 0, total, 1.0)


def _log_sum_exp(m: Array, total: Array) -> Array:
    with np.errstate(divide="ignore"):
        lse: Array = m + np.log(total)
    return lse


def _blocks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
