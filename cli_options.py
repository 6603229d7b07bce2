"""Options that several commands have, each with its help."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

CLOCK = "Of the SMs: MHz is a cap and the power limit holds below it; power caps at boost; boost ignores power."
REPEATS = "Mean of the first N launches after a rest, as benchmarks time [default: 0, a load that has settled]."
PASS = "So far fwd alone runs."
SET = "A switch of the schedule (flashsim schedules NAME lists them); may be repeated."
SET_GPU = "A number of the chip (flashsim gpus NAME lists them), as in pipe.ex2=4; may be repeated."
SCOPE = "One SM with its share of L2 and HBM, or every SM and what they share."


def problem_options(command: Callable[..., None]) -> Callable[..., None]:
    """The problem, the chip and how it is run: the same options for predict, compare and trace."""
    options = (
        click.option("--gpu", required=True, metavar="NAME", help="Chip (flashsim gpus), or the path of a chip's .toml file."),
        click.option("--batch", type=int, required=True, help="Sequences."),
        click.option("--heads", type=int, required=True, help="Query heads."),
        click.option("--heads-kv", type=int, help="Key/value heads [default: --heads]."),
        click.option("--seqlen", type=int, required=True, help="Queries."),
        click.option("--seqlen-kv", type=int, help="Keys [default: --seqlen]."),
        click.option("--head-dim", type=int, required=True, help="Columns of Q and K."),
        click.option("--head-dim-v", type=int, help="Columns of V [default: --head-dim]."),
        click.option("--causal", is_flag=True, help="Mask, aligned bottom-right."),
        click.option("--pass", "pass_", default="fwd", show_default=True, metavar="fwd|bwd|fwd+bwd", help=PASS),
        click.option("--dtype", default="bf16", show_default=True, metavar="bf16|fp16|fp8", help="Of Q, K, V and O."),
        click.option("--clock", default="power", show_default=True, metavar="MHZ|boost|power", help=CLOCK),
        click.option("--repeats", type=int, default=0, metavar="N", help=REPEATS),
        click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help=SET),
        click.option("--set-gpu", "gpu_sets", multiple=True, metavar="NUMBER=VALUE", help=SET_GPU),
        click.option("--engine", default="fast", show_default=True, metavar="fast|simpy", help="Alike in result; simpy is slow."),
        click.option("--scope", type=click.Choice(["sm", "chip"]), default="sm", show_default=True, help=SCOPE),
    )
    for option in reversed(options):
        command = option(command)
    return command


as_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def say(text: str, *, end: str = "\n") -> None:
    """Print on stdout, by lines. Raises OSError where not all of it could be written: of a long text that is written at once
    (``print``, ``click.echo``) Python's buffer drops what a full disk did not take, and tells nobody."""
    for line in (text + end).splitlines(keepends=True):
        sys.stdout.write(line)
    sys.stdout.flush()
