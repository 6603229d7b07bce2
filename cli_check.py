"""``check``: races, deadlocks and budgets of a schedule. Exit code 0 where it is clean, 1 where it is not, 2 for bad input."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from . import cli
from .cli_options import PASS, SET, as_json, say
from .model.attention import Attention
from .model.gpu import GPU
from .model.schedule import Schedule

#: What is checked where no length is given: every row sees every key, a mask, and a mask under which some tiles have no keys.
PROBLEMS: tuple[dict[str, Any], ...] = (
    {"seqlen": 1024, "seqlen_kv": None, "causal": False},
    {"seqlen": 1024, "seqlen_kv": None, "causal": True},
    {"seqlen": 1152, "seqlen_kv": 850, "causal": True},
)


@click.command()
@click.argument("schedule", metavar="SCHEDULE|FILE.py")
@click.option("--gpu", metavar="NAME", help="Chip name, or a chip's .toml file [default: h100, or the first that runs it].")
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--heads", type=int, default=1, show_default=True, help="Query heads.")
@click.option("--heads-kv", type=int, help="Key/value heads [default: --heads].")
@click.option("--seqlen", type=int, help="Queries [default: three problems of about 1024].")
@click.option("--seqlen-kv", type=int, help="Keys [default: --seqlen].")
@click.option("--head-dim", type=int, default=128, show_default=True, help="Columns of Q and K.")
@click.option("--head-dim-v", type=int, help="Columns of V [default: --head-dim].")
@click.option("--causal", is_flag=True, help="Mask, aligned bottom-right.")
@click.option("--pass", "pass_", default="fwd", show_default=True, metavar="fwd|bwd|fwd+bwd", help=PASS)
@click.option("--dtype", default="bf16", show_default=True, metavar="bf16|fp16|fp8", help="Of Q, K, V and O.")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help=SET)
@click.option("--why", is_flag=True, help="Also list which op orders which accesses.")
@click.option("--trace", type=click.Path(path_type=Path), metavar="FILE.json", help="Draw what was followed (ui.perfetto.dev).")
@as_json
def check(schedule: str, why: bool, trace: Path | None, as_json: bool, **options: Any) -> None:
    """Find races, deadlocks and exceeded budgets of SCHEDULE, whatever the timing; of a user's own with FILE.py.

    A few tiles are followed op by op; every access must be known to come after those that it collides with. A trace shows the
    first problem that has a hazard (or the first), with its two operations and, in a deadlock, who waits for what.
    """
    if trace is not None and (trace.is_dir() or not trace.resolve().parent.is_dir()):
        raise ValueError(f"--trace {trace} cannot be written: it must be a file in a folder that exists")
    from .sim.hazards import check as judge

    chosen = cli._schedule(schedule, options["sets"])
    given = options["seqlen"] is not None or options["seqlen_kv"] is not None or options["causal"]
    problems = ({"seqlen": PROBLEMS[0]["seqlen"] if options["seqlen"] is None else options["seqlen"]},) if given else PROBLEMS
    chip = options["gpu"] or _chip(chosen, {**options, **problems[0]})
    verdicts, checked, refused = [], [], []
    for problem in problems:
        try:
            gpu, attention = cli._problem({**options, **problem, "gpu": chip, "gpu_sets": ()})
            with cli._working(f"checking {chosen.name} on {gpu.name}"):
                verdicts.append(judge(chosen, gpu, attention, orders=why))
            checked.append((gpu, attention))
        except ValueError as error:
            refused.append(str(error))
    if not verdicts:
        raise ValueError(refused[0])
    if as_json:
        cli._print_json([asdict(verdict) | {"clean": verdict.clean, "sentence": verdict.sentence} for verdict in verdicts])
    told: set[str] = set()
    for verdict in () if as_json else verdicts:
        first = not told & {finding.sentence for finding in verdict.findings[:1]}
        say(str(verdict) if first else f"{verdict.sentence.partition(';')[0]}, with the same first")
        told |= {finding.sentence for finding in verdict.findings}
        for order in verdict.orders:
            say(f"  {order.buffer}: {order.later} after {order.earlier}, by {order.by or 'the program order of its warp'}")
    for reason in dict.fromkeys(refused):
        click.echo(f"note: not all problems were checked: {reason}", err=True)
    if trace is not None:
        _draw(chosen, *checked[next((i for i, verdict in enumerate(verdicts) if not verdict.clean), 0)], trace)
    if not all(verdict.clean for verdict in verdicts):
        raise click.exceptions.Exit(1)


def _chip(schedule: Schedule, options: dict[str, Any]) -> str:
    """Where no chip is named: h100, or with a note the first that can run the schedule; h100 too where none can."""
    try:
        gpu, attention = cli._problem({**options, "gpu": "h100", "gpu_sets": ()})
        name = cli._home(schedule, attention)
    except ValueError:
        return "h100"
    if name != gpu.name:
        click.echo(f"note: {schedule.name} cannot run on {gpu.name}; it is checked on {name}, --gpu chooses another", err=True)
    return name


def _draw(schedule: Schedule, gpu: GPU, attention: Attention, path: Path) -> None:
    from .sim.hazard_trace import check_and_trace
    from .sim.trace import write_trace

    verdict, drawn = check_and_trace(schedule, gpu, attention)
    write_trace(drawn, path)
    what = "clean" if verdict.clean else verdict.findings[0].kind
    click.echo(f"trace of {verdict.problem} ({what}) in {path}; open it in ui.perfetto.dev", err=True)
    for note in drawn.notes:
        click.echo(f"note: {note}", err=True)
