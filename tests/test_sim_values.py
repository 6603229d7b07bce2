"""Every schedule, executed in numpy statement by statement, gives the reference's O and LSE; a sentence where it refuses.

Tolerances follow from the formats. ``u`` is the unit roundoff (2^-8 for bf16, 2^-11 for fp16, 2^-4 for FP8's e4m3). Inputs are
rounded beforehand, so only P, O and (standard) S lose bits: P's weights sum to one, so P and O cost u max|V| each; S costs
exp(2 u max|S|) - 1. FP8 keeps P times 2^8 in e4m3 and O in bf16: (2^-4 + 2^-18 keys) max|V| for P (a tiny P loses half of e4m3's
smallest number, over 2^8) and 2^-8 max|V| for O. Exponentials by polynomial (fa4) err by 8.8e-5 each, above and below the line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_inputs import Array, normal

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPU, GPUS, load_gpu
from flashsim.model.lowprecision import flash_fp8, quantise_e4m3
from flashsim.model.program import Program
from flashsim.model.reference import forward
from flashsim.model.schedule import Schedule
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.values import FORMATS, run

ALL_GPUS, ALL_SCHEDULES, ALL_OPERANDS = list(GPUS), list(SCHEDULES), ["bf16", "fp16", "fp32"]

FP32 = 1e-5
ROUNDOFF = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}
SMALLEST = {"fp32": 0.0, "bf16": 0.0, "fp16": 2.0**-25, "fp8": 2.0**-18}  # what a tiny P can lose: half the spacing of subnormals
EMULATED_EXP2 = {"fa4": 8.8e-5}  # largest relative error of the polynomial of degree 3

#: Fields to draw per schedule; the first choice is the default. A new schedule adds a row (or is run as shipped).
FIELDS: dict[str, dict[str, list[Any]]] = {
    "standard": {"mask_kernel": [None, True], "warps": [4, 1, 8], "layout": ["heads", "rows"], "counts": ["binary", "ideal"]},
    "fa1": {"block_q": [16, 32], "block_kv": [None, 64, 192], "warps": [4, 2], "layout": ["packed", "separate"]},
    "fa2": {
        "block_q": [None, 64],
        "block_kv": [None, 16, 48, 64, 192],
        "warps": [None, 2],
        "split": ["q", "k"],
        "sequence_parallel": [True, False],
        "deferred_divide": [True, False],
        "counts": ["binary", "ideal"],
    },
    "fa3": {
        "block_q": [None, 64, 128, 192],
        "block_kv": [None, 32, 96, 160],
        "stages": [2, 3, 4],
        "pingpong": [None, True, False],
        "intra_overlap": [True, False],
        "cluster": [None, 1, 2],
        "counts": ["binary", "ideal"],
    },
    "fa4": {
        "block_kv": [128, 32, 96],
        "q_stages": [None, 1, 2],
        "cta_pair": [None, False],
        "exp2_emulation": [None, 0.0, 0.5],
        "counts": ["binary", "ideal"],
    },
    "triton": {"block_kv": [None, 32, 64], "num_warps": [None, 4], "num_stages": [None, 2, 4], "counts": ["typical", "ideal"]},
}
WIDE = {"fa3": [192, 256]}  # head dimensions for which every choice of fields has a tile
LARGEST_HEAD_DIM = {"fa1": 128, "fa2": 256, "fa3": 256, "triton": 128, "gluon": 128}
DTYPES = dict.fromkeys(("fa3", "fa4", "gluon"), ("bf16", "fp16", "fp8"))  # bf16 and fp16 otherwise
FP8_SCHEDULES = [name for name in ALL_SCHEDULES if "fp8" in DTYPES.get(name, ())]


NEEDS = {"fa3": "wgmma", "fa4": "tcgen05", "gluon": "tcgen05"}


def gpus_of(name: str) -> list[str]:
    """The chips that have what a schedule needs."""
    return [gpu for gpu in ALL_GPUS if name not in NEEDS or getattr(load_gpu(gpu), NEEDS[name])]


def home(name: str) -> str:
    """The chip to run a schedule on where any will do."""
    return "h200" if "h200" in gpus_of(name) else gpus_of(name)[0]


@dataclass(frozen=True, kw_only=True)
class Case:
    schedule: Schedule
    gpu: str
    attention: Attention
    seed: int
    amplitude: float = 1.0
    order: int | None = None  # in which roles go on: random, or in turn


@st.composite
def cases(draw: st.DrawFn, name: str, dtype: str = "bf16") -> Case:
    batch, heads_q, heads_kv = draw(st.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2), (1, 3, 1), (1, 4, 2)]))
    rows = st.one_of(st.integers(1, 70), st.sampled_from([1, 16, 63, 64, 65, 129]))
    dims = st.one_of(st.integers(1, 72), st.sampled_from([32, 64, 96, 128, *WIDE.get(name, [])]))
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
        dtype=dtype,
    )
    fields = {field: draw(st.sampled_from(choices)) for field, choices in FIELDS.get(name, {}).items()}
    if fields.get("cluster") == 2:  # two Q blocks that need the same K/V blocks
        fields["block_q"] = 64
        attention = replace(attention, causal=False, seqlen_q=64 + draw(st.integers(1, 64)))
    if name == "fa3" and (fields["block_q"] == 192 or (fields["block_kv"] == 160 and max(head_dim, attention.head_dim_v) > 192)):
        fields["block_kv"] = 32  # what three warpgroups, or O of wide heads, leave in registers for S and P
    if fields.get("split") == "k":
        if fields["block_kv"] in (16, 48):  # fewer keys than four warps share
            fields["block_kv"] = None
        if max(attention.head_dim, attention.head_dim_v) > 64:  # four partial sums of 64 rows do not fit in shared memory
            fields["block_q"] = None
    return Case(
        schedule=get_schedule(name, **fields),
        gpu=draw(st.sampled_from(gpus_of(name))),
        attention=attention,
        seed=draw(st.integers(0, 2**32 - 1)),
        amplitude=draw(st.sampled_from([1.0, 0.1, 1.5])),
        order=draw(st.one_of(st.none(), st.integers(0, 99))),
    )


def inputs(case: Case, operands: str) -> tuple[Array, Array, Array]:
    """Q, K and V that ``operands`` holds exactly."""
    a, rng = case.attention, np.random.default_rng(case.seed)
    shapes = (
        (a.batch, a.heads_q, a.seqlen_q, a.head_dim),
        (a.batch, a.heads_kv, a.seqlen_kv, a.head_dim),
        (a.batch, a.heads_kv, a.seqlen_kv, a.head_dim_v),
    )
    q, k, v = (held(case.amplitude * rng.standard_normal(shape), operands) for shape in shapes)
    return q, k, v


def held(x: Array, operands: str) -> Array:
    """What ``operands`` makes of ``x``; in FP8, e4m3 values times the scale of the tensor."""
    if operands == "fp8":
        values, scale = quantise_e4m3(x)
        return np.asarray(values * scale)
    return np.asarray(FORMATS[operands].operand(x))


def largest_score(q: Array, k: Array) -> float:
    """Largest |scale q.k|, after Cauchy and Schwarz."""
    norms = [np.sqrt((x.astype(np.float64) ** 2).sum(axis=-1)).max() for x in (q, k)]
    return float(norms[0] * norms[1] * q.shape[-1] ** -0.5)


def tolerance(case: Case, operands: str, q: Array, k: Array) -> float:
    """Allowed error of O over max |V|."""
    u, allowed = ROUNDOFF[operands], FP32 + 2 * EMULATED_EXP2.get(case.schedule.name, 0.0)
    if operands != "fp32":
        of_p = u + case.attention.seqlen_kv * SMALLEST[operands]
        of_o = ROUNDOFF["bf16"] if operands == "fp8" else u
        allowed += of_p + of_o * (1 + of_p)
        allowed += math.expm1(2 * u * largest_score(q, k)) if case.schedule.name == "standard" else 0.0
    return allowed


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A schedule that has been lowered, so that several runs need not."""

    name: str
    programs: tuple[Program, ...]

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        return self.programs


