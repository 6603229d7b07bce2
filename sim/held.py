"""How long units are held, which is longer than their instructions' own cycles where products run beside them.

``Result.units`` has the own cycles, as a profiler counts them; a warp that wants a unit waits for as long as it is held.
"""

from __future__ import annotations

from ..model.instructions import PIPES
from .engine import FIRST_PIPE, PORT
from .predict import Launch, Result


def slowed(launch: Launch) -> dict[str, float]:
    """Ticks that the engine counted on each pipe and the port, over those of the bundles alone. A record does not say which
    instructions ran beside a product, so all are taken to be stretched alike."""
    counted = launch.run.busy.sum(axis=(0, 1))
    alone = launch.run.issued @ launch.job.bundles
    columns = {"port": (len(PIPES), PORT), **{pipe: (i, FIRST_PIPE + i) for i, pipe in enumerate(PIPES)}}
    return {name: float(counted[i] / alone[j]) for name, (i, j) in columns.items() if alone[j] > 0}


def held(result: Result) -> dict[str, float]:
    """Share of the time, over the whole chip and run, for which each unit of ``Result.units`` is held."""
    cycles = dict.fromkeys(result.units, 0.0)
    for launch in result.launches:
        longer = slowed(launch)
        for name, own in launch.bounds.items():
            cycles[name] += own * longer.get(name, 1.0)
    return {name: n / result.cycles for name, n in cycles.items()}
