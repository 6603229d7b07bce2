"""Small sweeps of FA2 for tests, and the command that makes them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import command_line

from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import get_schedule
from flashsim.sim.explore import Row, Sweep, candidate, explore
from flashsim.sim.space import parse_space
from flashsim.sim.workers import local

GPU, FA2 = load_gpu("h100"), get_schedule("fa2")
PROBLEM = {"batch": 1, "heads": 2, "seqlen": 256, "head_dim": 64}
SHAPE = ["--gpu", "h100", "--batch", "1", "--heads", "2", "--seqlen", "256", "--head-dim", "64"]
GRID = ("block_kv=32:128:32", "warps=2,4", "block_q=64,100")
VARIED = [word for text in GRID for word in ("--vary", text)]


def sweep_of(*texts: str, **problem: Any) -> Sweep:
    return Sweep(schedule=FA2, gpu=GPU, problem=PROBLEM | problem, space=parse_space(texts, FA2, GPU), clock="boost")


def rows_of(sweep: Sweep, jobs: int = 1, **how: Any) -> list[Row]:
    with local(jobs) as workers:
        return sorted(explore(sweep, workers, **how), key=candidate)


EXPLORE = ("explore", "fa2", *SHAPE, "--clock", "boost", "--jobs", "1")
run, sentence = (partial(each, *EXPLORE) for each in (command_line.run, command_line.sentence))


def answer(*args: str) -> Any:
    done = run(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)
