"""What binds a prediction, in words: SMs without work, SMs with more than others, a unit that is nearly always busy, or waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..model.gpu import GPU

if TYPE_CHECKING:
    from .predict import Launch

HOST_BOUND = "the host's launch path"
UNIT_WORDS = {
    "fma": "the FMA pipe",
    "alu": "the ALU pipe",
    "mufu": "the MUFU (exponentials)",
    "tensor": "the tensor cores",
    "lsu": "the load/store pipe",
    "tmem": "tensor memory's ports",
    "port": "the issue port (mma.sync beside softmax)",
    "smem": "the shared-memory port",
    "l2": "L2 bandwidth",
    "hbm": "HBM bandwidth",
}
#: From which share of the time a unit counts as what binds, and from which load over the mean SM's the last SM does.
BUSY, UNEVEN = 0.8, 1 / 0.85
SHARED = ("l2", "hbm")  # units of the whole chip; the others are of each SM
TOGETHER = 0.8  #: two units of which the less busy one has so much of the other's load bind together
WAIT_WORDS = {
    "barrier": "CTA barriers",
    "scoreboard": "loads in flight",
    "cp_async": "asynchronous copies (cp.async; O's bulk store)",
    "latency": "dependent results",
    "mbarrier": "mbarriers",
    "product": "their own products",
    "smem": "the shared-memory port",
    "launch": "CTA launch",
    "fetch": "instruction fetch",
}


def limiter(units: Mapping[str, float], stalls: Mapping[str, float], launches: Sequence[Launch], gpu: GPU) -> str:
    """What binds, in words. ``units``: busy share of each, of the whole chip; ``stalls``: share of a warp's life by what it
    waited for. Of several kernels the longest says how even the SMs' loads are."""
    sms = int(gpu.sm.count)
    main = max(launches, key=lambda x: x.cycles)
    idle = main.dispatch.idle_sms
    if idle >= max(2, sms // 20):
        return f"parallelism: {idle} of {sms} SMs have no CTA ({len(main.program.tiles)} CTAs in the grid)"
    unit = max(units, key=lambda name: units[name])
    if units[unit] >= BUSY:
        return f"{UNIT_WORDS[unit]}, {100 * units[unit]:.0f} % busy"
    wait = _longest_wait(stalls)
    if main.dispatch.load >= UNEVEN:
        return _uneven(main, sms, wait)
    second = max((name for name in units if name != unit), key=lambda name: units[name])
    if units[second] >= TOGETHER * units[unit] and {unit, second} == {"tensor", "mufu"}:
        shares = f"{100 * units[unit]:.0f} and {100 * units[second]:.0f} %"
        return f"{UNIT_WORDS[unit]} and {UNIT_WORDS[second]} together, {shares} busy"
    return f"latency: busiest is {UNIT_WORDS[unit]}, {100 * units[unit]:.0f} %; warps wait most for {wait}"


def _longest_wait(stalls: Mapping[str, float]) -> str:
    words = UNIT_WORDS | WAIT_WORDS
    return words[max(stalls, key=lambda name: stalls[name] if name in words else 0.0)].partition(" (")[0]


def _uneven(launch: Launch, sms: int, wait: str) -> str:
    """Where the SM that ends last has more work than others: its own units and waits, not the chip's means, say what binds.

    More work takes it longer where one of its units is nearly always busy, or where its CTAs run in more rounds than the other
    SMs'. Where it has only more CTAs at a time, and no unit is, each of them waits as it would alone.
    """
    there = busy_there(launch, sms)
    unit = max(there, key=lambda name: there[name])
    share, slots = f"{100 * there[unit]:.0f} %", launch.occupancy.ctas_per_sm
    counts = f"{_counts(launch, sms)} ({launch.dispatch.waves:.2f} waves)"
    if there[unit] >= BUSY:
        return f"imbalance: {counts}; there {UNIT_WORDS[unit]} is {share} busy"
    why = "imbalance" if len(launch.dispatch.queue) > slots else "latency"
    return f"{why}: {counts}; busiest there is {UNIT_WORDS[unit]}, {share}; warps wait most for {wait}"


def busy_there(launch: Launch, sms: int) -> dict[str, float]:
    """Busy share of the units of the SM that ends last, and of its share of those that all SMs have together."""
    own = launch.dispatch.load
    of_share = own / sms * launch.dispatch.shares(launch.occupancy.ctas_per_sm)
    return {name: bound / launch.cycles * (of_share if name in SHARED else own) for name, bound in launch.bounds.items()}


def _counts(launch: Launch, sms: int) -> str:
    """How uneven the SMs' loads are: by their number of CTAs where that tells it."""
    order = launch.dispatch
    lengths = [len(queue) for queue in order.queues]
    most, mean = len(order.queue), len(launch.program.tiles) / sms
    if most == max(lengths) == min(lengths) + 1 and abs(most / mean / order.load - 1) < 0.05:
        what = "tiles" if launch.program.strided else "CTAs"
        return f"{lengths.count(most)} of {sms} SMs have {most} {what}, the others {most - 1}"
    return f"the SM that ends last has {order.load:.2f} times the work of the mean SM"
