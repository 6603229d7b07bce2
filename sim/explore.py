"""Explore: one row a candidate of a :class:`~flashsim.sim.space.Space`, all of them or those that Optuna picks.

    sweep = Sweep(schedule=get_schedule("fa2"), gpu=load_gpu("h100"), problem=problem, space=space)
    with local(jobs=2) as workers:
        rows = sorted(explore(sweep, workers), key=candidate)

A row is a function of the sweep and the candidate's number alone, so it is the same whoever computes it, and in whatever order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from importlib.metadata import version
from typing import Any, cast

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.profiles import origin
from ..model.schedule import Schedule
from .extras import extra
from .predict import simulate
from .space import PROBLEM, Axis, Space, Value
from .workers import Died, Workers

Row = dict[str, Any]

#: What a candidate's row holds beside its number and its values. Registers and SMEM are the longest kernel's; ``counts_from``:
#: where its instruction counts come from, as :func:`~flashsim.model.profiles.origin` says it.
RESULTS = {
    "cycles": float, "ms": float, "tflops": float, "utilization": float, "limiter": str, "registers_per_thread": int,
    "smem_bytes_per_cta": int, "ctas_per_sm": int, "clock_mhz": float, "counts_from": str, "status": str, "reason": str,
}  # fmt: skip
STATUSES = ("ok", "pruned", "failed")

MAX_CANDIDATES = 2000
BATCH = 16  # candidates that Optuna proposes before it hears of any of them; whatever the number of jobs, so that rows are too
REPEATS = 8  # proposals that were tried before, until a random new candidate is taken instead
ATTENTION_NAMES = {"heads": "heads_q", "seqlen": "seqlen_q", "pass": "pass_"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """``schedule`` on ``gpu`` over ``space``. ``problem``: sizes by the names of ``space.PROBLEM``; those left out, or None,
    follow as in :class:`~flashsim.model.attention.Attention`. ``clock``, ``engine``: as ``simulate`` takes them.
    """

    schedule: Schedule
    gpu: GPU
    problem: Mapping[str, Any]
    space: Space
    clock: float | str = "power"
    engine: str = "fast"

    @property
    def objective(self) -> str:
        """What is best: the least time, or the most TFLOP/s where the problem varies and times are not alike."""
        return "tflops" if any(axis.kind == "problem" for axis in self.space.axes) else "ms"

    @property
    def names(self) -> tuple[str, ...]:
        """What is varied."""
        return tuple(axis.name for axis in self.space.axes)

    @property
    def size(self) -> int:
        """Candidates of the whole space."""
        return self.space.size

    def candidate(self, number: int) -> tuple[Schedule, GPU, Attention, float | str]:
        """(schedule, chip, problem, clock) of one candidate. Raises ValueError where they cannot be."""
        kinds: dict[str, dict[str, Value]] = {"schedule": {}, "problem": {}, "gpu": {}, "clock": {"clock": self.clock}}
        for axis, (name, value) in zip(self.space.axes, self.space.at(number).items(), strict=True):
            kinds[axis.kind][name] = value
        schedule, gpu = self.schedule, self.gpu
        if kinds["schedule"]:
            schedule = dataclasses.replace(cast(Any, schedule), **kinds["schedule"])
        for name, number_ in kinds["gpu"].items():
            gpu = gpu.replace_number(name.removeprefix("gpu."), cast(float, number_))
        sizes = {ATTENTION_NAMES.get(name, name): value for name, value in {**self.problem, **kinds["problem"]}.items()}
        attention = Attention(**{name: value for name, value in sizes.items() if value is not None})
        return schedule, gpu, attention, cast("float | str", kinds["clock"]["clock"])

    def identity(self) -> dict[str, Any]:
        """Everything that a row depends on, in plain words: two sweeps with one identity have the same rows."""
        fields: dict[str, Any] = dataclasses.asdict(cast(Any, self.schedule)) if dataclasses.is_dataclass(self.schedule) else {}
        return {
            "flashsim": version("flashsim"),
            "schedule": self.schedule.name,
            "fields": {name: repr(value) for name, value in fields.items()},
            "gpu": self.gpu.name,
            "gpu_numbers": numbers_digest(self.gpu),
            "problem": {name: self.problem[name] for name in PROBLEM if self.problem.get(name) is not None},
            "clock": self.clock,
            "engine": self.engine,
            "vary": {axis.name: axis.text for axis in self.space.axes},
        }

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


def numbers_digest(gpu: GPU) -> str:
    """Tells chips apart whose numbers differ."""
    numbers = "\n".join(f"{name} {float(value)!r}" for name, value in gpu.numbers())
    return hashlib.sha256(numbers.encode()).hexdigest()


def candidate(row: Row) -> int:
    """The candidate's number: the order of every table and file."""
    return int(row["candidate"])


def column(name: str) -> str:
    """The column of an axis: its name, or ``set.name`` where a result is called so."""
    return f"set.{name}" if name in RESULTS or name == "candidate" else name


