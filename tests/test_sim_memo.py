"""What the fast engine remembers changes nothing: a remembered run, a first one and one that remembers nothing are equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim import fast_engine
from flashsim.sim.engine import HBM_LATENCY, L2_LATENCY, Job, Run
from flashsim.sim.fast_memo import KEEPS, LEAVES, MOST_NODES, NODES, STATES
from flashsim.sim.pricing import make_job

ALL_SCHEDULES = list(SCHEDULES)


def job_of(name: str, *, seqlen: int = 1024, tiles: int = 6, ppm: int = 50_000, causal: bool = False) -> Job:
    """The last kernel's first ``tiles`` tiles on one SM."""
    gpu = load_gpu(chip_for(name))
    attention = Attention(batch=1, heads_q=4, seqlen_q=seqlen, head_dim=64, causal=causal)
    program = get_schedule(name).lower(gpu, attention)[-1]
    return make_job(
        program, gpu, clock_mhz=1500.0, slots=1, queue=np.arange(min(tiles, len(program.tiles))),
        miss_ppm=np.full(len(program.tensors), ppm), shares=100, hbm_bytes_per_s=2e12,
    )  # fmt: skip


def live(job: Job) -> Run:
    """The run of an engine that remembers nothing: it keeps records, so every event has to happen."""
    return replace(fast_engine.run(replace(job, record_limit=1)), records=np.zeros((0, 7), np.int64))


def forget() -> None:
    fast_engine._memos.clear()


def counts() -> Any:
    """Of the one memo that is kept."""
    (memo,) = fast_engine._memos.values()
    return memo.counts


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_what_is_remembered_changes_nothing(name: str, causal: bool) -> None:
    job = job_of(name, causal=causal)
    forget()
    first, again, plain = fast_engine.run(job), fast_engine.run(job), live(job)
    assert first.differences(plain) == again.differences(plain) == []
    assert first.events == again.events == plain.events


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(ALL_SCHEDULES), ppm=st.integers(0, 1_000_000), l2=st.integers(0, 300_000), hbm=st.integers(0, 300_000),
    tiles=st.integers(1, 8), sms=st.integers(1, 3),
)  # fmt: skip
def test_memory_is_no_part_of_what_is_remembered(name: str, ppm: int, l2: int, hbm: int, tiles: int, sms: int) -> None:
    """One memo serves jobs whose loads land at other times: it holds what each wait found."""
    job = job_of(name, seqlen=512, tiles=tiles, ppm=ppm)
    latency = job.latency.copy()
    latency[[L2_LATENCY, HBM_LATENCY]] = l2, hbm
    job = replace(job, latency=latency, sms=sms)
    assert fast_engine.run(job).differences(live(job)) == []


def test_a_longer_job_needs_no_more_memory_and_few_more_states() -> None:
    """FA2's loop comes back to the same row, so eight times as many trips need hardly more rows; the second run adds none."""
    forget()
    short, long = job_of("fa2", seqlen=1024, tiles=2), job_of("fa2", seqlen=8192, tiles=2)
    few = fast_engine.run(short).events
    before = counts().copy()
    assert fast_engine.run(long).events > 6 * few
    between = counts().copy()
    assert before[STATES] <= between[STATES] <= before[STATES] + 4
    fast_engine.run(long)
    assert counts()[STATES] == between[STATES]
    assert counts()[NODES] == between[NODES]


def test_a_full_memo_is_set_aside_and_the_run_goes_on_without() -> None:
    job = job_of("fa3")
    forget()
    fast_engine.run(replace(job, queue=job.queue[:2]))
    counts()[NODES] = MOST_NODES - 1
    assert fast_engine.run(job).differences(live(job)) == []
    assert not fast_engine._memos, "a full memo is not kept"


def test_a_memo_belongs_to_one_machine() -> None:
    """Another price of a bundle is another machine; another bandwidth is not."""
    job = job_of("fa2")
    forget()
    fast_engine.run(job)
    fast_engine.run(replace(job, rate=job.rate * np.array([2, 1])))
    assert len(fast_engine._memos) == 1
    assert counts()[KEEPS]
    assert counts()[LEAVES] > 0
    fast_engine.run(replace(job, bundles=job.bundles * 2))
    assert len(fast_engine._memos) == 2


def test_memory_of_a_memo_serves_again() -> None:
    """Machines of other sizes, one after the other, more than are kept: each starts with nothing, in the oldest one's memory."""
    forget()
    jobs = [replace(job_of("fa2", tiles=3), slots=slots) for slots in (4, 3, 2, 1, 4, 2)]
    first = fast_engine.run(jobs[0])
    (memory,) = (memo.states for memo in fast_engine._memos.values())
    found = [fast_engine.run(job) for job in jobs[1:]]
    assert any(np.shares_memory(memory, memo.states) for memo in fast_engine._memos.values())
    assert len(fast_engine._memos) == fast_engine.KEPT_MEMOS
    assert [run.differences(live(job)) for run, job in zip([first, *found], jobs, strict=True)] == [[]] * len(jobs)


def test_a_run_is_kept_for_an_equal_job_and_no_other() -> None:
    """Candidates of a sweep that differ in what no engine reads have the same job, in arrays of their own."""
    job = job_of("fa2")
    again = replace(job, code=job.code.copy(), queue=job.queue.copy())
    fast_engine._runs.clear()
    first = fast_engine.kept_run(job)
    assert fast_engine.kept_run(again) is first
    assert first.differences(live(job)) == []
    for other in (replace(job, queue=job.queue[:-1]), replace(job, rate=job.rate * 2), replace(job, miss_ppm=job.miss_ppm * 2)):
        assert fast_engine.kept_run(other) is not first
    recorded = replace(job, record_limit=100)
    assert len(fast_engine.kept_run(recorded).records) == len(fast_engine.kept_run(recorded).records) == 100
    with pytest.raises(ValueError, match="read-only"):
        first.stalls[:] = 0


def test_few_runs_are_kept() -> None:
    fast_engine._runs.clear()
    job = job_of("fa2", tiles=1)
    for i in range(fast_engine.KEPT_RUNS + 2):
        fast_engine.kept_run(replace(job, queue=job.queue + i))
    assert len(fast_engine._runs) == fast_engine.KEPT_RUNS
