"""Dispatch: each tile once, breadth first, then to whom is free first; and what it means for FA1 on a chip it cannot fill."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import PAIRS, chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.chip import Dispatch, bundle_counts, dispatch, tile_work
from flashsim.sim.engine import PORT
from flashsim.sim.limiter import UNIT_WORDS, WAIT_WORDS, busy_there
from flashsim.sim.predict import simulate
from flashsim.sim.pricing import bundle_table

ALL_SCHEDULES = list(SCHEDULES)


def equal(n: int, *, sms: int, slots: int, alone: float = 1.0) -> Dispatch:
    return dispatch(np.full(n, 1000), sms=sms, slots=slots, alone=alone)


@settings(deadline=None)  # the first example loads compiled code
@given(
    work=st.lists(st.integers(1, 10_000), min_size=1, max_size=120),
    sms=st.integers(1, 12),
    slots=st.integers(1, 4),
    alone=st.floats(0.05, 1.0),
)
def test_every_tile_is_dispatched_exactly_once(work: list[int], sms: int, slots: int, alone: float) -> None:
    order = dispatch(np.array(work), sms=sms, slots=slots, alone=alone)
    assert sorted(np.concatenate(order.queues).tolist()) == list(range(len(work)))
    for queue in order.queues:
        assert queue.tolist() == sorted(queue.tolist()), "a later tile overtook an earlier one"
    assert order.waves == pytest.approx(len(work) / (sms * slots))
    assert order.idle_sms == sum(len(q) == 0 for q in order.queues) == max(0, sms - len(work))
    assert len(order.queue) > 0


@given(n=st.integers(1, 200), sms=st.integers(1, 20), slots=st.integers(1, 4))
def test_the_first_round_is_breadth_first(n: int, sms: int, slots: int) -> None:
    """SM k gets tiles k, k + sms, k + 2 sms ...: a second CTA only after every SM has one."""
    order = equal(n, sms=sms, slots=slots)
    for sm, queue in enumerate(order.queues):
        first = [t for t in range(min(n, sms * slots)) if t % sms == sm]
        assert queue[: len(first)].tolist() == first


@given(n=st.integers(1, 300), sms=st.integers(1, 20), slots=st.integers(1, 3))
def test_equal_tiles_spread_evenly(n: int, sms: int, slots: int) -> None:
    """Greedy makespan: with one slot the most loaded SM has ceil(n / sms) tiles; it is the critical one with any slots.

    With more slots CTAs of one SM end together and take their successors together, so a last round may fill an SM's slots first.
    """
    order = equal(n, sms=sms, slots=slots)
    loads = [len(q) for q in order.queues]
    full, rest = divmod(n, sms * slots)
    assert full * slots + -(-rest // sms) <= max(loads) <= full * slots + min(slots, rest)
    assert slots > 1 or max(loads) == -(-n // sms)
    assert loads[order.critical] == max(loads)


def test_work_goes_to_whom_is_free_first() -> None:
    """SM 0 has a tile ten times as long: everything else goes to SM 1."""
    order = dispatch(np.array([10_000, 1000, 1000, 1000, 1000]), sms=2, slots=1, alone=1.0)
    assert [q.tolist() for q in order.queues] == [[0], [1, 2, 3, 4]]
    assert order.critical == 0


def test_a_late_long_tile_makes_its_sm_critical() -> None:
    order = dispatch(np.array([1000, 1000, 1000, 50_000]), sms=2, slots=1, alone=1.0)
    assert 3 in order.queue


def test_idle_sms_are_counted() -> None:
    assert equal(100, sms=132, slots=2).idle_sms == 32
    assert equal(132, sms=132, slots=2).idle_sms == 0
    assert equal(100, sms=132, slots=2).waves == pytest.approx(100 / 264)


@given(works=st.lists(st.integers(1, 1000), min_size=1, max_size=60), sms=st.integers(1, 6))
def test_no_sm_is_left_behind_by_more_than_one_tile(works: list[int], sms: int) -> None:
    """Greedy list scheduling, one slot: the makespan is at most the mean load plus the longest tile (Graham 1966)."""
    order = dispatch(np.array(works), sms=sms, slots=1, alone=1.0)
    loads = [sum(works[t] for t in q) for q in order.queues]
    assert max(loads) <= sum(works) / sms + max(works)
    assert loads[order.critical] == max(loads)


@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_a_causal_tile_needs_no_more_than_a_full_one(name: str, gpu: str) -> None:
    chip = load_gpu(gpu)
    shape = {"batch": 1, "heads_q": 2, "seqlen_q": 1024, "head_dim": 64}
    plain, causal = (get_schedule(name).lower(chip, Attention(**shape, causal=c))[-1] for c in (False, True))  # type: ignore[arg-type]
    work = [tile_work(bundle_counts(p), bundle_table(p, chip)) for p in (plain, causal)]
    assert (work[0] == work[0][0]).all()
    assert (work[0] > 0).all()
    if name == "fa2":  # Q blocks from first to last see more and more keys
        blocks = causal.tiles.column("q_block")
        assert (np.diff(work[1][np.argsort(blocks, kind="stable")]) >= 0).all()
        assert work[1].min() < 0.5 * work[1].max()
    held = bundle_table(plain, chip)[:, PORT] > 0  # by all but a stall, a branch's fetch, and what a predicate turns off
    free = ("stall", "fmul_off", "refetch")
    assert held.tolist() == [any(name not in free for name, _ in bundle) for bundle in plain.bundles]


@pytest.mark.parametrize(("batch", "heads"), [(1, 8), (2, 16), (4, 16)])
def test_fa1_leaves_sms_idle_where_fa2_fills_them(batch: int, heads: int) -> None:
    """Batch x heads below the A100's 108 SMs: FA1's one CTA a head idles the rest, and the answer says so."""
    gpu = load_gpu("a100-40gb")
    a = Attention(batch=batch, heads_q=heads, seqlen_q=2048, head_dim=64)
    fa1, fa2 = (simulate(get_schedule(name), gpu, a, clock="boost") for name in ("fa1", "fa2"))
    idle = 108 - batch * heads
    assert fa1.launches[0].dispatch.idle_sms == idle
    assert fa1.limiter == f"parallelism: {idle} of 108 SMs have no CTA ({batch * heads} CTAs in the grid)"
    assert fa2.launches[0].dispatch.idle_sms == 0
    assert not fa2.limiter.startswith("parallelism")
    assert fa1.cycles / fa2.cycles > 108 / (batch * heads)


def test_fa1_with_enough_heads_is_not_limited_by_parallelism() -> None:
    a = Attention(batch=16, heads_q=16, seqlen_q=512, head_dim=64)
    result = simulate(get_schedule("fa1"), load_gpu("a100-40gb"), a, clock="boost")
    assert result.launches[0].dispatch.idle_sms == 0
    assert not result.limiter.startswith("parallelism")


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        (108, "latency: busiest is "),
        (128, "latency: 20 of 108 SMs have 2 CTAs, the others 1 (0.59 waves); busiest there is the issue port"),
        (230, "imbalance: 14 of 108 SMs have 3 CTAs, the others 2 (1.06 waves); busiest there is "),
    ],
)
def test_the_limiter_is_of_the_sm_that_ends_last(heads: int, words: str) -> None:
    """FA1 on an A100, two CTAs an SM: HBM is half busy while each CTA waits for its own loads, whoever is beside it."""
    result = simulate(get_schedule("fa1"), load_gpu("a100-40gb"), Attention(batch=1, heads_q=heads, seqlen_q=1024, head_dim=64))
    assert result.limiter.startswith(words)
    assert result.limiter.endswith("warps wait most for loads in flight")


def test_busy_units_of_the_sm_that_ends_last() -> None:
    """280 CTAs of equal work on 132 SMs that hold two: the SMs that run a third are the last to end."""
    problem = Attention(batch=1, heads_q=35, seqlen_q=1024, head_dim=128)
    (launch,) = simulate(get_schedule("fa2"), load_gpu("h200"), problem).launches
    order, there = launch.dispatch, busy_there(launch, 132)
    assert order.load == pytest.approx(len(order.queue) * 132 / 280, rel=1e-3)
    assert there["port"] == pytest.approx(launch.bounds["port"] / launch.cycles * order.load)
    held = min(len(order.queue), 2) / sum(min(len(queue), 2) for queue in order.queues)  # the SM's share of HBM
    assert there["hbm"] == pytest.approx(launch.bounds["hbm"] * order.load / 132 / held / launch.cycles)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_the_critical_sm_is_what_is_simulated(name: str) -> None:
    gpu = load_gpu(chip_for(name))
    result = simulate(get_schedule(name), gpu, Attention(batch=1, heads_q=4, seqlen_q=1024, head_dim=64))
    for launch in result.launches:
        assert launch.job.queue.tolist() == launch.dispatch.queue.tolist()
        assert len(launch.run.ctas) == len(launch.dispatch.queue)


@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_the_limiter_names_the_longest_wait(name: str) -> None:
    """Of a kernel bound by latency: a pipe that warps queue for is a wait like a barrier's."""
    words = UNIT_WORDS | WAIT_WORDS
    seen = 0
    for head_dim, seqlen in product((64, 128), (512, 1024, 2048)):
        attention = Attention(batch=4, heads_q=16, seqlen_q=seqlen, head_dim=head_dim)
        result = simulate(get_schedule(name), load_gpu("h100"), attention)
        if result.limiter.startswith("latency: "):
            longest = max((n for n in result.stalls if n in words), key=lambda n: result.stalls[n])
            assert result.limiter.endswith(f"warps wait most for {words[longest].partition(' (')[0]}")
            seen += 1
    assert seen
