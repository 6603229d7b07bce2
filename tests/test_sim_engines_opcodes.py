"""A hand-made kernel with every opcode and path: the engines agree on it, and barriers do what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_jobs import H200, TENSOR, both, job_of
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim.model.instructions import Path
from flashsim.model.program import Index, Opcode, Program, Tensor, Tiles
from flashsim.model.schedule import Builder
from flashsim.sim.engine import (
    BARRIER_PER_WARP,
    DELAY,
    FIRST_BESIDE,
    FIRST_PIPE,
    PATH,
    PRODUCT,
    RESULT,
    SMEM_BESIDE,
    STALL_BARRIER,
    STALL_GROUP,
    STALL_PRODUCT,
    TICKS_PER_CYCLE,
    Job,
)


def every_opcode(*, persistent: bool, tiles: int = 7, stages: int = 2) -> Program:
    """A producer that loads by TMA, four warps that multiply, and one that helps them with cp.async and plain loads.

    Tiles have 0 to 3 blocks.
    """
    b = Builder(name="every opcode", registers=64)
    b.ring("kv", stages)
    b.ring("s", 1)
    b.mbarrier("full", count=1, stages=stages)
    b.mbarrier("empty", count=4, stages=stages)
    b.mbarrier("done", count=4)
    b.named_barrier("turn", warps=5)
    b.named_barrier("all", warps=6)
    b.smem("Ks", rows=64, cols=64, bytes_per_element=2, stages=stages, ring="kv")
    b.smem("Qs", rows=64, cols=64, bytes_per_element=2)
    b.registers_tile("S", rows=64, cols=64)
    b.registers_tile("part", rows=64, cols=64)
    with b.role("producer", warps=1, registers=24):
        b.op("tile")
        with b.loop("i", Index(arg="n")):
            b.op("mbarrier_wait", barrier="empty", ring="kv", previous=True, elected=True)
            b.op("mbarrier_expect", barrier="full", ring="kv", of=("Ks",))
            b.op("tma_load", writes="Ks", reads="K", index=Index(loop="i"), barrier="full", ring="kv", copies=2)
            b.op("advance", ring="kv")
        b.op("named_arrive", barrier="turn")
        b.op("named_sync", barrier="all")
    with b.role("products", warps=4, registers=128):
        b.op("zero", writes="S", shape=(64, 64))  # once, not with every tile
        b.issue("mov", 40)
        b.op("tile")
        with b.loop("i", Index(arg="n")):
            b.op("mbarrier_wait", barrier="full", ring="kv")
            b.op("wgmma", writes="S", reads=("Qs", "Ks"))
            b.op("mma_commit")
            b.issue("ffma", 6)
            b.issue("ex2", 2)
            b.depend()
            b.op("mma_wait", arg=0)
            b.op("mbarrier_arrive", barrier="empty", ring="kv")
            b.op("advance", ring="kv")
        b.order("mbarrier_arrive", "done", "s", count=1, arg=1)
        b.op("named_sync", barrier="turn")
        b.op("named_sync", barrier="all")
        b.op("tma_store", writes="O", reads="S", index=Index(arg="plane"))
    with b.role("helper", warps=1, registers=64):
        b.op("tile")
        b.op("load_async", writes="part", reads="Q", index=Index(arg="plane"))
        b.op("commit")
        b.op("load", writes="part", reads="Q", index=Index(arg="plane"), scoreboard=2)
        b.op("wait_load", scoreboard=2)
        b.op("wait_group", arg=0)
        b.op("stmatrix", writes="Qs", reads="part")
        b.op("mbarrier_wait", barrier="done", ring="s")
        b.op("advance", ring="s")
        with b.when(Index(arg="n", const=-1)):
            b.op("store", writes="O", reads="part", index=Index(arg="plane"))
        b.op("named_sync", barrier="all")
    rows = {"heads": 1, "rows": 64 * 8, "cols": 64, "bytes_per_element": 2, "block_rows": 64, "head_arg": "zero"}
    tensors = (Tensor(name="K", multicast=2, **rows), Tensor(name="Q", **rows), Tensor(name="O", **rows))
    values = np.array([[i, i * 5 % 4, 0] for i in range(tiles)])
    return b.build(tensors=tensors, tiles=Tiles(names=("plane", "n", "zero"), values=values), persistent=persistent)


def on_all_tensor_cores(job: Job) -> Job:
    """The same job with products of path TCGEN05 in place of WGMMA: they hold no pipe, but the SM's tensor cores for RESULT."""
    bundles, latency = job.bundles.copy(), job.latency.copy()
    products = bundles[:, PATH] == Path.WGMMA
    bundles[products, RESULT] = bundles[products, FIRST_PIPE + TENSOR] // 3
    bundles[np.ix_(products, [FIRST_PIPE + TENSOR, FIRST_BESIDE + TENSOR])] = 0
    bundles[products, PATH] = Path.TCGEN05
    latency[PRODUCT] = 12_345
    return replace(job, bundles=bundles, latency=latency)


