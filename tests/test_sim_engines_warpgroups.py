"""Warpgroups: the warps of one come to the first product of a group together, and to nothing else."""

from __future__ import annotations

import numpy as np
from engine_jobs import H200, QUARTERS, both, job_of

from flashsim.model.program import Tiles
from flashsim.model.schedule import Builder
from flashsim.sim.engine import STALL_BARRIER, TICKS_PER_CYCLE, Job, warpgroups

LATE = 400  # exponentials


def beside_a_busy_warp(*, groups: int = 1, products: bool = True) -> Job:
    """``groups`` warpgroups that each issue products twice; another warp keeps the MUFU of each one's first warp busy before."""
    b = Builder(name="late", registers=128)
    b.smem("Qs", rows=64, cols=64, bytes_per_element=2)
    b.smem("Ks", rows=64, cols=64, bytes_per_element=2)
    b.registers_tile("S", rows=64 * groups, cols=64)
    with b.role("products", warps=4 * groups, registers=128):
        b.op("zero", writes="S", shape=(64, 64))
        b.issue("ex2", LATE)
        for _ in range(2):
            if products:
                b.op("wgmma", writes="S", reads=("Qs", "Ks"))
                b.op("mma_commit")
            b.issue("ffma", 100)
        b.op("mma_wait", arg=0)
    with b.role("busy", warps=1, registers=32):
        b.issue("ex2", LATE)
    return job_of(b.build(tensors=(), tiles=Tiles(names=("n",), values=np.zeros((1, 1), int))), "h200")


def test_warpgroups_are_a_roles_warps_by_fours() -> None:
    starts = np.array([0, 9, 9, 9, 9, 9, 9, 9, 9, 30, 30])  # one producer, two warpgroups, two warps that are none
    assert warpgroups(starts).tolist() == [[0, 1], *[[1, 5]] * 4, *[[5, 9]] * 4, *[[9, 11]] * 2]


def test_no_warp_begins_a_product_before_the_last_of_its_warpgroup() -> None:
    waited = both(beside_a_busy_warp()).stalls[0, :QUARTERS, STALL_BARRIER]
    assert waited.tolist() == [0, *[round(LATE * H200.pipe.ex2 * TICKS_PER_CYCLE)] * 3]  # the last one shares its MUFU


def test_without_products_they_do_not_wait_for_each_other() -> None:
    assert not both(beside_a_busy_warp(products=False)).stalls[..., STALL_BARRIER].any()


def test_one_warpgroup_does_not_wait_for_another() -> None:
    """Of two whose first warps share a MUFU with the busy one, each waits for its own first warp alone."""
    run = both(beside_a_busy_warp(groups=2))
    waited = run.stalls[0, :8, STALL_BARRIER].reshape(2, QUARTERS)
    assert (waited[:, 1:] > 0).all()
    assert waited[:, 0].max() < 0.1 * waited[:, 1:].min()
