"""The two engines agree event by event, and what they report obeys conservation: nothing issued twice, no unit over-used."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from engine_jobs import H200, QUARTERS, TENSOR, both, halved, job_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import PAIRS

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.instructions import INSTRUCTIONS, PIPES, Path
from flashsim.model.program import Program
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim import engine, fast_engine, fast_parts
from flashsim.sim.chip import bundle_counts
from flashsim.sim.engine import (
    FIRST_BESIDE,
    FIRST_PIPE,
    HBM_RATE,
    L2_RATE,
    PATH,
    PORT,
    PORT_BESIDE,
    RESULT,
    SMEM,
    STALLS,
    TICKS_PER_CYCLE,
    Job,
)
from flashsim.sim.predict import ENGINES
from flashsim.sim.pricing import bundle_table

ALL_GPUS, ALL_SCHEDULES, ALL_ENGINES = list(GPUS), list(SCHEDULES), list(ENGINES)
SHAPE: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 100, "seqlen_kv": 140, "head_dim": 32}

#: Tiles and switches to draw per schedule.
FIELDS: dict[str, dict[str, list[Any]]] = {
    "standard": {"mask_kernel": [None, True], "warps": [4, 2, 8], "layout": ["heads", "rows"]},
    "fa1": {"block_q": [16, 32], "block_kv": [64, 128], "warps": [4, 2], "counts": ["binary", "ideal"]},
    "fa2": {"block_q": [64, 128], "block_kv": [16, 64], "warps": [4, 2], "counts": ["binary", "ideal"]},
    "fa3": {
        "block_q": [None, 64, 128, 192],
        "block_kv": [None, 32, 64],
        "stages": [1, 2, 3],
        "pingpong": [None, True, False],
        "intra_overlap": [True, False],
        "warp_specialization": [True, False],
        "cluster": [None, 1, 2],
        "counts": ["binary", "ideal"],
    },
}
DTYPES = {"fa3": ["bf16", "fp8"]}


@cache
def programs(name: str, gpu: str) -> tuple[Program, ...]:
    return get_schedule(name).lower(load_gpu(gpu), Attention(**SHAPE, causal=True))


FIRST_GPU = dict(reversed(PAIRS))


def test_every_schedule_runs_on_some_chip_and_every_chip_runs_some_schedule() -> None:
    assert {name for name, _ in PAIRS} == set(ALL_SCHEDULES)
    assert {gpu for _, gpu in PAIRS} == set(ALL_GPUS)


@st.composite
def jobs(draw: st.DrawFn, name: str) -> Job:
    group = draw(st.integers(1, 2))
    attention = Attention(
        batch=draw(st.integers(1, 3)),
        heads_q=group,
        heads_kv=1,
        seqlen_q=draw(st.integers(1, 90)),
        seqlen_kv=draw(st.integers(1, 150)),
        head_dim=draw(st.sampled_from([16, 32, 40, 64])),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES.get(name, ["bf16"]))),
    )
    gpu = draw(st.sampled_from([gpu for each, gpu in PAIRS if each == name]))
    fields = {field: draw(st.sampled_from(choices)) for field, choices in FIELDS.get(name, {}).items()}
    try:
        lowered = get_schedule(name, **fields).lower(load_gpu(gpu), attention)
    except ValueError:  # a tile that does not fit
        assume(False)
    program = draw(st.sampled_from(lowered))
    ppm = draw(st.integers(0, 1_000_000))
    job = job_of(program, gpu, sms=draw(st.integers(1, 3)), slots=draw(st.integers(1, 2)), ppm=ppm, tiles=8)
    latency = np.array([draw(st.integers(0, 60_000)) for _ in job.latency], np.int64)
    return replace(job, latency=latency, record_limit=draw(st.sampled_from([0, 7, 50_000])))


@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_engines_agree_on_every_chip(name: str, gpu: str) -> None:
    for program in programs(name, gpu):
        assert len(both(job_of(program, gpu, slots=2, tiles=4)).records) > 0


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_engines_agree_on_drawn_jobs(name: str, data: st.DataObject) -> None:
    both(data.draw(jobs(name)))


@pytest.mark.parametrize("engine", ALL_ENGINES)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_the_same_job_gives_the_same_run(name: str, engine: str) -> None:
    gpu = FIRST_GPU[name]
    job = job_of(programs(name, gpu)[-1], gpu, sms=2, slots=2, tiles=5)
    assert ENGINES[engine](job).differences(ENGINES[engine](job)) == []


def test_differences_names_each_field_that_differs() -> None:
    run = fast_engine.run(job_of(programs("fa2", "h200")[0], "h200"))
    other = replace(run, ticks=run.ticks + 1, issued=run.issued + 1, events=run.events + 1)
    assert run.differences(other) == ["ticks", "issued"]  # how many events an engine needed is its own affair


def asynchronous(job: Job) -> Any:
    return np.isin(job.bundles[:, PATH], (Path.WGMMA, Path.TCGEN05))


def priced(bundles: Any, first: int, port: int) -> Any:
    """Ticks of each pipe and of the port by bundle; all four tensor cores of an SM share in a product of path TCGEN05."""
    table = np.concatenate((bundles[:, first : first + len(PIPES)], bundles[:, port : port + 1]), axis=1)
    table[:, TENSOR] += np.where(bundles[:, PATH] == Path.TCGEN05, QUARTERS * bundles[:, RESULT], 0)
    return table


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_issued_is_conserved(name: str, data: st.DataObject) -> None:
    """Over all SMs: units are busy for exactly what was issued, and never longer than the run.

    Where products run, other bundles cost what stands in one of two sets of columns, so there are two bounds.
    """
    job = data.draw(jobs(name))
    run = fast_engine.run(job)
    busy = run.busy.reshape(-1, len(PIPES) + 1)
    alone, beside = (priced(job.bundles, *columns) for columns in ((FIRST_PIPE, PORT), (FIRST_BESIDE, PORT_BESIDE)))
    if not asynchronous(job).any():
        beside = alone
    assert (busy.sum(axis=0) >= run.issued @ np.minimum(alone, beside)).all()
    assert (busy.sum(axis=0) <= run.issued @ np.maximum(alone, beside)).all()
    assert run.shared[:, 0].sum() == run.issued @ job.bundles[:, SMEM]
    # the last instruction's cost may outlast its warp by no more than itself
    assert (busy <= run.ticks + job.bundles.max()).all()
    assert sorted(run.ctas[:, 0]) == sorted(job.queue)
    assert (run.ctas[:, 3] <= run.ctas[:, 4]).all()
    assert run.ticks == run.ctas[:, 4].max()


@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_engines_issue_what_the_program_says(name: str, gpu: str, sms: int) -> None:
    for program in programs(name, gpu):
        run = fast_engine.run(job_of(program, gpu, sms=sms, slots=2))
        assert np.array_equal(run.issued, bundle_counts(program).sum(axis=0))
        assert run.busy.shape == (sms, QUARTERS, len(PIPES) + 1)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_warp_waits_no_longer_than_it_lives(name: str) -> None:
    gpu = FIRST_GPU[name]
    for program in programs(name, gpu):
        job = job_of(program, gpu, tiles=4)
        run = fast_engine.run(job)
        assert run.stalls.shape == (1, program.warps, len(STALLS))
        assert (run.stalls >= 0).all()
        assert (run.stalls.sum(axis=-1) <= run.ticks).all()


@pytest.mark.parametrize(("sms", "slots"), [(1, 1), (1, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("causal", [False, True])
def test_persistent_ctas_share_the_queue(sms: int, slots: int, dtype: str, causal: bool) -> None:
    """Slot s of all takes the tiles s, s + slots, ...; its warps go on one by one, so a tile begins before the last one ends."""
    attention = Attention(batch=1, heads_q=9, heads_kv=3, seqlen_q=70, seqlen_kv=150, head_dim=64, causal=causal, dtype=dtype)
    (program,) = get_schedule("fa3").lower(H200, attention)
    job = job_of(program, "h200", sms=sms, slots=slots)
    assert job.persistent
    run = both(job)
    n = sms * slots
    assert run.ctas[:, 0].tolist() == job.queue.tolist()
    for order in range(n, len(job.queue)):
        assert run.ctas[order, 1:3].tolist() == run.ctas[order - n, 1:3].tolist()
        assert run.ctas[order - n, 3] <= run.ctas[order, 3] <= run.ctas[order - n, 4] <= run.ctas[order, 4]
    assert (run.ctas[n:, 3] < run.ctas[:-n, 4]).any(), "the producer went ahead"


#: What phases may cost. Two CTAs of an SM lock into a phase in which one computes while the other waits for memory, or into one
#: in which both do the same at once; which of the two follows from the first ticks. The standard pipeline's P V of 700 x 1500
#: tokens, at four times the HBM bandwidth, runs up to 12 % faster when nothing but the second CTA's start moves. With one CTA
#: there is no phase.
PHASES = 1.05


@pytest.mark.parametrize("column", [PORT, *range(FIRST_PIPE, FIRST_PIPE + len(PIPES)), SMEM])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_faster_unit_never_slows(name: str, column: int) -> None:
    """Halving a unit's cost may reorder the events of two CTAs (PHASES) or of two warpgroups (half a percent)."""
    gpu = FIRST_GPU[name]
    for program in programs(name, gpu):
        for slots, tolerance in ((1, 1.005), (2, PHASES)):
            job = job_of(program, gpu, slots=slots)
            assert fast_engine.run(halved(job, column)).ticks <= tolerance * fast_engine.run(job).ticks