def evaluate(sweep: Sweep, number: int) -> Row:
    """The row of one candidate. One that cannot run has the status "pruned" and the sentence why; a defect gives "failed"."""
    answer: dict[str, Any] = {}
    try:
        schedule, gpu, attention, clock = sweep.candidate(number)
        result = simulate(schedule, gpu, attention, engine=sweep.engine, clock=clock)
    except ValueError as error:
        return row_of(sweep, number, {"status": "pruned", "reason": " ".join(str(error).split())})
    except ArithmeticError as error:
        reason = f"{sweep.schedule.name} cannot run with these numbers ({error})"
        return row_of(sweep, number, {"status": "pruned", "reason": reason})
    except MemoryError:
        return row_of(sweep, number, {"status": "pruned", "reason": "too large for the memory of the machine that simulates it"})
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return row_of(sweep, number, {"status": "failed", "reason": reason})
    longest = max(result.launches, key=lambda launch: launch.cycles)
    answer = {
        "cycles": float(result.cycles), "ms": float(result.ms), "tflops": float(result.tflops),
        "utilization": float(result.utilization), "limiter": result.limiter,
        "registers_per_thread": int(longest.program.registers), "smem_bytes_per_cta": int(longest.program.smem_bytes),
        "ctas_per_sm": int(longest.occupancy.ctas_per_sm), "clock_mhz": float(result.clock_mhz),
        "counts_from": " and ".join(sorted({origin(label) for label in result.counts_from})), "status": "ok",
    }  # fmt: skip
    return row_of(sweep, number, answer)


def row_of(sweep: Sweep, number: int, answer: Mapping[str, Any]) -> Row:
    """A row: number, values of the axes, then RESULTS with None for what ``answer`` lacks."""
    values = {column(name): value for name, value in sweep.space.at(number).items()}
    return {"candidate": number, **values, **{name: answer.get(name) for name in RESULTS}}


def planned(space: Space, trials: int | None, max_candidates: int = MAX_CANDIDATES) -> int:
    """How many candidates a sweep will have: the whole grid, or ``trials`` of a larger space.

    Raises ValueError where the grid is larger than ``max_candidates`` and no ``trials`` are given.
    """
    for name, value in (("trials", trials), ("max-candidates", max_candidates)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be a whole number of at least 1: change --{name}")
    if trials is not None:
        return min(trials, space.size)
    if space.size > max_candidates:
        raise ValueError(
            f"the space has {space.size:,} combinations, more than --max-candidates {max_candidates:,}: give --trials N to"
            " search it with Optuna, vary less, or raise --max-candidates"
        )
    return space.size


def explore(
    sweep: Sweep, workers: Workers, *, trials: int | None = None, seed: int = 0, known: Mapping[int, Row] | None = None
) -> Iterator[Row]:
    """Rows of the sweep as they are ready, without those already ``known`` (candidate -> row).

    The whole grid, or with ``trials`` fewer than its size so many candidates that Optuna's TPE picks; which ones depends on
    ``seed`` and on the rows, never on the workers or on what was known. Raises ValueError where a library or workers are missing.
    """
    known = known or {}
    if trials is None or trials >= sweep.space.size:
        numbers = (number for number in range(sweep.space.size) if number not in known)
        innermost = len(sweep.space.axes[-1].values) if sweep.names else 1  # neighbours along it have the most in common
        yield from _rows(sweep, workers, numbers, family=lambda number: number // innermost)
        return
    yield from _search(sweep, workers, trials, seed, known)


def _rows(
    sweep: Sweep, workers: Workers, numbers: Iterator[int], *, family: Callable[[int], int] | None = None
) -> Iterator[Row]:
    for number, row in workers.answers(partial(evaluate, sweep), numbers, family=family):
        if isinstance(row, Died):
            reason = f"the process that simulated it died {row.times} times, perhaps for want of memory"
            row = row_of(sweep, number, {"status": "failed", "reason": reason})
        yield row


def _search(sweep: Sweep, workers: Workers, trials: int, seed: int, known: Mapping[int, Row]) -> Iterator[Row]:
    """Optuna proposes BATCH candidates, hears of all of them in their order, and proposes again."""
    optuna = extra("optuna", "explore", "--trials")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
    distributions = {axis.name: _distribution(optuna, axis) for axis in sweep.space.axes}
    seen: dict[int, Row] = {}
    draw = random.Random(seed)
    while len(seen) < trials:
        batch: dict[int, Any] = {}
        repeats = 0
        while len(batch) < min(BATCH, trials - len(seen)):
            if repeats == REPEATS:
                _enqueue_fresh(study, sweep.space, draw, seen.keys() | batch.keys())
            trial = study.ask(distributions)
            number = sweep.space.number(trial.params[axis.name] for axis in sweep.space.axes)
            repeats = repeats + 1 if number in seen or number in batch else 0
            if number in seen:
                _tell(optuna, study, trial, sweep, seen[number])
            elif number in batch:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)  # its answer is under way
            else:
                batch[number] = trial
        rows = {number: known[number] for number in batch if number in known}
        for row in _rows(sweep, workers, (number for number in batch if number not in known)):
            rows[candidate(row)] = row
            yield row
        for number, trial in batch.items():
            _tell(optuna, study, trial, sweep, rows[number])
        seen |= rows


def _distribution(optuna: Any, axis: Axis) -> Any:
    """Of the places of an axis' values: neighbours are alike only where the values are numbers that rise."""
    if axis.ordered:
        return optuna.distributions.IntDistribution(0, len(axis.values) - 1)
    return optuna.distributions.CategoricalDistribution(range(len(axis.values)))


def _enqueue_fresh(study: Any, space: Space, draw: random.Random, tried: Set[int]) -> None:
    """Make the next proposal one that was not tried: the sampler keeps returning to what it knows."""
    number = draw.randrange(space.size)
    while number in tried:
        number = (number + 1) % space.size
    study.enqueue_trial({axis.name: place for axis, place in zip(space.axes, space.places(number), strict=True)})


def _tell(optuna: Any, study: Any, trial: Any, sweep: Sweep, row: Row) -> None:
    if row["status"] == "ok":
        study.tell(trial, loss(sweep.objective, row))
    else:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)


def loss(objective: str, row: Row) -> float:
    """What is to be small: milliseconds, or seconds a TFLOP."""
    return float(row["ms"]) if objective == "ms" else 1 / float(row["tflops"])
