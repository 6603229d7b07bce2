"""What each unit of a chip costs: the same kernel on chips that differ in one thing.

    with local(jobs=2) as workers:
        report = what_if(schedule, gpu, attention, [free(gpu, "mufu"), scale(gpu, "l2", 2)], workers)

Names are units (``units``), dotted numbers ("pipe.ex2"), sections ("hbm") and instructions ("ex2"). A unit that is free still
takes an issue slot an instruction; an instruction that is free takes nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..model.attention import Attention
from ..model.gpu import GPU, ChipError, Costs, Sourced
from ..model.instructions import INSTRUCTIONS
from ..model.named import guess
from ..model.schedule import Schedule, choices
from .predict import simulate
from .unit_words import words
from .workers import Died, Workers

#: Stands for nothing where a number may not be zero, and for no limit where it is a rate.
ALMOST = 100
TIMES = ("cycles", "ns", "us", "pJ")  # smaller is better; of the other units more is better
RATES = ("bytes/clk", "bytes/s")
DEPTHS = ("latency.lsu_queue",)  # in cycles, but of room: more is better
ALIASES = {"exp2": "ex2"}  # the op of the vocabulary and its instruction
PIPE, PORT = "pipe", "port"
NOT_UNITS = ("sm", "clock", "power")
FACTORS = (("2x", 2.0), ("half", 0.5))


@dataclass(frozen=True, kw_only=True)
class Change:
    """A chip that differs: ``numbers`` (dotted name -> value) replace its own. ``note`` says where the wish could not be met."""

    name: str
    kind: str
    numbers: Mapping[str, float]
    note: str = ""

    def on(self, gpu: GPU) -> GPU:
        for name, value in self.numbers.items():
            gpu = gpu.replace_number(name, value)
        return gpu


#: What products that run on after their issue cost, beside mma.sync's pipe.
PRODUCTS = ("wgmma.cycles_per_column", "tcgen05.cycles_per_column")


def units(gpu: GPU) -> dict[str, tuple[str, ...]]:
    """The units of a chip: name -> its numbers. Pipes, ports and latencies; bandwidth and latency of a memory apart. What costs
    nothing on a chip is none of its units."""
    out: dict[str, tuple[str, ...]] = {}
    numbers = dict(gpu.numbers())
    for name in dict.fromkeys(row.pipe for row in INSTRUCTIONS.values()):
        costs = dict.fromkeys(row.cost for row in INSTRUCTIONS.values() if row.pipe == name)
        if name not in ("control", "tmem"):
            also = PRODUCTS if name == "tensor" else ()
            out[name] = tuple(field for field in (*(f"{PIPE}.{cost}" for cost in costs), *also) if field in numbers)
    for section in dict.fromkeys(name.partition(".")[0] for name in numbers):
        inside = [name for name in numbers if name.startswith(f"{section}.") and name not in PRODUCTS]
        own = {name: numbers[name] for name in inside}
        if section in NOT_UNITS or section == PIPE:
            continue
        if section in _cost_sections(gpu):
            out[section] = tuple(own)
            continue
        rates = tuple(name for name, number in own.items() if number.unit in RATES)
        if rates:
            out[section] = rates
        times = tuple(name for name, number in own.items() if number.unit in TIMES)
        if rates and times:
            out[f"{section} latency"] = times
        else:
            out |= {name: (name,) for name in times}
    out["power limit"] = ("power.limit_w",)
    return {name: group for name, group in out.items() if any(float(numbers[number]) for number in group)}


def numbers_of(gpu: GPU, name: str) -> tuple[str, ...]:
    """The chip's numbers that ``name`` stands for. Raises ValueError with the nearest name that stands for any."""
    known, own = units(gpu), dict(gpu.numbers())
    if name in own:
        return (name,)
    spaced = name.replace("_", " ")  # "l2_latency" needs no quotes in a shell
    if name in known or spaced in known:
        return known.get(name) or known[spaced]
    short = ALIASES.get(name, name)
    cost = INSTRUCTIONS[short].cost if short in INSTRUCTIONS else short
    costs = tuple(f"{section}.{cost}" for section in _cost_sections(gpu) if f"{section}.{cost}" in own)
    found = costs or tuple(number for number in own if number.startswith(f"{name}."))
    if found:
        return found
    words = [*known, *INSTRUCTIONS, *ALIASES, *own]
    raise ValueError(
        f"{gpu.name} has no unit, instruction or number {name!r}{guess(name, words)}"
        f" Units are {', '.join(known)}"
    )


