"""How many candidates a second ``explore`` simulates on this machine, and where the time goes.

    python -m flashsim.validate.bench_explore [--jobs N] [--batch B] [--heads H] [--seqlen N]

The sweep is FA2 on H100 at head_dim 128: the tile, warps and registers, 72 candidates, each with the engine's two runs. It is
timed from first to last in processes that are up already (how long that took is printed beside), with the parent's part. Rates
are of candidates that ran. Processor time tells what the sweep costs where neighbours share the machine: the rate is at most
processes / (processor time a candidate), and the processes are busy for the share printed.

The profile is of the same sweep in one process that has seen nothing of it; its rows overlap where one part calls another.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import platform
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model import rows
from ..model import schedule as schedule_module
from ..model.gpu import load_gpu
from ..model.schedules import fa2, get_schedule
from ..sim import fast_engine, residency
from ..sim.explore import Sweep, evaluate, explore
from ..sim.space import parse_space
from ..sim.workers import Workers, default_jobs, local

SPACE = ("block_q=64,128,192", "block_kv=32:128:32", "warps=4,8", "registers=none,168,255")
TARGET_PER_S = 60  # SM-scope configurations a second on two cores

#: Parts of a simulation: what is printed, and (file, function) in the profile.
PARTS = {
    "lowering": ("fa2.py", "lower"),
    "occupancy": ("tiling.py", "occupancy"),
    "L2 residency replay": ("residency.py", "launch"),
    "bundle counts of tiles": ("chip.py", "issued_bundles"),
    "dispatch": ("chip.py", "dispatch"),
    "pricing (make_job)": ("pricing.py", "make_job"),
    "engine": ("fast_engine.py", "kept_run"),
    "of that, runs not seen before": ("fast_engine.py", "run"),
    "clock": ("clock.py", "sustained"),
    "whole candidate": ("explore.py", "evaluate"),
}


def sweep_of(batch: int, heads: int, seqlen: int) -> Sweep:
    """The sweep of the module's docstring for one problem."""
    schedule, gpu = get_schedule("fa2"), load_gpu("h100")
    problem = {"batch": batch, "heads": heads, "seqlen": seqlen, "head_dim": 128}
    return Sweep(schedule=schedule, gpu=gpu, problem=problem, space=parse_space(SPACE, schedule, gpu))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One sweep: candidates that ``ran`` and were ``pruned``, seconds until all processes were up, of the sweep, and of processor
    time in them and in this process."""

    ran: int
    pruned: int
    up_s: float
    wall_s: float
    workers_s: float
    parent_s: float


def measure(sweep: Sweep, jobs: int) -> Measured:
    began = time.perf_counter()
    with local(jobs) as workers:
        before = _processes(workers)
        up, parent = time.perf_counter(), time.process_time()
        answers = list(explore(sweep, workers))
        ended, parent = time.perf_counter(), time.process_time() - parent
        spent = sum(_processes(workers).values()) - sum(before.values())
    if jobs == 1:
        parent = 0.0  # it is the one process
    ran = sum(row["status"] == "ok" for row in answers)
    pruned = len(answers) - ran
    return Measured(ran=ran, pruned=pruned, up_s=up - began, wall_s=ended - up, workers_s=spent, parent_s=parent)


def _processes(workers: Workers) -> dict[int, float]:
    """Processor seconds of every process so far, by its number; all of them have to answer."""
    found: dict[int, float] = {}
    while len(found) < workers.width:
        found |= dict(answer for _, answer in workers.answers(_process, range(workers.width)))
    return found


def _process(_: int) -> tuple[int, float]:
    time.sleep(0.02)  # so that one process does not answer for all
    return os.getpid(), time.process_time()


def forget() -> None:
    """Drop all that a process keeps of the candidates that it has seen."""
    for kept in (fast_engine._memos, fast_engine._runs, residency._replays):
        kept.clear()
    for lowering in (schedule_module._kept, fa2._kernel, rows.mixed, rows.tabulated):
        lowering.cache_clear()


def profile(sweep: Sweep) -> tuple[float, list[tuple[str, float, float]]]:
    """Processor ms a candidate that runs, and of PARTS (name, the same, calls a candidate).

    The parts are measured by a profiler, which makes those in Python look up to twice as long as they are.
    """
    forget()
    began = time.process_time()
    ran = sum(evaluate(sweep, number)["status"] == "ok" for number in range(sweep.size))
    plain = 1e3 * (time.process_time() - began) / ran
    forget()
    profiler = cProfile.Profile(time.process_time)  # processor time: neighbours on a shared machine do not count
    profiler.enable()
    for number in range(sweep.size):
        evaluate(sweep, number)
    profiler.disable()
    measured: dict[tuple[str, int, str], tuple[Any, ...]] = vars(pstats.Stats(profiler))["stats"]
    found = {(Path(file).name, name): (calls, seconds) for (file, _, name), (_, calls, _, seconds, _) in measured.items()}
    out = []
    for part, key in PARTS.items():
        calls, seconds = found.get(key, (0, 0.0))
        out.append((part, 1e3 * seconds / ran, calls / ran))
    return plain, out


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("jobs", default_jobs()), ("batch", 4), ("heads", 16), ("seqlen", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args(arguments)
    sweep = sweep_of(asked.batch, asked.heads, asked.seqlen)
    print(f"fa2 on h100, B{asked.batch} H{asked.heads} N{asked.seqlen} D128, SM scope, {sweep.space.size} candidates;")
    busy = f", load average {os.getloadavg()[0]:.1f} before the start" if hasattr(os, "getloadavg") else ""
    print(f"{asked.jobs} processes, {default_jobs()} processors, Python {platform.python_version()}{busy}")
    evaluate(sweep, 0)
    found = measure(sweep, asked.jobs)
    per_s, cpu_s, parent_s = found.ran / found.wall_s, (found.workers_s + found.parent_s) / found.ran, found.parent_s / found.ran
    ran = f"{found.ran} ran, {found.pruned} pruned"
    print(f"{per_s:.1f} candidates/s (target {TARGET_PER_S}: {per_s / TARGET_PER_S:.2f}x), {ran}")
    print(f"{1e3 * cpu_s:.1f} ms of processor time a candidate, {1e3 * parent_s:.1f} of them in the parent:", end=" ")
    print(f"{asked.jobs / cpu_s:.0f}/s where {asked.jobs} processors do nothing else")
    share = found.workers_s / asked.jobs / found.wall_s
    print(f"parallel efficiency {100 * share:.0f} % (processes busy); processes were up after {found.up_s:.1f} s")
    plain, parts = profile(sweep)
    whole = parts[-1][1]
    print(f"in one process {plain:.1f} ms of processor time a candidate; under the profiler:")
    for part, ms, calls in parts:
        print(f"  {part:30s} {ms:8.1f} ms {100 * ms / whole:5.1f} %  {calls:.1f} calls")


if __name__ == "__main__":
    main()