def check(case: Case, *formats: str) -> None:
    """Run the case with operands of each format, and hold O and LSE against the reference."""
    gpu = load_gpu(case.gpu)
    schedule = Lowered(name=case.schedule.name, programs=case.schedule.lower(gpu, case.attention))
    for operands in formats:
        check_run(case, schedule, gpu, operands)


def check_run(case: Case, schedule: Schedule, gpu: GPU, operands: str) -> None:
    q, k, v = inputs(case, operands)
    out = run(schedule, gpu, case.attention, q, k, v, operands=operands, seed=case.order)
    o, lse = forward(q, k, v, causal=case.attention.causal)
    assert out["O"].shape == o.shape
    assert np.isfinite(out["O"]).all(), "O has a NaN: some element was read before it was written, or never written"
    assert np.abs(out["O"] - o).max() <= tolerance(case, operands, q, k) * np.abs(v).max()
    if "LSE" in out:
        seen = np.isfinite(lse)
        assert np.array_equal(np.isneginf(out["LSE"]), ~seen)
        allowed = FP32 * max(1.0, largest_score(q, k)) + EMULATED_EXP2.get(schedule.name, 0.0)
        assert (np.abs(out["LSE"][seen] - lse[seen]) <= allowed).all()


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fp32_operands_equal_the_reference_and_16_bits_stay_within_their_rounding(name: str, data: st.DataObject) -> None:
    check(data.draw(cases(name)), "fp32", data.draw(st.sampled_from(["bf16", "fp16"])))


