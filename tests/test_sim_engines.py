"""The two engines agree event by event, and what they report obeys conservation: nothing issued twice, no unit over-used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.instructions import INSTRUCTIONS, PIPES
from flashsim.model.program import Index, Program, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim import fast_engine, reference_engine
from flashsim.sim.chip import bundle_counts
from flashsim.sim.engine import (
    FIRST_PIPE,
    HBM_RATE,
    L2_RATE,
    PORT,
    SMEM,
    STALLS,
    TICKS_PER_CYCLE,
    Job,
    Run,
    bundle_table,
    make_job,
)
from flashsim.sim.predict import ENGINES

ALL_GPUS, ALL_SCHEDULES, ALL_ENGINES = list(GPUS), list(SCHEDULES), list(ENGINES)
H200 = load_gpu("h200")
QUARTERS = 4
SHAPE: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 100, "seqlen_kv": 140, "head_dim": 32}

#: Tiles and switches to draw per schedule.
FIELDS: dict[str, dict[str, list[Any]]] = {
    "standard": {"mask_kernel": [None, True], "warps": [4, 2, 8]},
    "fa1": {"block_q": [16, 32], "block_kv": [64, 128], "warps": [4, 2], "counts": ["typical", "ideal"]},
    "fa2": {"block_q": [64, 128], "block_kv": [16, 64], "warps": [4, 2], "counts": ["binary", "ideal"]},
}


def job_of(program: Program, gpu: str, *, sms: int = 1, slots: int = 1, ppm: int = 300_000, tiles: int | None = None) -> Job:
    """A job of the program's first ``tiles`` tiles."""
    job = make_job(
        program,
        load_gpu(gpu),
        clock_mhz=1410.0,
        slots=slots,
        queue=np.arange(min(tiles or len(program.tiles), len(program.tiles))),
        miss_ppm=np.full(len(program.tensors), ppm),
        active_sms=100,
        hbm_bytes_per_s=1.5e12,
        record_limit=50_000,
    )
    return replace(job, sms=sms)


@cache
def programs(name: str, gpu: str) -> tuple[Program, ...]:
    return get_schedule(name).lower(load_gpu(gpu), Attention(**SHAPE, causal=True))


def both(job: Job) -> Run:
    """The run of ``job``, the same by both engines."""
    fast, reference = fast_engine.run(job), reference_engine.run(job)
    assert fast.differences(reference) == []
    return fast


@st.composite
def jobs(draw: st.DrawFn, name: str) -> Job:
    group = draw(st.integers(1, 2))
    attention = Attention(
        batch=1,
        heads_q=group,
        heads_kv=1,
        seqlen_q=draw(st.integers(1, 90)),
        seqlen_kv=draw(st.integers(1, 150)),
        head_dim=draw(st.sampled_from([16, 32, 40, 64])),
        causal=draw(st.booleans()),
    )
    gpu = draw(st.sampled_from(ALL_GPUS))
    fields = {field: draw(st.sampled_from(choices)) for field, choices in FIELDS.get(name, {}).items()}
    program = draw(st.sampled_from(get_schedule(name, **fields).lower(load_gpu(gpu), attention)))
    ppm = draw(st.integers(0, 1_000_000))
    job = job_of(program, gpu, sms=draw(st.integers(1, 3)), slots=draw(st.integers(1, 2)), ppm=ppm, tiles=6)
    latency = np.array([draw(st.integers(0, 60_000)) for _ in job.latency], np.int64)
    return replace(job, latency=latency, record_limit=draw(st.sampled_from([0, 7, 50_000])))


@pytest.mark.parametrize("gpu", ALL_GPUS)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
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
    job = job_of(programs(name, "h200")[-1], "h200", sms=2, slots=2, tiles=5)
    assert ENGINES[engine](job).differences(ENGINES[engine](job)) == []


def test_differences_names_each_field_that_differs() -> None:
    run = fast_engine.run(job_of(programs("fa2", "h200")[0], "h200"))
    other = replace(run, ticks=run.ticks + 1, issued=run.issued + 1, events=run.events + 1)
    assert run.differences(other) == ["ticks", "issued"]  # how many events an engine needed is its own affair


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_issued_is_conserved(name: str, data: st.DataObject) -> None:
    """Over all SMs: units are busy for exactly what was issued, and never longer than the run."""
    job = data.draw(jobs(name))
    run = fast_engine.run(job)
    busy = run.busy.reshape(-1, len(PIPES) + 1)
    assert np.array_equal(busy[:, :-1].sum(axis=0), run.issued @ job.bundles[:, FIRST_PIPE:])
    assert busy[:, -1].sum() == run.issued @ job.bundles[:, PORT]
    assert run.shared[:, 0].sum() == run.issued @ job.bundles[:, SMEM]
    # the last instruction's cost may outlast its warp by no more than itself
    assert (busy <= run.ticks + job.bundles[:, PORT:].max()).all()
    assert sorted(run.ctas[:, 0]) == sorted(job.queue)
    assert (run.ctas[:, 3] <= run.ctas[:, 4]).all()
    assert run.ticks == run.ctas[:, 4].max()


@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("gpu", ALL_GPUS)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_engines_issue_what_the_program_says(name: str, gpu: str, sms: int) -> None:
    for program in programs(name, gpu):
        run = fast_engine.run(job_of(program, gpu, sms=sms, slots=2))
        assert np.array_equal(run.issued, bundle_counts(program).sum(axis=0))
        assert run.busy.shape == (sms, QUARTERS, len(PIPES) + 1)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_warp_waits_no_longer_than_it_lives(name: str) -> None:
    for program in programs(name, "h200"):
        job = job_of(program, "h200", tiles=4)
        run = fast_engine.run(job)
        assert run.stalls.shape == (1, program.warps, len(STALLS))
        assert (run.stalls >= 0).all()
        assert (run.stalls.sum(axis=-1) <= run.ticks).all()