@pytest.mark.parametrize("rate", [L2_RATE, HBM_RATE])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_more_bandwidth_never_slows(name: str, rate: int) -> None:
    """Strictly so with one CTA an SM; with two a step of bandwidth may put them into a worse phase (PHASES)."""
    gpu = FIRST_GPU[name]
    for program in programs(name, gpu):
        for slots, tolerance in ((1, 1.001), (2, PHASES)):
            job = job_of(program, gpu, slots=slots, ppm=1_000_000)
            ticks = []
            for factor in (1, 2, 8, 64):
                faster = job.rate.copy()
                faster[rate, 1] *= factor
                ticks.append(fast_engine.run(replace(job, rate=faster)).ticks)
            assert all(after <= tolerance * before for before, after in pairwise(ticks)), ticks
            assert ticks[-1] <= 1.01 * ticks[0]


def test_less_bandwidth_shows() -> None:
    """A kernel that only loads is as slow as the slower of L2 and HBM."""
    program = programs("standard", "a100-40gb")[0]
    job = job_of(program, "a100-40gb", slots=2, ppm=1_000_000)
    slow = job.rate.copy()
    slow[HBM_RATE, 0] *= 50
    run = fast_engine.run(replace(job, rate=slow))
    assert run.ticks > 5 * fast_engine.run(job).ticks
    assert run.shared[0, 2] > 0.9 * run.ticks


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_more_slots_finish_no_later(name: str) -> None:
    gpu = FIRST_GPU[name]
    for program in programs(name, gpu):
        alone, shared = (fast_engine.run(job_of(program, gpu, slots=slots)).ticks for slots in (1, 2))
        assert shared <= 1.02 * alone


def test_compiled_code_is_kept_by_what_it_was_compiled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba looks at the time of one file only; the name under which it keeps code tells the rest."""
    assert fast_parts.STAMP in fast_engine._simulate.py_func.__qualname__
    monkeypatch.setattr(engine, "PORT", 1)
    assert fast_parts._stamp() != fast_parts.STAMP


def test_a_price_is_the_sum_of_its_instructions() -> None:
    program = programs("fa2", "h200")[0]
    table = bundle_table(program, H200)
    for row, bundle in zip(table, program.bundles, strict=True):
        issued = [(INSTRUCTIONS[name].cost, n) for name, n in bundle if name not in ("stall", "fmul_off")]
        port = sum(n * round(TICKS_PER_CYCLE * getattr(H200.port, cost)) for cost, n in issued)
        assert row[PORT] == port