@pytest.mark.parametrize("name", FP8_SCHEDULES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_fp8_stays_within_its_rounding(name: str, data: st.DataObject) -> None:
    check(data.draw(cases(name, "fp8")), "fp8")


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
@pytest.mark.parametrize(
    ("name", "operands"), [(n, o) for n in ALL_SCHEDULES for o in [*ALL_OPERANDS, *(["fp8"] if n in FP8_SCHEDULES else [])]]
)
def test_edges(name: str, operands: str, edge: str) -> None:
    dtype = "fp8" if operands == "fp8" else "bf16"
    attention = Attention(**{"batch": 2, "heads_q": 2, "head_dim": 64, "dtype": dtype, **EDGES[edge]})
    check(Case(schedule=get_schedule(name), gpu=home(name), attention=attention, seed=7), operands)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_scores_that_overflow_a_bare_exponential(name: str) -> None:
    """Scores of some 10,000: exp of them is infinite in fp32, so only the shift by the running maximum keeps O finite."""
    attention = Attention(batch=1, heads_q=1, seqlen_q=130, seqlen_kv=300, head_dim=64, causal=True)
    case = Case(schedule=get_schedule(name), gpu=home(name), attention=attention, seed=3, amplitude=50.0)
    q, k, v = inputs(case, "fp32")
    assert largest_score(q, k) > 10_000
    out = run(case.schedule, load_gpu(home(name)), attention, q, k, v, operands="fp32")["O"]
    o, _ = forward(q, k, v, causal=True)
    # a score keeps 24 bits, so weights err by exp(2^-22 score): 2^-22 * 30,000 = 0.7 % at most
    assert np.abs(out - o).max() <= 2.0**-22 * largest_score(q, k) * 2 * np.abs(v).max()


@pytest.mark.parametrize(("name", "gpu"), [(name, gpu) for name in ALL_SCHEDULES for gpu in gpus_of(name)])
def test_numbers_are_the_same_on_every_chip(name: str, gpu: str) -> None:
    attention = Attention(batch=1, heads_q=2, seqlen_q=90, seqlen_kv=77, head_dim=48, causal=True)
    check(Case(schedule=get_schedule(name), gpu=gpu, attention=attention, seed=11), "bf16")


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_rounding_shows(name: str) -> None:
    """The tolerance is not idle: bf16 operands move O further from the reference than fp32 ones may."""
    attention = Attention(batch=1, heads_q=1, seqlen_q=64, head_dim=64)
    case = Case(schedule=get_schedule(name), gpu=home(name), attention=attention, seed=5)
    q, k, v = inputs(case, "bf16")
    o, _ = forward(q, k, v)
    errors = {}
    for operands in ALL_OPERANDS:
        out = run(case.schedule, load_gpu(home(name)), attention, q, k, v, operands=operands)["O"]
        errors[operands] = np.abs(out - o).max() / np.abs(v).max()
    assert errors["fp32"] < FP32 < errors["fp16"] < errors["bf16"]


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_operands_default_to_the_dtype_of_the_problem(name: str) -> None:
    shape: dict[str, Any] = {"batch": 1, "heads_q": 1, "seqlen_q": 40, "head_dim": 32}
    for dtype in ("bf16", "fp16"):
        attention = Attention(dtype=dtype, **shape)
        case = Case(schedule=get_schedule(name), gpu=home(name), attention=attention, seed=5)
        q, k, v = inputs(case, dtype)
        own = run(case.schedule, load_gpu(home(name)), attention, q, k, v)["O"]
        named = run(case.schedule, load_gpu(home(name)), attention, q, k, v, operands=dtype)["O"]
        assert np.array_equal(own, named)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "fp32"}, "{name} runs {dtypes}, got dtype 'fp32': change dtype"),
    ({"dtype": "fp8"}, "{name} runs {dtypes}, got dtype 'fp8': change dtype"),
    ({"pass_": "bwd"}, "{name} has a forward schedule only, got pass 'bwd': choose --pass fwd"),
    ({"pass_": "fwd+bwd"}, "{name} has a forward schedule only, got pass 'fwd+bwd': choose --pass fwd"),
]


