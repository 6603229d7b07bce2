"""``explore`` and ``whatif``: the commands that simulate many candidates. What they print is in :mod:`.render_explore`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli
from .cli_options import as_json, problem_options
from .model.assumed import assumptions

if TYPE_CHECKING:
    from .model.attention import Attention
    from .model.gpu import GPU
    from .model.schedule import Schedule
    from .sim.explore import Row, Sweep
    from .sim.sweep_file import SweepFile
    from .sim.whatif import Case, Change
    from .sim.workers import Workers

NEEDED = ("batch", "heads", "seqlen", "head_dim")
#: Stands in for sizes that depend on the candidate: each candidate's problem is checked when its turn comes.
ANY_PROBLEM = {**dict.fromkeys(NEEDED, 1), "heads_kv": None, "seqlen_kv": None, "head_dim_v": None}

_FILE = click.Path(path_type=Path)


def workers_options(command: Callable[..., None]) -> Callable[..., None]:
    """Where the simulations run."""
    command = click.option("--jobs", type=int, help="Processes [default: one a processor].")(command)
    return click.option("--dask", metavar="ADDRESS", help="Run on the workers of this Dask scheduler instead.")(command)


def _sizes_may_vary(command: click.Command) -> click.Command:
    """Sizes need no option where they are varied; :func:`_sweep` asks for those that are neither."""
    for option in command.params:
        if option.name in NEEDED:
            option.required = False
    return command


def _one_sm(command: click.Command) -> click.Command:
    """Candidates are simulated at SM scope alone: without the option nobody takes them for the whole chip's."""
    command.params = [option for option in command.params if option.name != "scope"]
    return command


