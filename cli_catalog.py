"""What there is: ``gpus`` lists chips and their numbers, ``schedules`` the schedules, their fields and their Programs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from . import cli
from .cli_options import SET, say


@click.command()
@click.argument("name", required=False)
@click.option("--toml", is_flag=True, help="The chip's file, to start one of your own from.")
def gpus(name: str | None, toml: bool) -> None:
    """List the chips, or every number of one (its name, or a chip's .toml file) with its unit, kind and source."""
    from . import render
    from .model.gpu import GPUS, chip_text, load_gpu

    if name is None and toml:
        raise ValueError("--toml is of one chip: name it, as in flashsim gpus h200 --toml")
    if name is None:
        render.gpu_list([load_gpu(each) for each in GPUS])
    elif toml:
        load_gpu(name)
        say(render.chip_file(chip_text(name).decode()), end="")
    else:
        render.gpu_numbers(load_gpu(name))


@click.command()
@click.argument("schedule", required=False, metavar="[SCHEDULE|FILE.py]")
@click.option("--gpu", metavar="NAME", help="Chip [default: h100, or the first that runs it].")
@click.option("--seqlen", type=int, default=512, show_default=True, help="Queries and keys.")
@click.option("--head-dim", type=int, default=128, show_default=True, help="Columns of Q and K.")
@click.option("--causal", is_flag=True, help="Mask, aligned bottom-right.")
@click.option("--dtype", default="bf16", show_default=True, metavar="bf16|fp16|fp8")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help=SET)
def schedules(
    schedule: str | None, gpu: str | None, seqlen: int, head_dim: int, causal: bool, dtype: str, sets: Sequence[str]
) -> None:
    """List the schedules, or one's fields and its Program as text, for one head of a small problem.

    With FILE.py the user's own.
    """
    from . import render
    from .model.attention import Attention
    from .model.gpu import load_gpu
    from .model.schedule import lowered
    from .model.schedules import SCHEDULES

    if schedule is None:
        if sets or gpu is not None:
            raise ValueError("--set and --gpu are of one schedule: name it, as in flashsim schedules fa3")
        render.schedule_list(SCHEDULES)
        return
    chosen = cli._schedule(schedule, sets)
    cli._bounded({"seqlen": seqlen, "head_dim": head_dim})
    attention = Attention(batch=1, heads_q=1, seqlen_q=seqlen, head_dim=head_dim, causal=causal, dtype=dtype)
    chip = gpu or cli._home(chosen, attention)
    programs = lowered(chosen, load_gpu(chip), attention)
    render.schedule_fields(chosen)
    say(f"\n{attention.label} on {chip}:")
    for program in programs:
        say(f"\n{program}")

