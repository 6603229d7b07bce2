"""Jobs for tests of the engines: drawn or hand-made problems of every schedule on one or more SMs, run by both engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import PIPES
from flashsim.model.program import Program
from flashsim.sim import fast_engine, reference_engine
from flashsim.sim.engine import Job, Run
from flashsim.sim.pricing import make_job

H200 = load_gpu("h200")
QUARTERS, TENSOR = 4, PIPES.index("tensor")


def job_of(program: Program, gpu: str, *, sms: int = 1, slots: int = 1, ppm: int = 300_000, tiles: int | None = None) -> Job:
    """A job of the program's first ``tiles`` tiles."""
    job = make_job(
        program,
        load_gpu(gpu),
        clock_mhz=1410.0,
        slots=slots,
        queue=np.arange(min(tiles or len(program.tiles), len(program.tiles))),
        miss_ppm=np.full(len(program.tensors), ppm),
        shares=100,
        hbm_bytes_per_s=1.5e12,
        record_limit=50_000,
    )
    return replace(job, sms=sms)


def both(job: Job) -> Run:
    """The run of ``job``, the same by both engines."""
    fast, reference = fast_engine.run(job), reference_engine.run(job)
    assert fast.differences(reference) == []
    return fast


def halved(job: Job, column: int) -> Job:
    """The same with a unit of half the cost: a column of the bundles."""
    bundles = job.bundles.copy()
    bundles[:, column] //= 2
    return replace(job, bundles=bundles)