@_sizes_may_vary
@_one_sm
@click.command()
@click.argument("schedule", metavar="SCHEDULE|FILE.py")
@click.argument("more", nargs=-1, metavar="[FIELD=VALUES]...")
@problem_options
@click.option("--vary", "varied", multiple=True, metavar="FIELD=VALUES", help="block_kv=32,64  stages=2:4  gpu.pipe.ex2=4:8:2")
@click.option("--max-candidates", type=int, default=2000, show_default=True, help="Largest grid that is simulated whole.")
@click.option("--trials", type=int, help="Search a large space with Optuna: so many candidates.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search.")
@workers_options
@click.option("-o", "--output", type=_FILE, metavar="FILE", help="Parquet to write as rows come; replaces no file but a sweep.")
@click.option("--overwrite", is_flag=True, help="Replace the sweep that FILE of -o holds (no other file).")
@click.option("--resume", type=_FILE, metavar="FILE", help="Go on with an interrupted sweep.")
@click.option("--top", type=int, default=10, show_default=True, help="Rows of the table of the best.")
@click.option("--heatmap", type=(str, _FILE), metavar="X,Y FILE", help="Two varied fields as a picture.")
@as_json
def explore(schedule: str, more: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Simulate SCHEDULE over every combination of the varied FIELDs: the best, the Pareto front, and what matters.

    Fields are the schedule's, clock, the problem's sizes (seqlen, heads, causal ...) and the chip's numbers (gpu.pipe.ex2).
    VALUES are lists (1,2,3), ranges with their stop (2:8, 64:256:64), or nothing for both states of a switch. Candidates that
    cannot run are counted by reason.
    """
    from . import render_explore
    from .sim.explore import planned
    from .sim.findings import report

    with cli._working("starting"):
        sweep = _sweep(schedule, [*options["varied"], *more], options)
    plan = planned(sweep.space, options["trials"], options["max_candidates"])
    _checked_options(sweep, options)
    known, file = _files(sweep, plan, options)
    rows, interrupted = _run(sweep, plan, known, file, options)
    saved = file.save(rows.values()) if file else True
    notes = list(assumptions(sweep.schedule, sweep.gpu))
    found = {**report(sweep, list(rows.values()), planned=plan), "notes": notes}
    if as_json:
        cli._print_json(found)
    else:
        render_explore.exploration(sweep, found, top=options["top"])
    _finish(sweep, found, file, saved, interrupted, options)


def _finish(
    sweep: Sweep, found: Mapping[str, Any], file: SweepFile | None, saved: bool, interrupted: bool, options: Mapping[str, Any]
) -> None:
    """After the tables: the picture, and the sentence and exit code of what went wrong."""
    from . import render_explore
    from .sim.findings import heat_map

    if file and not saved:
        raise cli.Sentence(f"cannot write {file.path}: {file.trouble}; rows are in the table only: choose another path for -o")
    if interrupted:
        kept = f"; {file.path} keeps {found['evaluated']} of {found['planned']} candidates: go on with --resume" if file else ""
        click.echo(f"flashsim: interrupted{kept}", err=True)
        raise click.exceptions.Exit(130)
    if not found["ok"]:
        raise cli.Sentence(f"none of the {found['evaluated']} candidates can run: see the reasons above, and vary something else")
    if options["heatmap"]:
        (x, y), path = _heat_axes(sweep, options["heatmap"][0]), options["heatmap"][1]
        with _writing(path, "--heatmap"):
            sizes = " ".join(f"{name}={sweep.problem[name]}" for name in NEEDED if sweep.problem[name] is not None)
            title = f"{sweep.schedule.name} on {sweep.gpu.name}\n{sizes}"
            render_explore.heat_png(heat_map(sweep, found["rows"], x, y), sweep.objective, title, path)


@contextmanager
def _writing(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise cli.Sentence(f"cannot write {path}: {reason}; choose another path for {option}") from None


def _sweep(name: str, texts: Sequence[str], options: dict[str, Any]) -> Sweep:
    """The sweep that the options describe. Raises ValueError for what cannot be."""
    from .sim.explore import Sweep
    from .sim.space import PROBLEM, parse_space, usual_space

    texts = [part for text in texts for part in text.split()]
    schedule = cli._schedule(name, options["sets"])
    set_fields = [cli._pair("--set", text)[0] for text in options["sets"]]
    set_numbers = [f"gpu.{cli._pair('--set-gpu', text)[0]}" for text in options["gpu_sets"]]
    named = {text.partition("=")[0].strip() for text in texts}
    for size in NEEDED:
        if options[size] is None and size not in named:
            option = f"--{size.replace('_', '-')}"
            raise ValueError(f"{size} is neither given nor varied: give {option}, or --vary {size}=a,b,c")
    gpu, _ = cli._problem({**options, **(ANY_PROBLEM if named & set(PROBLEM) else {})})
    space = parse_space(texts or usual_space(schedule, set_fields), schedule, gpu, fixed=[*set_fields, *set_numbers])
    problem = {size: options.get("pass_" if size == "pass" else size) for size in PROBLEM}
    return Sweep(
        schedule=schedule, gpu=gpu, problem=problem, space=space, clock=_clock(options["clock"], gpu), engine=_engine(options)
    )


def _clock(text: str, gpu: GPU) -> float | str:
    from .sim.predict import cap_mhz

    if text in ("boost", "power"):
        return text
    clock: float | str = text
    with suppress(ValueError):  # cap_mhz says what a clock may be
        clock = float(text)
    return cap_mhz(gpu, clock)


def _engine(options: Mapping[str, Any]) -> str:
    from .sim.predict import ENGINES

    engine = str(options["engine"])
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    return engine


def _checked_options(sweep: Sweep, options: Mapping[str, Any]) -> None:
    """Refuse before the sweep what could only fail after it. Raises ValueError."""
    from .sim.extras import extra

    if options["top"] < 1:
        raise ValueError(f"top is {options['top']}; it must be a whole number of at least 1: change --top")
    if options["seed"] < 0 or options["seed"] >= 2**32:
        raise ValueError(f"seed is {options['seed']}; it must be from 0 to {2**32 - 1}: change --seed")
    if options["trials"] is not None:
        extra("optuna", "explore", "--trials")
    if options["heatmap"]:
        extra("matplotlib", "plot", "--heatmap")
        _heat_axes(sweep, options["heatmap"][0])


def _heat_axes(sweep: Sweep, text: str) -> tuple[str, str]:
    names = [axis.name for axis in sweep.space.axes]
    chosen = [part.strip() for part in text.split(",")]
    chosen = [f"gpu.{name}" if name not in names and f"gpu.{name}" in names else name for name in chosen]
    if len(chosen) != 2 or chosen[0] == chosen[1] or not set(chosen) <= set(names):
        raise ValueError(f"--heatmap got {text!r}; it takes two of the varied fields, as in x,y: {', '.join(names)}")
    return chosen[0], chosen[1]


def _files(sweep: Sweep, plan: int, options: Mapping[str, Any]) -> tuple[dict[int, Row], SweepFile | None]:
    """Rows of the file that is gone on with, and the file that rows go to. Raises ValueError."""
    from .sim.sweep_file import SweepFile, read_rows

    resume: Path | None = options["resume"]
    known = read_rows(resume, sweep) if resume else {}
    path = options["output"] or resume
    if path is None:
        return known, None
    command = shlex.join(["flashsim", *sys.argv[1:]])
    replace = options["overwrite"] or (resume is not None and path.absolute() == resume.absolute())
    return known, SweepFile(path=path, sweep=sweep, planned=plan, command=command, replace=replace)


def _run(
    sweep: Sweep, plan: int, known: Mapping[int, Row], file: SweepFile | None, options: Mapping[str, Any]
) -> tuple[dict[int, Row], bool]:
    """All rows, and whether Ctrl-C came before the last. Whatever ends it, ``file`` has what was done."""
    from .sim.explore import candidate
    from .sim.explore import explore as rows_of

    rows = dict(known)
    try:
        with _workers(options, plan - len(rows)) as workers, _progress("exploring", plan, len(rows)) as advance:
            for row in rows_of(sweep, workers, trials=options["trials"], seed=options["seed"], known=known):
                rows[candidate(row)] = row
                advance()
                if file:
                    file.save_if_due(rows.values())
    except KeyboardInterrupt:
        return rows, True
    except BaseException:
        if file and len(rows) > len(known):
            file.save(rows.values())
        raise
    return rows, False


def _workers(options: Mapping[str, Any], tasks: int) -> AbstractContextManager[Workers]:
    from .sim.workers import dask, default_jobs, local

    if options["dask"]:
        return dask(options["dask"])
    jobs = options["jobs"]
    return local(max(1, min(default_jobs(), tasks)) if jobs is None else jobs)


@contextmanager
def _progress(what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
    """A bar on stderr with rate, time gone and left, where a person looks; yields what to call after each candidate."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )  # fmt: skip
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed:.1f}/s" if task.speed else "")

    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), Rate(), *times)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda: progress.advance(task)