def free(gpu: GPU, name: str) -> Change:
    """``name`` costs nothing: times are zero, rates and limits ALMOST times theirs. Raises ValueError for unknown names."""
    numbers, refused = {}, []
    for path in numbers_of(gpu, name):
        number = dict(gpu.numbers())[path]
        value = 0.0 if _shrinks(path, number) else number * ALMOST
        try:
            gpu.replace_number(path, value)
        except ChipError:
            value = number / ALMOST
            refused.append(path)
        numbers[path] = value
    limits = [path for path, value in numbers.items() if value > dict(gpu.numbers())[path]]
    notes = []
    if refused:
        notes.append(f"1/{ALMOST} of {', '.join(refused)}, which may not be zero")
    if limits:
        notes.append(f"{ALMOST} times {', '.join(limits)}")
    return Change(name=name, kind="free", numbers=_with_ports(gpu, name, numbers, math.inf), note="; ".join(notes))


def scale(gpu: GPU, name: str, factor: float) -> Change:
    """``name`` is ``factor`` times as fast: times are divided by it, rates, limits and sizes multiplied (counts rounded).

    Raises ValueError for unknown names and factors that are not above zero.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"--scale {name} got the factor {factor}; it must be above zero, for example 2 for twice as fast")
    own, numbers = dict(gpu.numbers()), {}
    for path in numbers_of(gpu, name):
        value = own[path] / factor if _shrinks(path, own[path]) else own[path] * factor
        numbers[path] = max(1.0, float(round(value))) if own[path].unit in ("count", "bytes") else float(value)
        gpu.replace_number(path, numbers[path])
    kind = {factor: label for label, factor in FACTORS}.get(factor, f"{factor:g}x")
    return Change(name=name, kind=kind, numbers=_with_ports(gpu, name, numbers, factor))


def take(gpu: GPU, other: GPU, name: str) -> Change:
    """``gpu`` with ``name`` of ``other``. Raises ValueError where either has no such numbers."""
    theirs = dict(other.numbers())
    paths = tuple(path for path in numbers_of(gpu, name) if path in theirs or path not in PRODUCTS)  # one chip has wgmma, ...
    missing = [path for path in paths if path not in theirs]
    if missing:
        raise ValueError(f"{other.name} has no {missing[0]}: take something that both chips have")
    numbers = {path: float(theirs[path]) for path in paths}
    if name in units(gpu):
        ports = [f"{PORT}.{cost}" for cost in sorted(_held(gpu, paths) | _held(other, paths))]
        numbers |= {path: float(theirs[path]) for path in ports if path in theirs}
    return Change(name=name, kind=f"{other.name}'s", numbers=numbers)


def set_numbers(gpu: GPU, numbers: Mapping[str, float]) -> Change:
    """``gpu`` with these numbers. Raises ValueError for what it has not or may not be."""
    for path, value in numbers.items():
        gpu.replace_number(path, value)
    return Change(name=", ".join(numbers), kind="set", numbers=dict(numbers))


def together(changes: Sequence[Change]) -> Change:
    """All of them at once; where two change one number, the later."""
    numbers = {path: value for change in changes for path, value in change.numbers.items()}
    notes = dict.fromkeys(change.note for change in changes if change.note)
    return Change(name="all together", kind="", numbers=numbers, note="; ".join(notes))


def every_unit(gpu: GPU) -> list[Change]:
    """Each unit free, twice as fast and half as fast."""
    return [change for name in units(gpu) for change in (free(gpu, name), *(scale(gpu, name, f) for _, f in FACTORS))]


def every_swap(gpu: GPU, other: GPU) -> list[Change]:
    """Each unit of ``gpu`` that ``other`` has with other numbers, replaced by it."""
    theirs = dict(other.numbers())
    shared = [name for name, paths in units(gpu).items() if all(path in theirs or path in PRODUCTS for path in paths)]
    changes = [take(gpu, other, name) for name in shared]
    own = dict(gpu.numbers())
    return [change for change in changes if any(value != own[path] for path, value in change.numbers.items())]


def _shrinks(path: str, number: Sourced) -> bool:
    """Whether less of this number is faster."""
    return number.unit in TIMES and path not in DEPTHS


def _cost_sections(gpu: GPU) -> list[str]:
    return [section for section in type(gpu).model_fields if isinstance(getattr(gpu, section), Costs)]


def _slot(gpu: GPU) -> float:
    """Cycles of one issue slot: the least that any instruction holds the port."""
    return min(float(v) for name, v in gpu.numbers() if name.startswith(f"{PORT}."))


def _held(gpu: GPU, paths: Iterable[str]) -> set[str]:
    """Costs among pipe numbers whose instructions hold the port for longer than a slot, because of their pipe (mma.sync)."""
    own = dict(gpu.numbers())
    costs = {path.partition(".")[2] for path in paths if path.startswith(f"{PIPE}.")}
    return {cost for cost in costs if own.get(f"{PORT}.{cost}", 0.0) > _slot(gpu)}


def _with_ports(gpu: GPU, name: str, numbers: dict[str, float], factor: float) -> dict[str, float]:
    """A pipe whose instructions hold the port as long as the pipe takes the port time with it, down to one issue slot."""
    if name not in units(gpu):
        return numbers
    own: dict[str, Sourced] = dict(gpu.numbers())
    ports = {f"{PORT}.{c}": max(_slot(gpu), own[f"{PORT}.{c}"] / factor) for c in _held(gpu, numbers)}
    return {**numbers, **ports}


# --- running them ---


@dataclass(frozen=True, kw_only=True)
class Case:
    """What all changes are held against."""

    schedule: Schedule
    gpu: GPU
    attention: Attention
    clock: float | str = "power"
    engine: str = "fast"


def outcome(case: Case, change: Change | None) -> dict[str, Any]:
    """Cycles, ms, TFLOP/s, clock and limiter of ``case`` with ``change``; or the sentence why it cannot run."""
    try:
        gpu = change.on(case.gpu) if change else case.gpu
        result = simulate(case.schedule, gpu, case.attention, engine=case.engine, clock=case.clock)
    except (ValueError, ArithmeticError, MemoryError) as error:
        return {"status": "pruned", "reason": " ".join(str(error).split()) or type(error).__name__}
    return {
        "status": "ok", "cycles": float(result.cycles), "ms": float(result.ms), "tflops": float(result.tflops),
        "clock_mhz": float(result.clock_mhz), "limiter": result.limiter,
    }  # fmt: skip


def what_if(case: Case, changes: Sequence[Change], workers: Workers) -> Iterator[dict[str, Any]]:
    """The base first, then one row a change as they are ready; ``index`` is its place in ``changes`` (the base: -1).

    ``saved_pct``: time saved in per cent of the base's (negative: lost); ``cycles_saved_pct`` without the change of clock;
    ``choices``: fields that the schedule itself sets otherwise on the changed chip, before and after. Raises ValueError where the
    base cannot run.
    """
    base = outcome(case, None)
    if base["status"] != "ok":
        raise ValueError(base["reason"])
    yield {"index": -1, **base}
    own = dict(case.gpu.numbers())
    for index, answer in workers.answers(partial(_outcome_at, case, tuple(changes)), range(len(changes))):
        change = changes[index]
        row = {"index": index, "change": change.name, "what": words(change.name), "kind": change.kind, "note": change.note}
        row["numbers"] = {path: [float(own[path]), float(value)] for path, value in change.numbers.items()}
        if isinstance(answer, Died):
            answer = {"status": "failed", "reason": f"the process that simulated it died {answer.times} times"}
        row |= answer
        if answer["status"] == "ok":
            row["choices"] = _moved(case, change)
            row["saved_pct"] = 100 * (1 - answer["ms"] / base["ms"])
            row["cycles_saved_pct"] = 100 * (1 - answer["cycles"] / base["cycles"])
        yield row


def _moved(case: Case, change: Change) -> dict[str, list[Any]]:
    before, after = (choices(case.schedule, gpu, case.attention) for gpu in (case.gpu, change.on(case.gpu)))
    return {name: [value, after[name]] for name, value in before.items() if after[name] != value}


def _outcome_at(case: Case, changes: tuple[Change, ...], index: int) -> dict[str, Any]:
    return outcome(case, changes[index])


def tornado(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of :func:`what_if` with one line a name: time saved by kind of change, the largest gain first."""
    lines: dict[str, dict[str, Any]] = {}
    for row in sorted((row for row in rows if row["index"] >= 0), key=lambda row: row["index"]):
        line = lines.setdefault(row["change"], {"change": row["change"], "what": row["what"], "saved_pct": {}, "notes": []})
        line["saved_pct"][row["kind"]] = row.get("saved_pct")
        moved = [
            f"{row['kind']}: the schedule's own {name} goes from {before:g} to {after:g}; --set {name}={before:g} keeps it"
            for name, (before, after) in row.get("choices", {}).items()
        ]
        for note in (row["note"] if row["status"] == "ok" else row["reason"], *moved):
            if note and note not in line["notes"]:
                line["notes"].append(note)
    return sorted(lines.values(), key=lambda line: -max((v for v in line["saved_pct"].values() if v is not None), default=-1e9))