def test_the_kernel_has_every_opcode_and_path() -> None:
    program = every_opcode(persistent=True)
    assert set(program.code[:, 0]) == set(Opcode)
    paths = {int(row[PATH]) for row in job_of(program, "h200").bundles}
    assert paths == set(Path) - {Path.TCGEN05}
    assert Path.TCGEN05 in on_all_tensor_cores(job_of(program, "h200")).bundles[:, PATH]


@pytest.mark.parametrize(("sms", "slots"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("products", [Path.WGMMA, Path.TCGEN05])
@pytest.mark.parametrize("persistent", [False, True])
def test_engines_agree_on_every_opcode(persistent: bool, products: Path, sms: int, slots: int) -> None:
    job = job_of(every_opcode(persistent=persistent), "h200", sms=sms, slots=slots)
    if products == Path.TCGEN05:
        job = on_all_tensor_cores(job)
    run = both(job)
    assert run.stalls[..., STALL_PRODUCT].any()
    assert (run.busy <= run.ticks).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_engines_agree_on_every_opcode_whatever_it_costs(data: st.DataObject) -> None:
    """Latencies, rates, misses and the costs beside products are drawn: events fall on equal ticks, copies land in any order."""
    draw = data.draw
    program = every_opcode(persistent=draw(st.booleans()), stages=draw(st.integers(1, 3)))
    job = job_of(program, "h200", sms=draw(st.integers(1, 2)), slots=draw(st.integers(1, 2)), ppm=draw(st.integers(0, 1_000_000)))
    if draw(st.booleans()):
        job = on_all_tensor_cores(job)
    unit = draw(st.sampled_from([1, 100, 1000]))  # of all times, so that ticks coincide
    bundles = job.bundles // unit * unit
    bundles[:, PATH], bundles[:, DELAY] = job.bundles[:, PATH], job.bundles[:, DELAY] * draw(st.integers(0, 20)) // unit * unit
    latency = np.array([draw(st.integers(0, 60)) * unit for _ in job.latency], np.int64)
    rate = np.array([(unit, draw(st.integers(1, 64))) for _ in job.rate], np.int64)
    both(replace(job, bundles=bundles, latency=latency, rate=rate))


def late_arrivals() -> Job:
    """Three tiles, one after the other; in each a warp arrives thrice at a barrier of three at which another one waits."""
    b = Builder(name="late", registers=32)
    b.named_barrier("turn", warps=3)
    with b.role("first", warps=1, registers=32):
        b.op("named_arrive", barrier="turn")
        b.issue("ffma", 1000)
        b.op("named_arrive", barrier="turn")
        b.op("named_arrive", barrier="turn")
    with b.role("second", warps=1, registers=32):
        b.op("named_sync", barrier="turn")
    return job_of(b.build(tensors=(), tiles=Tiles(names=("n",), values=np.zeros((3, 1), int))), "h200")


def test_a_new_cta_finds_its_barriers_empty() -> None:
    """An arrival that nobody waited for ends with its CTA: without that the second tile's barrier would open early."""
    run = both(late_arrivals())
    lives = run.ctas[:, 4] - run.ctas[:, 3]
    assert lives.min() == lives.max() > 1000 * TICKS_PER_CYCLE


def test_a_barrier_costs_what_its_count_says() -> None:
    job = late_arrivals()
    latency = job.latency.copy()
    latency[BARRIER_PER_WARP] += 10_000_000  # beyond all that the first warp issues after it
    slow, fast = both(replace(job, latency=latency)), both(job)
    waited = slow.stalls[0, 1, STALL_BARRIER] - fast.stalls[0, 1, STALL_BARRIER]
    assert waited == len(job.queue) * 3 * 10_000_000


def hand_over(*, elected: bool, early: bool) -> Job:
    """One warp arrives at an mbarrier, another one or a lane of it waits there, and goes on; ``early``: before it looks."""
    b = Builder(name="hand over", registers=32)
    b.ring("s", 1)
    b.mbarrier("told", count=1)
    with b.role("first", warps=1, registers=32):
        b.op("branch")
        b.issue("ffma", 1 if early else 1000)
        b.op("mbarrier_arrive", barrier="told", ring="s")
    with b.role("second", warps=1, registers=32):
        b.op("branch")
        b.issue("ex2", 1000 if early else 1)
        b.op("mbarrier_wait", barrier="told", ring="s", elected=elected)
        b.issue("ffma", 1)
    return job_of(b.build(tensors=(), tiles=Tiles(names=("n",), values=np.zeros((1, 1), int))), "h200")


def test_one_lane_of_a_warp_hears_later_that_a_phase_is_over_where_it_has_to_wait() -> None:
    whole, lane = (both(hand_over(elected=elected, early=False)).ticks for elected in (False, True))
    assert lane - whole == round((H200.async_.mbarrier_lane_cycles - H200.async_.mbarrier_cycles) * TICKS_PER_CYCLE) > 0
    assert both(hand_over(elected=True, early=True)).ticks == both(hand_over(elected=False, early=True)).ticks


def test_shared_memory_takes_longer_beside_products_alone() -> None:
    job = job_of(every_opcode(persistent=True), "h200", ppm=1_000_000)
    job = replace(job, rate=job.rate // [10, 1])  # loads land while products run, neither before nor long after
    slow = job.bundles.copy()
    slow[:, SMEM_BESIDE] *= 100
    assert both(replace(job, bundles=slow)).ticks > both(job).ticks
    alone = []
    for bundles in (job.bundles.copy(), slow):
        bundles[:, [FIRST_PIPE + TENSOR, FIRST_BESIDE + TENSOR, DELAY]] = 0  # products that take no time
        alone.append(both(replace(job, bundles=bundles)).ticks)
    assert alone[0] == alone[1]


def groups_in_flight(left: int, groups: int) -> Program:
    """A warp that copies ``groups`` groups and waits until at most ``left`` are in flight, then until none is."""
    b = Builder(name="groups", registers=64)
    b.smem("Ks", rows=64, cols=64, bytes_per_element=2)
    with b.role("loads", warps=1, registers=64):
        b.op("tile")
        for _ in range(groups):
            b.op("load_async", writes="Ks", reads="K", index=Index(arg="plane"))
            b.op("commit")
        for most in (left, 0):
            b.op("wait_group", arg=most)
            b.issue("ffma", 4)
    rows = {"heads": 1, "rows": 64 * 8, "cols": 64, "bytes_per_element": 2, "block_rows": 64, "head_arg": "zero"}
    tiles = Tiles(names=("plane", "zero"), values=np.array([[0, 0], [1, 0]]))
    return b.build(tensors=(Tensor(name="K", **rows),), tiles=tiles)


@pytest.mark.parametrize(("left", "groups"), [(7, 9), (8, 9), (11, 12), (11, 14), (15, 16), (15, 40)])
def test_a_wait_leaves_many_groups_in_flight(left: int, groups: int) -> None:
    """As many as a deep ring of K and V keeps: the wait ends when the group before them has landed, not a later one."""
    run = both(job_of(groups_in_flight(left, groups), "h200"))
    assert run.stalls[..., STALL_GROUP].any()


def test_more_groups_than_the_engines_keep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^groups has wait_group arg=16; at most 15 may stay in flight: use fewer stages$"):
        job_of(groups_in_flight(16, 17), "h200")
