"""Every schedule, executed in numpy statement by statement, gives the reference's O and LSE; a sentence where it refuses.

Tolerances follow from the formats. ``u`` is the unit roundoff (2^-8 for bf16, 2^-11 for fp16). Inputs are rounded beforehand, so
only P, O and (standard) S lose bits: P's weights sum to one, so P and O cost u max|V| each; S costs exp(2 u max|S|) - 1.
"""

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

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.reference import forward
from flashsim.model.schedule import Schedule
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.values import ROUNDING, run

ALL_GPUS, ALL_SCHEDULES, ALL_OPERANDS = list(GPUS), list(SCHEDULES), list(ROUNDING)
Array = NDArray[Any]

FP32 = 1e-5
ROUNDOFF = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}
SMALLEST_FP16 = 2.0**-25  # half the spacing of subnormals: what a tiny P can lose

#: Fields to draw per schedule; the first choice is the default. A new schedule adds a row (or is run as shipped).
FIELDS: dict[str, dict[str, list[Any]]] = {
    "standard": {"mask_kernel": [None, True], "warps": [4, 1, 8]},
    "fa1": {"block_q": [16, 32], "block_kv": [None, 64, 192], "warps": [4, 2]},
    "fa2": {"block_q": [None, 64], "block_kv": [None, 16, 48], "warps": [None, 2], "counts": ["binary", "ideal"]},
}
LARGEST_HEAD_DIM = {"fa1": 128, "fa2": 256}


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: Schedule
    gpu: str
    attention: Attention
    seed: int
    amplitude: float = 1.0


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    batch, heads_q, heads_kv = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2), (1, 3, 1), (1, 4, 2)]))
    rows = st.one_of(st.integers(1, 70), st.sampled_from([1, 16, 63, 64, 65, 129]))
    dims = st.one_of(st.integers(1, 72), st.sampled_from([64, 96, 128]))
    seqlen_q = draw(rows)
    head_dim = draw(dims)
    attention = Attention(
        batch=batch,
        heads_q=heads_q,
        heads_kv=heads_kv,
        seqlen_q=seqlen_q,
        seqlen_kv=draw(st.one_of(st.just(seqlen_q), rows)),
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.just(head_dim), dims)),
        causal=draw(st.booleans()),
    )
    fields = {field: draw(st.sampled_from(choices)) for field, choices in FIELDS.get(name, {}).items()}
    return Case(
        schedule=get_schedule(name, **fields),
        gpu=draw(st.sampled_from(ALL_GPUS)),
        attention=attention,
        seed=draw(st.integers(0, 2**32 - 1)),
        amplitude=draw(st.sampled_from([1.0, 0.1, 1.5])),
    )


def inputs(case: Case, operands: str) -> tuple[Array, Array, Array]:
    """Q, K and V that ``operands`` holds exactly."""
    a, rng = case.attention, np.random.default_rng(case.seed)
    shapes = (
        (a.batch, a.heads_q, a.seqlen_q, a.head_dim),
        (a.batch, a.heads_kv, a.seqlen_kv, a.head_dim),
        (a.batch, a.heads_kv, a.seqlen_kv, a.head_dim_v),
    )
    q, k, v = (ROUNDING[operands](case.amplitude * rng.standard_normal(shape)) for shape in shapes)
    return q, k, v


def largest_score(q: Array, k: Array) -> float:
    """Largest |scale q.k|, after Cauchy and Schwarz."""
    norms = [np.sqrt((x.astype(np.float64) ** 2).sum(axis=-1)).max() for x in (q, k)]
    return float(norms[0] * norms[1] * q.shape[-1] ** -0.5)


def tolerance(case: Case, operands: str, q: Array, k: Array) -> float:
    """Allowed error of O over max |V|."""
    u, allowed = ROUNDOFF[operands], FP32
    if operands != "fp32":
        allowed += 2 * u * (1 + u)  # P, then O
        allowed += math.expm1(2 * u * largest_score(q, k)) if case.schedule.name == "standard" else 0.0
        allowed += 2 * case.attention.seqlen_kv * SMALLEST_FP16 if operands == "fp16" else 0.0
    return allowed


def check(case: Case, operands: str) -> None:
    """Run the case and hold O and LSE against the reference."""
    q, k, v = inputs(case, operands)
    out = run(case.schedule, load_gpu(case.gpu), case.attention, q, k, v, operands=operands)
    o, lse = forward(q, k, v, causal=case.attention.causal)
    assert out["O"].shape == o.shape
    assert np.isfinite(out["O"]).all(), "O has a NaN: some element was read before it was written, or never written"
    assert np.abs(out["O"] - o).max() <= tolerance(case, operands, q, k) * np.abs(v).max()
    if "LSE" in out:
        seen = np.isfinite(lse)
        assert np.array_equal(np.isneginf(out["LSE"]), ~seen)
        assert (np.abs(out["LSE"][seen] - lse[seen]) <= FP32 * np.maximum(1.0, largest_score(q, k))).all()


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fp32_operands_equal_the_reference(name: str, data: st.DataObject) -> None:
    check(data.draw(cases(name)), "fp32")


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_16_bit_operands_stay_within_their_rounding(name: str, data: st.DataObject) -> None:
    check(data.draw(cases(name)), data.draw(st.sampled_from(["bf16", "fp16"])))


