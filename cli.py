"""The command line. Commands read options, call one function and print; what they print is in :mod:`.render`.

Bad input is one sentence on stderr and exit code 2, Ctrl-C exit code 130. What is heavy, a command imports when it needs it."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import math
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_options import as_json, problem_options, say
from .model.named import guess

if TYPE_CHECKING:
    from .model.attention import Attention
    from .model.gpu import GPU
    from .model.schedule import Schedule
    from .sim.predict import Result

SIZES = ("batch", "heads", "heads_kv", "seqlen", "seqlen_kv", "head_dim", "head_dim_v")
LARGEST = 2**31 - 1


class Sentence(click.ClickException):
    """An error of the user's, as one line on stderr."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"flashsim: {' '.join(self.message.split())}", err=True)


class Notes(logging.Handler):
    """What the package logs, as notes on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"note: {record.getMessage()}", err=True)


#: Commands of other modules, imported when they are asked for (those modules import this one).
ELSEWHERE = {
    "check": "cli_check", "explore": "cli_explore", "whatif": "cli_explore", "report": "cli_report", "plot": "cli_report",
    "view": "cli_report", "lineage": "cli_lineage", "accuracy": "cli_lineage", "optimum": "cli_optimum", "gpus": "cli_catalog",
    "schedules": "cli_catalog",
}


#: How ``flashsim --help`` lists them.
GROUPS = {
    "How fast, and what binds": ("predict", "compare", "whatif"), "What would be better": ("explore", "optimum"),
    "See it": ("trace", "view", "plot", "report"), "Is it right": ("check", "crosscheck", "accuracy", "lineage", "calibrate"),
    "What there is": ("schedules", "gpus"),
}  # fmt: skip
EXAMPLE = "flashsim predict fa3 --gpu h100 --batch 4 --heads 16 --seqlen 4096 --head-dim 128"


class Commands(click.Group):
    """A group that turns bad input into a sentence, knows the nearest command, and ends cleanly on Ctrl-C."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *ELSEWHERE})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What each command does, its first sentence whole (click would cut it off), by what is asked."""
        names = self.list_commands(ctx)
        told = [name for group in GROUPS.values() for name in group]
        for title, group in {**GROUPS, "Others": tuple(name for name in names if name not in told)}.items():
            commands = [(name, self.get_command(ctx, name)) for name in group]
            if commands:
                with formatter.section(title):
                    formatter.write_dl([(name, c.get_short_help_str(limit=1000)) for name, c in commands if c])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in ELSEWHERE and cmd_name not in self.commands:
            self.add_command(getattr(importlib.import_module(f".{ELSEWHERE[cmd_name]}", __package__), cmd_name))
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            raise Sentence(f"command {args[0]!r} is unknown{guess(args[0], names)} Known are {', '.join(names)}")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise Sentence(error.format_message()) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("flashsim: interrupted", err=True)
            raise click.exceptions.Exit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            reason = (error.strerror or str(error)).lower()
            raise Sentence(f"{error.filename}: {reason}" if error.filename else reason) from None
        except (ValueError, click.UsageError) as error:
            raise Sentence(error.format_message() if isinstance(error, click.UsageError) else str(error)) from None
        except Exception as error:
            from .model.user import blame

            sentence = blame(error)
            if sentence is None:
                raise
            raise Sentence(sentence) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=f"Example: {EXAMPLE}")
@click.version_option(package_name="flashsim", message="flashsim %(version)s")
def main() -> None:
    """Predict, explain and cross-check FlashAttention schedules without a GPU.

    SCHEDULE is one that "flashsim schedules" lists, or a Python file with your own. COMMAND --help says what a command takes.
    """
    log = logging.getLogger(__package__)
    if not any(isinstance(handler, Notes) for handler in log.handlers):
        log.addHandler(Notes())
        log.setLevel(logging.INFO)


@main.command()
@click.argument("schedule", metavar="SCHEDULE|FILE.py")
@problem_options
@as_json
def predict(schedule: str, as_json: bool, **options: Any) -> None:
    """Predict SCHEDULE: time, limiter, busy units, stalls, bytes, occupancy and bounds."""
    from . import render

    result = _simulate(_schedule(schedule, options["sets"]), *_problem(options), options)
    if as_json:
        _print_json(render.as_dict(result))
    else:
        render.prediction(result)