@pytest.mark.parametrize(
    ("name", "changed", "sentence"),
    [
        (n, changed, text)
        for n in ALL_SCHEDULES
        for changed, text in REFUSED
        if changed.get("dtype") not in DTYPES.get(n, ()) and (n != "cudnn" or "dtype" not in changed)  # there the chip decides
    ],
)
def test_refusals_are_sentences(name: str, changed: dict[str, Any], sentence: str) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=8, head_dim=16, **changed)
    x = np.zeros((1, 1, 8, 16))
    *most, last = DTYPES.get(name, ("bf16", "fp16"))
    expected = sentence.format(name=name, dtypes=f"{', '.join(most)} or {last}")
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        run(get_schedule(name), load_gpu(home(name)), attention, x, x, x, operands="fp32")


@pytest.mark.parametrize("side", ["head_dim", "head_dim_v"])
@pytest.mark.parametrize("name", list(LARGEST_HEAD_DIM))
def test_a_head_dim_that_no_tile_holds_is_refused(name: str, side: str) -> None:
    largest = LARGEST_HEAD_DIM[name]
    fields = {"head_dim": 16, "head_dim_v": 16, side: largest + 1}
    attention = Attention(batch=1, heads_q=1, seqlen_q=8, **fields)
    expected = f"{name} has no tile for head_dim {largest + 1}; the largest is {largest}: reduce head_dim"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        get_schedule(name).lower(load_gpu(home(name)), attention)


# --- FP8 ---


def fp8_run(name: str, q: Array, k: Array, v: Array, *, operands: str = "fp8") -> Array:
    batch, heads_q, seqlen_q, head_dim = q.shape
    attention = Attention(
        batch=batch, heads_q=heads_q, heads_kv=k.shape[1], seqlen_q=seqlen_q, seqlen_kv=k.shape[2], head_dim=head_dim, dtype="fp8"
    )
    return run(get_schedule(name), load_gpu(home(name)), attention, q, k, v, operands=operands)["O"]


@pytest.mark.parametrize("name", FP8_SCHEDULES)
def test_fp8_errs_as_much_as_the_published_arithmetic(name: str) -> None:
    """FA3's FP8 with one scale a tensor, written down independently: the same error on inputs of full precision, within 5 %."""
    q, k, v = normal((1, 4, 300, 128), (1, 2, 500, 128), (1, 2, 500, 128))
    o, _ = forward(q, k, v)
    theirs = flash_fp8(q, k, v, block_scales=False)[0]
    errors = [math.sqrt(np.mean((out - o) ** 2)) for out in (fp8_run(name, q, k, v), theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    assert errors[0] > 2.0**-8 * math.sqrt(np.mean(o**2)), "no trace of FP8"


@pytest.mark.parametrize("name", FP8_SCHEDULES)
@pytest.mark.parametrize("power", [-60, -9, 5, 40])
def test_fp8_scales_take_any_magnitude(name: str, power: int) -> None:
    """Powers of two in Q, taken back in K, change no bit, and in V they multiply O: nothing saturates or vanishes."""
    q, k, v = normal((1, 1, 70, 64), (1, 1, 90, 64), (1, 1, 90, 64))
    factor = np.float32(2.0**power)
    assert np.array_equal(fp8_run(name, q * factor, k / factor, v * factor), fp8_run(name, q, k, v) * factor)


@pytest.mark.parametrize("name", FP8_SCHEDULES)
def test_fp8_kernel_with_exact_operands_equals_the_reference(name: str) -> None:
    """The transposing role and its rings by themselves."""
    q, k, v = normal((1, 2, 130, 64), (1, 1, 700, 64), (1, 1, 700, 64))
    assert np.abs(fp8_run(name, q, k, v, operands="fp32") - forward(q, k, v)[0]).max() <= FP32 * np.abs(v).max()