# --- what if ---


@_one_sm
@click.command()
@click.argument("schedule", metavar="SCHEDULE|FILE.py")
@problem_options
@click.option("--free", "freed", multiple=True, metavar="UNIT", help="It costs nothing: a unit, an instruction or a number.")
@click.option("--scale", "scaled", multiple=True, metavar="UNIT=FACTOR", help="mufu=2: twice as fast.")
@click.option("--from", "donor", metavar="CHIP", help="Another chip: what if this one had its units?")
@click.option("--take", "taken", multiple=True, metavar="UNIT", help="What to take of --from [default: each unit in turn].")
@workers_options
@click.option("--plot", type=_FILE, metavar="FILE", help="The tornado as a picture.")
@as_json
def whatif(schedule: str, as_json: bool, **options: Any) -> None:
    """What the units of a chip cost SCHEDULE: each one free, twice as fast and half as fast; or the changes asked for.

    UNIT is a unit of the chip (mufu, tensor, port, smem, l2, hbm latency ...), an instruction (ex2), a section (pipe) or a number
    (pipe.ex2). --set-gpu is a change like the others. Several changes are shown one by one and together.
    """
    from . import render_explore
    from .sim.extras import extra
    from .sim.whatif import tornado, what_if

    if options["plot"]:
        extra("matplotlib", "plot", "--plot")
    with cli._working("starting"):
        case, changes = _case(schedule, options)
    rows: list[dict[str, Any]] = []
    with _workers(options, len(changes)) as workers, _progress("simulating", len(changes) + 1) as advance:
        for row in what_if(case, changes, workers):
            rows.append(row)
            advance()
    rows.sort(key=lambda row: int(row["index"]))
    lines = tornado(rows)
    if as_json:
        base, *others = rows
        head = {"schedule": case.schedule.name, "gpu": case.gpu.name, "problem": case.attention.label}
        notes = list(assumptions(case.schedule, case.gpu, case.attention))
        cli._print_json({**head, "notes": notes, "base": base, "rows": others, "tornado": lines})
    else:
        render_explore.what_if(case, rows, lines)
    if options["plot"]:
        with _writing(options["plot"], "--plot"):
            render_explore.tornado_png(lines, f"{case.schedule.name} on {case.gpu.name}: {case.attention.label}", options["plot"])


def _case(name: str, options: Mapping[str, Any]) -> tuple[Case, list[Change]]:
    """What is studied and how the chip is changed. Raises ValueError for what cannot be."""
    from .model.gpu import load_gpu
    from .sim import whatif as w

    schedule: Schedule = cli._schedule(name, options["sets"])
    problem: tuple[GPU, Attention] = cli._problem({**options, "gpu_sets": ()})
    gpu, attention = problem
    changes = [w.free(gpu, unit) for unit in options["freed"]]
    for text in options["scaled"]:
        unit, raw = cli._pair("--scale", text)
        changes.append(w.scale(gpu, unit, cli._number("--scale", unit, raw)))
    if options["gpu_sets"]:
        pairs = [cli._pair("--set-gpu", text) for text in options["gpu_sets"]]
        changes.append(w.set_numbers(gpu, {number: cli._number("--set-gpu", number, raw) for number, raw in pairs}))
    if options["taken"] and not options["donor"]:
        raise ValueError("--take needs the chip to take it from: give --from CHIP")
    if options["donor"]:
        other = load_gpu(options["donor"])
        changes += [w.take(gpu, other, unit) for unit in options["taken"]] or w.every_swap(gpu, other)
        if not changes:
            raise ValueError(f"{gpu.name} and {other.name} have the same numbers in every unit: choose another chip for --from")
    if len(changes) > 1:
        changes.append(w.together(changes))
    clock, engine = _clock(options["clock"], gpu), _engine(options)
    case = w.Case(schedule=schedule, gpu=gpu, attention=attention, clock=clock, engine=engine)
    return case, changes or w.every_unit(gpu)