@main.command()
@click.argument("names", nargs=-1, required=True, metavar="SCHEDULE...")
@problem_options
@as_json
def compare(names: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Compare schedules on one problem, one row each. NAME:FIELD=VALUE,... sets switches of that row alone."""
    from . import render

    gpu, attention = _problem(options)
    chosen = []
    for label in names:
        name, _, switches = label.partition(":")
        chosen.append((label, _schedule(name, [*options["sets"], *(s for s in switches.split(",") if s)])))
    rows: list[tuple[str, Result | str]] = []
    for label, schedule in chosen:
        try:
            rows.append((label, _simulate(schedule, gpu, attention, options)))
        except ValueError as error:
            rows.append((label, str(error)))
    if as_json:
        _print_json(render.comparison_dict(rows))
    else:
        render.comparison(rows, gpu, attention)
    if all(isinstance(result, str) for _, result in rows):
        raise Sentence("none of these schedules can run this problem on this chip; see the rows above")


@main.command()
@click.argument("schedule", metavar="SCHEDULE|FILE.py")
@problem_options
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="JSON to write.")
@click.option("--limit", type=int, default=20_000, show_default=True, help="Records of one kernel to keep.")
@click.option("--blocks", type=int, help="CTAs of one kernel to keep [default: all].")
def trace(schedule: str, output: Path, limit: int, blocks: int | None, **options: Any) -> None:
    """Write the timeline of SCHEDULE as Chrome trace JSON, for ui.perfetto.dev."""
    for name, value in (("limit", limit), ("blocks", blocks)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be a whole number of at least 1: change --{name}")
    result = _simulate(_schedule(schedule, options["sets"]), *_problem(options), options, record_limit=limit + 1)
    from .sim.trace import trace as lay_out
    from .sim.trace import write_trace

    laid = lay_out(result, limit=limit, blocks=blocks)
    try:
        write_trace(laid, output)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"cannot write {output}: {reason}; choose another path for -o") from None
    for note in laid.notes:
        click.echo(f"note: {note}", err=True)
    say(f"{output}: {len(laid.events)} events; open it in ui.perfetto.dev")


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--by", metavar="NAMES", help="Groups: of gpu,kernel,pass,dtype,head_dim,causal [default: all that differ].")
@click.option("--rows", "every_row", is_flag=True, help="Also each row with its verdict.")
@as_json
def crosscheck(file: Path, by: str | None, every_row: bool, as_json: bool) -> None:
    """Predict each measured row of FILE (CSV) and say how far off it is, and why.

    Columns: gpu, kernel, batch, heads_q, seqlen_q, head_dim and one of ms, tflops (papers' convention) or cycles; any other
    of validate/data/published.csv.
    """
    from . import render_crosscheck

    keys = render_crosscheck.keys_of(by)
    check = _validate("crosscheck").crosscheck
    with _working(f"predicting the rows of {file}"):
        report = check(file)
    if as_json:
        _print_json(report)
    else:
        render_crosscheck.crosscheck(report, file=str(file), by=keys, every_row=every_row)


@main.command()
def calibrate() -> None:
    """Build and run the microbenchmarks where a GPU and nvcc are; otherwise say what is missing."""
    code = _validate("calibrate").main()
    if code:
        raise click.exceptions.Exit(int(code))


def _validate(module: str) -> Any:
    """A module of validate, imported when its command runs. Raises ValueError where this installation lacks it."""
    name = f"{__package__}.validate.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(f"this installation has no {name}: install flashsim with its validate folder") from None


def _problem(options: dict[str, Any]) -> tuple[GPU, Attention]:
    from .model.attention import Attention
    from .model.gpu import load_gpu
    from .model.sourced import TOLD

    gpu = load_gpu(options["gpu"])
    for text in options["gpu_sets"]:
        number, raw = _pair("--set-gpu", text)
        gpu = gpu.replace_number(number, _number("--set-gpu", number, raw))
        if number in TOLD:
            click.echo(f"note: {number} enters no prediction: {TOLD[number]}", err=True)
    _bounded({name: options[name] for name in SIZES})
    attention = Attention(
        batch=options["batch"], heads_q=options["heads"], seqlen_q=options["seqlen"], head_dim=options["head_dim"],
        heads_kv=options["heads_kv"], seqlen_kv=options["seqlen_kv"], head_dim_v=options["head_dim_v"],
        causal=options["causal"], dtype=options["dtype"], pass_=options["pass_"],
    )
    return gpu, attention


def _home(schedule: Schedule, attention: Attention) -> str:
    """Where no chip is named: h100, or the first that can run the schedule. Raises h100's ValueError where none can."""
    from .model.gpu import GPUS, load_gpu
    from .model.schedule import lowered

    refusals: list[ValueError] = []
    for name in dict.fromkeys(("h100", *GPUS)):
        try:
            lowered(schedule, load_gpu(name), attention)
        except ValueError as error:
            refusals.append(error)
        else:
            return name
    raise refusals[0]


def _bounded(sizes: Mapping[str, int | None]) -> None:
    """Raises ValueError for a size that no problem has."""
    for name, value in sizes.items():
        if (value or 0) > LARGEST:
            raise ValueError(f"{name} is {value}; it must be at most {LARGEST}: change --{name.replace('_', '-')}")


def _schedule(name: str, sets: Iterable[str]) -> Schedule:
    """A shipped schedule by name, or the one that a user's file defines, with the fields that ``sets`` give."""
    from .model.schedules import get_schedule
    from .model.user import is_file, load, with_fields
    from .sim.space import read_value

    schedule: Any = load(Path(name)) if is_file(name) else get_schedule(name)
    known = {f.name for f in fields(schedule)} if is_dataclass(schedule) else set()
    hints = typing.get_type_hints(type(schedule)) if known else {}
    values: dict[str, Any] = {}
    for text in sets:
        field, raw = _pair("--set", text)
        values[field] = read_value(field, raw, hints[field], "--set") if field in known else raw
    return with_fields(schedule, values) if is_file(name) else get_schedule(name, **values)


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise ValueError(f"{option} got {text!r}; write {option} name=value")
    return name.strip(), value.strip()


def _number(option: str, name: str, raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{option} {name} got {raw!r}; it takes a finite number")
    return value


def _simulate(
    schedule: Schedule, gpu: GPU, attention: Attention, options: dict[str, Any], *, record_limit: int = 0
) -> Result:
    clock, how = options["clock"], {name: options[name] for name in ("engine", "scope", "repeats")}
    if clock not in ("boost", "power"):
        with suppress(ValueError):  # simulate says what a clock may be
            clock = float(clock)
    from .sim.forecast import forecast
    from .sim.predict import simulate

    what = f"simulating {schedule.name} on {gpu.name}"
    try:
        with _working(what):
            about = forecast(schedule, gpu, attention)
        if about:
            click.echo(f"note: {about.sentence}", err=True)
        with _working(what, about.seconds if about else None):
            return simulate(schedule, gpu, attention, clock=clock, record_limit=record_limit, **how)
    except ArithmeticError as error:
        asked = ", ".join([*options["sets"], *options["gpu_sets"]]) or "these sizes"
        raise ValueError(f"{schedule.name} cannot run with {asked} ({error}): change these numbers") from None
    except MemoryError:
        raise ValueError(f"{attention.label} is too large for this machine's memory: use smaller sizes") from None


@contextmanager
def _working(what: str, about_s: float | None = None) -> Iterator[None]:
    """A spinner on stderr while something runs, where a person looks; with ``about_s`` the seconds gone, of about so many."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description} ..."))
    if about_s:
        columns = (*columns, BarColumn(), TimeElapsedColumn(), TextColumn(f"of about {about_s:,.0f} s"))  # type: ignore[assignment]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def _print_json(value: Any) -> None:
    say(json.dumps(value, indent=2))


if __name__ == "__main__":
    main()
