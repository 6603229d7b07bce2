"""From a Program to a Job: what depends on the clock, and on nothing else."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from machines import chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import INSTRUCTIONS
from flashsim.model.rows import tabulated
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.predict import simulate
from flashsim.sim.pricing import at_clock, make_job
from flashsim.sim.residency import Residency


@pytest.mark.parametrize("scope", ["sm", "chip"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_job_at_another_clock_is_the_one_that_is_made_for_it(name: str, scope: str) -> None:
    gpu = load_gpu(chip_for(name))
    program = get_schedule(name).lower(gpu, Attention(batch=1, heads_q=2, seqlen_q=512, head_dim=64))[-1]
    l2 = Residency((program,), int(gpu.l2.resident_bytes)).shared(program) if scope == "chip" else None
    rates: dict[str, Any] = {"shares": 100.0, "hbm_bytes_per_s": 2e12}
    same: dict[str, Any] = {
        "slots": 1, "queue": np.arange(2), "miss_ppm": np.full(len(program.tensors), 50_000), "l2": l2,
    }  # fmt: skip
    fast, slow = (make_job(program, gpu, clock_mhz=mhz, **rates, **same) for mhz in (1900.0, 1100.0))
    again = at_clock(fast, program, gpu, clock_mhz=1100.0, **rates)
    assert again.equals(slow)
    assert again.l2 is l2
    differ = {f.name for f in fields(fast) if f.name != "l2" and not np.array_equal(getattr(fast, f.name), getattr(slow, f.name))}
    assert differ == {"latency", "rate"}


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_bundles_as_a_table_hold_what_they_hold(name: str) -> None:
    problem = Attention(batch=1, heads_q=2, seqlen_q=512, head_dim=64)
    bundles = get_schedule(name).lower(load_gpu(chip_for(name)), problem)[-1].bundles
    names, counts = tabulated(bundles)
    assert set(names) <= INSTRUCTIONS.keys()
    assert [{n: int(c) for n, c in zip(names, row, strict=True) if c} for row in counts] == [dict(b) for b in bundles]
    assert not counts.flags.writeable


def test_a_slower_shared_memory_port_holds_a_warpgroups_products_up() -> None:
    """At 128 bytes a cycle operands of 64 columns and more come in time (measured from 64 on); at 16 they do not."""
    problem, usual = Attention(batch=1, heads_q=4, seqlen_q=1024, head_dim=128), load_gpu("h100")
    slow = usual.replace_number("smem.bytes_per_clk", 16.0)
    fast, held = (simulate(get_schedule("fa3"), gpu, problem, clock="boost") for gpu in (usual, slow))
    assert held.cycles > 2 * fast.cycles
    assert held.units["smem"] <= 1