EDGES: dict[str, dict[str, Any]] = {
    "one query": {"seqlen_q": 1, "seqlen_kv": 131},
    "one key": {"seqlen_q": 131, "seqlen_kv": 1},
    "one query, one key": {"seqlen_q": 1, "seqlen_kv": 1},
    "one query, causal": {"seqlen_q": 1, "seqlen_kv": 131, "causal": True},
    "rows that see no key": {"seqlen_q": 277, "seqlen_kv": 9, "causal": True},
    "more keys than queries, causal": {"seqlen_q": 50, "seqlen_kv": 201, "causal": True},
    "one more than a block": {"seqlen_q": 129, "seqlen_kv": 257},
    "whole blocks": {"seqlen_q": 128, "seqlen_kv": 256, "causal": True},
    "one head for all": {"seqlen_q": 65, "heads_q": 4, "heads_kv": 1, "causal": True},
    "head_dim of 1": {"seqlen_q": 70, "head_dim": 1},
    "head_dim between sizes": {"seqlen_q": 70, "head_dim": 37},
    "V wider than K": {"seqlen_q": 70, "head_dim": 24, "head_dim_v": 90},
    "V narrower than K": {"seqlen_q": 70, "head_dim": 90, "head_dim_v": 24},
    "the largest shared head_dim": {"seqlen_q": 33, "head_dim": 128},
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("operands", ALL_OPERANDS)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_edges(name: str, operands: str, edge: str) -> None:
    attention = Attention(**{"batch": 2, "heads_q": 2, "head_dim": 64, **EDGES[edge]})
    check(Case(schedule=get_schedule(name), gpu="a100-40gb", attention=attention, seed=7), operands)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_scores_that_overflow_a_bare_exponential(name: str) -> None:
    """Scores of some 10,000: exp of them is infinite in fp32, so only the shift by the running maximum keeps O finite."""
    attention = Attention(batch=1, heads_q=1, seqlen_q=130, seqlen_kv=300, head_dim=64, causal=True)
    case = Case(schedule=get_schedule(name), gpu="h200", attention=attention, seed=3, amplitude=50.0)
    q, k, v = inputs(case, "fp32")
    assert largest_score(q, k) > 10_000
    out = run(case.schedule, load_gpu("h200"), attention, q, k, v, operands="fp32")["O"]
    o, _ = forward(q, k, v, causal=True)
    # a score keeps 24 bits, so weights err by exp(2^-22 score): 2^-22 * 30,000 = 0.7 % at most
    assert np.abs(out - o).max() <= 2.0**-22 * largest_score(q, k) * 2 * np.abs(v).max()


@pytest.mark.parametrize("gpu", ALL_GPUS)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_numbers_are_the_same_on_every_chip(name: str, gpu: str) -> None:
    attention = Attention(batch=1, heads_q=2, seqlen_q=90, seqlen_kv=77, head_dim=48, causal=True)
    check(Case(schedule=get_schedule(name), gpu=gpu, attention=attention, seed=11), "bf16")


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_rounding_shows(name: str) -> None:
    """The tolerance is not idle: bf16 operands move O further from the reference than fp32 ones may."""
    attention = Attention(batch=1, heads_q=1, seqlen_q=64, head_dim=64)
    case = Case(schedule=get_schedule(name), gpu="h200", attention=attention, seed=5)
    q, k, v = inputs(case, "bf16")
    o, _ = forward(q, k, v)
    errors = {}
    for operands in ALL_OPERANDS:
        out = run(case.schedule, load_gpu("h200"), attention, q, k, v, operands=operands)["O"]
        errors[operands] = np.abs(out - o).max() / np.abs(v).max()
    assert errors["fp32"] < FP32 < errors["fp16"] < errors["bf16"]


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_operands_default_to_the_dtype_of_the_problem(name: str) -> None:
    shape: dict[str, Any] = {"batch": 1, "heads_q": 1, "seqlen_q": 40, "head_dim": 32}
    for dtype in ("bf16", "fp16"):
        attention = Attention(dtype=dtype, **shape)
        case = Case(schedule=get_schedule(name), gpu="h200", attention=attention, seed=5)
        q, k, v = inputs(case, dtype)
        own = run(case.schedule, load_gpu("h200"), attention, q, k, v)["O"]
        named = run(case.schedule, load_gpu("h200"), attention, q, k, v, operands=dtype)["O"]
        assert np.array_equal(own, named)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "fp32"}, "{name} runs bf16 or fp16, got dtype 'fp32': change dtype"),
    ({"dtype": "fp8"}, "{name} runs bf16 or fp16, got dtype 'fp8': change dtype"),
    ({"pass_": "bwd"}, "{name} has a forward schedule only, got pass 'bwd': choose --pass fwd"),
    ({"pass_": "fwd+bwd"}, "{name} has a forward schedule only, got pass 'fwd+bwd': choose --pass fwd"),
]


@pytest.mark.parametrize(("changed", "sentence"), REFUSED)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_refusals_are_sentences(name: str, changed: dict[str, Any], sentence: str) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=8, head_dim=16, **changed)
    x = np.zeros((1, 1, 8, 16))
    with pytest.raises(ValueError, match=f"^{re.escape(sentence.format(name=name))}$"):
        run(get_schedule(name), load_gpu("h200"), attention, x, x, x, operands="fp32")


@pytest.mark.parametrize("side", ["head_dim", "head_dim_v"])
@pytest.mark.parametrize("name", list(LARGEST_HEAD_DIM))
def test_a_head_dim_that_no_tile_holds_is_refused(name: str, side: str) -> None:
    largest = LARGEST_HEAD_DIM[name]
    fields = {"head_dim": 16, "head_dim_v": 16, side: largest + 1}
    attention = Attention(batch=1, heads_q=1, seqlen_q=8, **fields)
    expected = f"{name} has no tile for head_dim {largest + 1}; the largest is {largest}: reduce head_dim"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        get_schedule(name).lower(load_gpu("a100-40gb"), attention)
