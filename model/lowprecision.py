"""The low-precision arithmetic of FA3 (FP8) and FA4 (exp2 by polynomial, rescaling only when it matters), in numpy.

Shapes and masks are those of reference.py, and what is refused there is refused here. Arrays come back as float32 that
holds the values of the narrower format; matmuls multiply such values and accumulate in float32, as the papers' tensor
cores do (the order of the sum is numpy's; the shorter accumulators of Hopper's FP8 matmuls are not modelled).

FA3: arXiv 2407.08608, section 3.3 (method), section 4.3 and table 3 (errors). FA4: arXiv 2603.05451, table 2 (exp2). "Code" is
Dao-AILab/flash-attention at the revision named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from .reference import _blocks, _checked, _finite, _or_one, _repeat_heads, _scale, round_fp16

Array = NDArray[Any]

E4M3_LARGEST = 448.0
LOG2_E = 1.4426950408889634
WARP_ROWS = 32  # FA4: one thread a row of scores

FLOAT32_MANTISSA_BITS = 23
WHOLE_NUMBERS = 1.5 * 2.0**23  # float32s around this value are one apart, so that adding it leaves no fraction
EXP2_CLAMP = -127.0
EXP2_END = 128.0

#: Coefficients of 2^x on [0, 1), constant term first and exactly 1: found by the authors with Sollya's fpminimax
#: (relative error, float32 digits), code 0251105a, flash_attn/cute/utils.py. The paper prints degree 3 to four digits.
#: The best real coefficients with that constant term are off by 8.56e-5, 2.90e-6 and 8.23e-8 (degree 3, 4, 5).
EXP2_POLYNOMIALS: Mapping[int, tuple[float, ...]] = MappingProxyType(
    {
        3: (1.0, 0.6951461434364319, 0.22756439447402954, 0.07711908966302872),
        4: (1.0, 0.6930426955223083, 0.24129125475883484, 0.05222535878419876, 0.01343493815511465),
        5: (1.0, 0.6931514143943787, 0.24016360938549042, 0.05580218881368637, 0.009014522656798363, 0.0018681015353649855),
    }
)

LARGEST_THRESHOLD_LOG2 = 64.0  # leaves 2^63 of float32's range to the row sum and O


def round_e4m3(x: ArrayLike) -> Array:
    """``x`` (taken as float32) rounded to the nearest FP8 e4m3, ties to even, as float32 of the same shape.

    3 bits of mantissa; below 2^-6 whole multiples of 2^-9; no infinity: what is larger than 448 becomes 448, as the
    conversions of the GPUs do (PTX cvt.satfinite). A NaN stays a NaN.
    """
    with np.errstate(over="ignore"):
        values = np.clip(np.asarray(x, np.float32), -E4M3_LARGEST, E4M3_LARGEST)
    return np.asarray(values.astype(ml_dtypes.float8_e4m3fn), np.float32)


def quantise_e4m3(x: ArrayLike, *, block_rows: int | None = None) -> tuple[Array, Array]:
    """(values, scale) with x ~ values * scale: e4m3 values, and the scales that make the largest |x| of each 448.

    ``x`` is (batch, heads, rows, head_dim). One scale for each block of ``block_rows`` x head_dim of every head (FA3
    section 3.3), or one for the whole tensor (None). ``scale`` broadcasts against the values. A block of zeros has
    scale 1. Raises ValueError for block_rows below 1.
    """
    values = np.asarray(x, np.float32)
    if block_rows is None:
        largest = np.abs(values).max(keepdims=True)
    else:
        _at_least_one(block_rows=block_rows)
        starts = np.arange(0, values.shape[-2], block_rows)
        of_blocks = np.maximum.reduceat(np.abs(values).max(axis=-1, keepdims=True), starts, axis=-2)
        largest = np.repeat(of_blocks, block_rows, axis=-2)[..., : values.shape[-2], :]
    scale = np.where(largest > 0, largest, E4M3_LARGEST).astype(np.float32) / np.float32(E4M3_LARGEST)
    return round_e4m3(values / scale), scale


def hadamard(x: ArrayLike) -> Array:
    """The last axis (a power of two, d) times the d x d Hadamard matrix over sqrt(d): d log2(d) additions a row.

    The matrix is symmetric and orthogonal, so that a second application undoes the first. Raises ValueError for other d.
    """
    out = np.asarray(x)
    d = out.shape[-1]
    if d < 1 or d & (d - 1):
        raise ValueError(f"the last axis has {d} entries; a Hadamard transform needs a power of two: pad or change head_dim")
    half = 1
    while half < d:
        pairs = out.reshape(*out.shape[:-1], d // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack([a + b, a - b], axis=-2).reshape(out.shape)
        half *= 2
    return np.asarray(out / np.sqrt(d), out.dtype if out.dtype.kind == "f" else np.float64)


def random_signs(d: int, *, seed: int) -> Array:
    """d random signs, +1 or -1: the diagonal of incoherent processing."""
    return 2 * np.random.default_rng(seed).integers(0, 2, d).astype(np.float32) - 1


def incoherent(x: ArrayLike, signs: Array) -> Array:
    """Q or K times a random orthogonal matrix, diag(signs) times Hadamard: outliers spread over the head dimension.

    (Q M)(K M)^T = Q K^T, so scores do not change but for rounding. FA3 section 3.3 (after QuIP). Raises ValueError
    where the last axis is no power of two or has not one entry a sign.
    """
    values = np.asarray(x)
    if values.shape[-1:] != np.shape(signs):
        raise ValueError(
            f"there are {np.size(signs)} signs for a last axis of {values.shape[-1]}; there must be one an entry: change signs"
        )
    return hadamard(values * signs)


def standard_fp16(q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = False, scale: float | None = None) -> Array:
    """O of softmax(Q K^T scale) V whose every step leaves fp16, and whose matmuls accumulate in float32.

    The "baseline FP16" of FA3 table 3: Q K^T, its scaled values, P and O are each rounded, as an op a step in PyTorch
    leaves them. On the paper's inputs, scaling Q instead (as the authors' tests do) errs 11 % less, scaling inside the
    first matmul 16 % less.
    """
    q, k, v = _prepared(q, k, v, round_fp16)
    s = round_fp16(round_fp16(q @ k.swapaxes(-1, -2)) * np.float32(_scale(q, scale)))
    return round_fp16(_softmax_fp16(s, causal=causal) @ v)


def standard_fp8(q: ArrayLike, k: ArrayLike, v: ArrayLike, *, causal: bool = False, scale: float | None = None) -> Array:
    """O of standard attention with e4m3 operands, one scale a tensor, S and P kept in fp16 between the matmuls, O in fp16.

    The "baseline FP8" of FA3 table 3 ("per-tensor scaling, with matmul accumulator in FP32 and intermediate softmax
    results kept in FP16"). P is normalised, and is quantised with a scale of its own for the second matmul; left in
    fp16 there, it changes the error on the paper's inputs by 1 %.
    """
    q, k, v = _prepared(q, k, v, _quantised)
    s = round_fp16(q @ k.swapaxes(-1, -2) * np.float32(_scale(q, scale)))
    return round_fp16(_quantised(_softmax_fp16(s, causal=causal)) @ v)


def flash_fp16(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, block_kv: int = 128, causal: bool = False, scale: float | None = None
) -> tuple[Array, Array]:
    """(O, LSE) of FA2 and FA3 with fp16 inputs: softmax in float32, P rounded to fp16 for the second matmul, O in fp16."""
    q, k, v = _prepared(q, k, v, round_fp16)
    out = _walk(q, k, v, block_kv=block_kv, causal=causal, scale=scale, operand=round_fp16)
    return round_fp16(out.o), out.lse


def flash_fp8(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block_q: int = 128,
    block_kv: int = 256,
    block_scales: bool = True,
    signs: Array | None = None,
    offset_log2: float = 8.0,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Array, Array]:
    """(O, LSE) of FA3's FP8 forward: e4m3 operands in both matmuls, softmax and accumulators in float32, O in fp16.

    ``block_scales``: one scale for each block of block_q or block_kv rows; otherwise one a tensor ("no block quant").
    ``signs``: the diagonal of incoherent processing (None: "no incoherent processing"). Default tiles are those of the
    first FP8 kernel published (head_dim 128, code 5018ac6a).

    P needs no scale to be measured: with the running maximum subtracted it lies in (0, 1]. ``offset_log2`` multiplies
    it by a power of two, undone by the row sum. 0, as in the code public when the paper appeared (16-bit only), loses
    what is below 2^-10 to zero; 8, since the first FP8 code (bd650598, 2024-07-30; FA4 too), loses what is below 2^-18,
    and is the largest whole offset that keeps P's largest value, 2^8, below 448: FP8 has no room for a rescale
    threshold. The row sum adds P as it was before rounding, as the code does.
    """
    _at_least_one(block_q=block_q, block_kv=block_kv)
    q, k, v = _checked(q, k, v)
    if signs is not None:
        q, k = incoherent(q, signs), incoherent(k, signs)
    rows = (block_q, block_kv, block_kv) if block_scales else (None, None, None)
    q, k, v = (_quantised(x, block_rows=size) for x, size in zip((q, k, v), rows, strict=True))
    out = _walk(q, k, v, block_kv=block_kv, causal=causal, scale=scale, operand=round_e4m3, offset_log2=offset_log2)
    return round_fp16(out.o), out.lse


def exp2_emulated(x: ArrayLike, *, degree: int = 3) -> Array:
    """2^x in float32 without the special function unit, as FA4 does for part of a row's scores.

    Cody-Waite: x (at least -127) = whole + fraction, the whole number left in the low bits by adding 1.5 * 2^23 and
    rounding down; 2^fraction by a polynomial (Horner, fused multiply-adds) of ``degree`` 3, 4 or 5; the whole number
    shifted and added into the exponent field. 0 at -127 and below (a NaN counts as -127, as in the GPU's maximum);
    between -127 and -126 the bits are a subnormal's, short by up to 2^-127. Raises ValueError for 128 and more, where
    the exponent overflows, and for another degree. Code 0251105a, flash_attn/cute/utils.py (ex2_emulation).
    """
    if degree not in EXP2_POLYNOMIALS:
        raise ValueError(f"degree is {degree}; it must be one of {', '.join(map(str, EXP2_POLYNOMIALS))}: change degree")
    clamped = np.fmax(np.asarray(x, np.float32), np.float32(EXP2_CLAMP))
    if (clamped >= EXP2_END).any():
        raise ValueError(f"x has {clamped.max()}; 2^x is emulated below {EXP2_END:g}: subtract the row maximum first")
    rounded = np.floor(clamped) + np.float32(WHOLE_NUMBERS)
    fraction = clamped - (rounded - np.float32(WHOLE_NUMBERS))
    *lower, top = EXP2_POLYNOMIALS[degree]
    power = np.full_like(fraction, top)
    for coefficient in reversed(lower):
        power = _fused_multiply_add(power, fraction, coefficient)
    whole = rounded.view(np.int32) << FLOAT32_MANTISSA_BITS  # only the 9 lowest bits stay: the whole number, signed
    out: Array = np.asarray(whole + power.view(np.int32), np.int32).view(np.float32)
    return out


@dataclass(frozen=True, kw_only=True)
class OnlineSoftmax:
    """What a walk over the K/V blocks left: O and LSE in float32, and how often warps rescaled O.

    ``votes`` counts warps times blocks, the first block left out (its O is written, not added to); ``rescales`` are
    the votes in which the row maximum of at least one of the warp's rows had moved (or was still that of no key at all:
    the kernel cannot tell).
    """

    o: Array
    lse: Array
    rescales: int
    votes: int

    @property
    def rescale_rate(self) -> float:
        """Rescales a warp and block after the first; 0 where there is one block."""
        return self.rescales / self.votes if self.votes else 0.0


def conditional_rescale(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    block_kv: int = 128,
    threshold_log2: float = 8.0,
    warp_rows: int = WARP_ROWS,
    causal: bool = False,
    descending: bool = False,
    scale: float | None = None,
) -> OnlineSoftmax:
    """FA4's online softmax in float32: a row keeps its stale maximum until the true one exceeds it by the threshold.

    A stale maximum is as good as any (numerator and row sum share it), so O and LSE do not change but for rounding; P
    may reach 2^threshold. A row whose maximum moves has its O scaled; the multiply is skipped where no row of the
    warp (``warp_rows`` consecutive queries; 128 asks for a tile) needs it. Threshold 0 is the plain recurrence.
    ``descending``: from the last K/V block to the first, as FA4's kernel walks. Raises ValueError for a threshold
    outside [0, 64], block_kv or warp_rows below 1. Code 0251105a, flash_attn/cute/softmax.py (update_row_max) and
    flash_fwd_sm100.py (the correction warps' vote).
    """
    if not 0 <= threshold_log2 <= LARGEST_THRESHOLD_LOG2:
        raise ValueError(
            f"threshold_log2 is {threshold_log2:g}; it must lie between 0 and {LARGEST_THRESHOLD_LOG2:g}, since P reaches"
            " 2^threshold in float32: change threshold_log2"
        )
    _at_least_one(warp_rows=warp_rows)
    q, k, v = _checked(q, k, v)
    return _walk(
        q,
        k,
        v,
        block_kv=block_kv,
        causal=causal,
        scale=scale,
        descending=descending,
        threshold_log2=threshold_log2,
        warp_rows=warp_rows,
    )


def _walk(
    q: Array,
    k: Array,
    v: Array,
    *,
    block_kv: int,
    causal: bool,
    scale: float | None,
    operand: Callable[[Array], Array] = np.asarray,
    offset_log2: float = 0.0,
    threshold_log2: float = 0.0,
    warp_rows: int = WARP_ROWS,
    descending: bool = False,
) -> OnlineSoftmax:
    """The online softmax of every kernel here; ``operand`` rounds P for the second matmul."""
    _at_least_one(block_kv=block_kv)
    q, k, v = (np.asarray(x, np.float32) for x in (q, _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])))
    blocks = _blocks(k.shape[2], block_kv)[:: -1 if descending else 1]
    factor = np.float32(_scale(q, scale) * LOG2_E)
    m, total = np.full(q.shape[:-1], -np.inf, np.float32), np.zeros(q.shape[:-1], np.float32)
    o = np.zeros((*q.shape[:-1], v.shape[-1]), np.float32)
    rescales = 0
    for j, block in enumerate(blocks):
        s = _hide(factor * (q @ k[:, :, block].swapaxes(-1, -2)), block, keys=k.shape[2], causal=causal)
        top = np.maximum(m, s.max(axis=-1))
        growth = _finite(top) - m  # infinite for a row that has seen no key before
        stale = growth <= threshold_log2
        m, old = np.where(stale, m, top), np.where(stale, np.float32(1), np.exp2(-growth))
        if j > 0:
            rescales += _warps_with_any(old < 1, warp_rows)
        p = np.exp2(s - _finite(m)[..., None] + np.float32(offset_log2))
        total = old * total + p.sum(axis=-1)
        o = old[..., None] * o + operand(p) @ v[:, :, block]
    with np.errstate(divide="ignore"):
        lse = (m + np.log2(total) - np.float32(offset_log2)) / np.float32(LOG2_E)
    warps = q.shape[0] * q.shape[1] * -(-q.shape[2] // warp_rows)
    return OnlineSoftmax(o=o / _or_one(total)[..., None], lse=lse, rescales=rescales, votes=warps * (len(blocks) - 1))


def _warps_with_any(rows: Array, warp_rows: int) -> int:
    """In how many groups of ``warp_rows`` consecutive rows at least one row is true."""
    starts = np.arange(0, rows.shape[-1], warp_rows)
    return int(np.logical_or.reduceat(rows, starts, axis=-1).sum())


def _hide(s: Array, block: slice, *, keys: int, causal: bool) -> Array:
    """Scores of one block of keys, with -inf where the causal mask hides a key."""
    if causal:
        rows = s.shape[-2]
        s[..., np.arange(block.start, block.stop)[None, :] > np.arange(rows)[:, None] + keys - rows] = -np.inf
    return s


def _softmax_fp16(s: Array, *, causal: bool) -> Array:
    """The whole P, rounded to fp16, of scores in fp16."""
    keys = s.shape[-1]
    s = _hide(s, slice(0, keys), keys=keys, causal=causal)
    p = np.exp(s - _finite(s.max(axis=-1))[..., None])
    return round_fp16(p / _or_one(p.sum(axis=-1))[..., None])


def _prepared(q: ArrayLike, k: ArrayLike, v: ArrayLike, rounding: Callable[[Array], Array]) -> tuple[Array, Array, Array]:
    """Q, K and V checked and rounded, K and V repeated for their query heads."""
    q, k, v = _checked(q, k, v)
    return rounding(q), _repeat_heads(rounding(k), q.shape[1]), _repeat_heads(rounding(v), q.shape[1])


def _quantised(x: Array, block_rows: int | None = None) -> Array:
    """The numbers that e4m3 values and their scales stand for. (The scales multiply operands here, results on a GPU.)"""
    values, scale = quantise_e4m3(x, block_rows=block_rows)
    return np.asarray(values * scale)


def _fused_multiply_add(a: Array, b: Array, c: float) -> Array:
    """a b + c rounded once to float32 (the product is exact in float64; a tie of the last rounding may go astray)."""
    return np.asarray(a.astype(np.float64) * b + c, np.float32)


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1: change {name}")