# --- hand-made kernels: streams of one or two instructions ---


class Streams:
    """A kernel of ``warps`` warps with one loop that issues the given instructions (of INSTRUCTIONS) each trip."""

    def __init__(self, mix: dict[str, int], *, warps: int = 1, trips: int = 100) -> None:
        b = Builder(name="stream", warps=warps, registers=32)
        with b.loop("i", Index(arg="n")):
            for name, n in mix.items():
                b.issue(name, n)
        self.program = b.build(tensors=(), tiles=Tiles(names=("n",), values=np.array([[trips]])))

    def job(self, **changed: Any) -> Job:
        return replace(job_of(self.program, "h200"), **changed)

    def cycles(self) -> float:
        return both(self.job()).ticks / TICKS_PER_CYCLE


#: What saturates a sub-partition's pipe; the rest saturates the SM's SMEM port first, or goes to memory.
PRICED = sorted(name for name, row in INSTRUCTIONS.items() if (not row.smem_bytes or name == "shfl") and not row.path >= 2)


def occupied(name: str) -> float:
    """Cycles for which one instruction keeps its pipe or the port, whichever is longer."""
    cost = INSTRUCTIONS[name].cost
    return max(getattr(H200.pipe, cost), getattr(H200.port, cost))


@pytest.mark.parametrize("name", PRICED)
def test_two_warps_that_share_a_saturated_pipe_each_get_half(name: str) -> None:
    """Warps 0 and 4 live on the same sub-partition; 1, 2, 3 and 5, 6, 7 likewise: each pair takes twice one warp's pipe time."""
    stream = Streams({name: 10}, warps=8)
    run = both(stream.job())
    cost = occupied(name)
    if name != "shfl":
        assert run.ticks / TICKS_PER_CYCLE == pytest.approx(2 * 1000 * cost, rel=0.03)
    ends = run.records.copy()
    last = [int(ends[ends[:, 4] == warp][:, 1].max()) for warp in range(8)]
    assert max(last) - min(last) <= 0.03 * max(last), "one warp of a pair was starved"


def test_one_warp_alone_runs_at_its_own_gap() -> None:
    gap = max(float(H200.warp.ffma), float(H200.port.ffma), float(H200.pipe.ffma))
    assert Streams({"ffma": 14}).cycles() == pytest.approx(1400 * gap, rel=0.02)


@pytest.mark.parametrize("vector", ["ffma", "fadd", "fmnmx", "f2fp", "int_alu", "ex2"])
def test_matrix_and_vector_work_share_the_port(vector: str) -> None:
    """The port gives every instruction its ticks: time is at least their sum, and at most 5 % more when that binds."""
    count = 6
    stream = Streams({"hmma": 2, vector: count}, warps=8, trips=100)
    run = both(stream.job())
    cost = INSTRUCTIONS[vector].cost
    port = 2 * 100 * (2 * float(H200.port.hmma) + count * getattr(H200.port, cost))
    pipe = 2 * 100 * count * getattr(H200.pipe, cost)
    got = run.ticks / TICKS_PER_CYCLE
    assert run.busy[0, :, -1] / TICKS_PER_CYCLE == pytest.approx([port] * QUARTERS, rel=0.001)
    assert got >= max(port, pipe)
    assert got <= 1.05 * max(port, pipe)


def test_round_robin_serves_unequal_warps_alternately() -> None:
    """With a saturated pipe, no warp is more than one bundle ahead of its neighbour at any time."""
    run = both(Streams({"ex2": 14}, warps=8).job())
    starts: Sequence[Any] = run.records[np.argsort(run.records[:, 1], kind="stable")]
    done = np.zeros(8, int)
    for row in starts:
        done[row[4]] += 1
        assert abs(done[row[4]] - done[(row[4] + 4) % 8]) <= 1


@pytest.mark.parametrize("column", [PORT, *range(FIRST_PIPE, FIRST_PIPE + len(PIPES)), SMEM])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_faster_unit_never_slows(name: str, column: int) -> None:
    """Halving a unit's cost may reorder events, but costs no more than one bundle a CTA in ten (1 %)."""
    for program in programs(name, "a100-40gb"):
        job = job_of(program, "a100-40gb", slots=2)
        bundles = job.bundles.copy()
        bundles[:, column] //= 2
        assert fast_engine.run(replace(job, bundles=bundles)).ticks <= 1.01 * fast_engine.run(job).ticks


@pytest.mark.parametrize("rate", [L2_RATE, HBM_RATE])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_more_bandwidth_never_slows(name: str, rate: int) -> None:
    for program in programs(name, "a100-40gb"):
        job = job_of(program, "a100-40gb", slots=2, ppm=1_000_000)
        ticks = []
        for factor in (1, 2, 8, 64):
            faster = job.rate.copy()
            faster[rate, 1] *= factor
            ticks.append(fast_engine.run(replace(job, rate=faster)).ticks)
        assert all(after <= 1.01 * before for before, after in pairwise(ticks)), ticks
        assert ticks[-1] < 1.01 * ticks[0]


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
    for program in programs(name, "h200"):
        alone, shared = (fast_engine.run(job_of(program, "h200", slots=slots)).ticks for slots in (1, 2))
        assert shared <= 1.02 * alone


def test_a_price_is_the_sum_of_its_instructions() -> None:
    program = programs("fa2", "h200")[0]
    table = bundle_table(program, H200)
    for row, bundle in zip(table, program.bundles, strict=True):
        port = sum(n * round(TICKS_PER_CYCLE * getattr(H200.port, INSTRUCTIONS[name].cost)) for name, n in bundle)
        assert row[PORT] == port
