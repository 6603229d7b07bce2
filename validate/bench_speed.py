"""How fast the engines are on this machine, in processor time, with the ratios that matter.

    python -m flashsim.validate.bench_speed [--repeats N]

An event is what the contract orders (``sim/engine.py``): a warp that resumes, or a sub-partition that arbitrates. Times are
processor time, the best of several, so that neighbours on a shared machine do not count (its caches they share all the same).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..model.attention import Attention
from ..model.gpu import load_gpu
from ..model.schedules import get_schedule
from ..sim import fast_engine, reference_engine
from ..sim.engine import Job
from ..sim.predict import Result, simulate

LARGE: dict[str, Any] = {"batch": 4, "heads_q": 16, "head_dim": 128}
FIRST = (
    "import time; from flashsim import Attention, get_schedule, load_gpu, simulate;"
    "simulate(get_schedule('fa3'), load_gpu('h100'), Attention(batch=4, heads_q=16, seqlen_q=4096, head_dim=128));"
    "print(time.process_time())"
)


def best(call: Callable[[], Any], repeats: int) -> float:
    """Least processor seconds of a call."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def predicted(seqlen: int, **how: Any) -> Result:
    """A prediction whose engine runs, whether or not this job has just been run."""
    fast_engine._runs.clear()
    return simulate(get_schedule("fa3"), load_gpu("h100"), Attention(**LARGE, seqlen_q=seqlen), **how)


def cold(job: Job) -> None:
    """A run that remembers nothing from before."""
    fast_engine._memos.clear()
    fast_engine.run(job)


def engines(repeats: int) -> None:
    """Events a second: live, first and remembered, and the ratio to the reference engine on the same program."""
    job = replace(predicted(4096).launches[0].job, queue=np.arange(4))
    events = fast_engine.run(job).events
    live = best(lambda: fast_engine.run(replace(job, record_limit=1)), repeats)
    first, again = best(lambda: cold(job), repeats), best(lambda: fast_engine.run(job), repeats)
    reference = best(lambda: reference_engine.run(job), 1)
    print(f"engines: fa3 on h100, N4096 D128, {len(job.queue)} tiles, {events} events")
    for name, seconds in (("every event", live), ("first run", first), ("remembered", again), ("simpy", reference)):
        print(f"  {name:12s} {1e3 * seconds:9.2f} ms {events / seconds / 1e6:9.2f} M events/s {reference / seconds:8.0f} x simpy")


def calls(repeats: int) -> None:
    """simulate() as a whole: growth with the sequence, and what a warm process needs."""
    print("simulate(): fa3 on h100, B4 H16 D128; cold forgets machines and lowered programs")
    from ..model.schedule import _kept

    def forgetful(seqlen: int) -> None:
        fast_engine._memos.clear()
        _kept.cache_clear()
        predicted(seqlen)

    for seqlen in (2048, 4096, 8192, 16384):
        result = predicted(seqlen)
        tiles = len(result.launches[0].job.queue)
        warm, fresh = best(partial(predicted, seqlen), repeats), best(partial(forgetful, seqlen), repeats)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"  N{seqlen:<6d} {tiles:3d} tiles: warm {1e3 * warm:7.1f} ms, cold {1e3 * fresh:7.1f} ms, peak {peak:.0f} MB")


def chip(repeats: int) -> None:
    for seqlen in (4096, 8192):
        seconds = best(partial(predicted, seqlen, scope="chip"), repeats)
        sm, whole = predicted(seqlen), predicted(seqlen, scope="chip")
        events = sum(x.run.events for x in whole.launches)
        print(f"chip scope: N{seqlen} {seconds:.2f} s, {events / 1e6:.0f} M events", end="; ")
        print(f"cycles {100 * (whole.cycles / sm.cycles - 1):+.1f} % against SM scope")
        print("  " + "; ".join(whole.notes))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args(arguments)
    first = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    print(f"first result of a fresh process, code compiled before: {float(first.stdout):.2f} s of processor time")
    engines(asked.repeats)
    calls(asked.repeats)
    chip(2)


if __name__ == "__main__":
    main()
