"""``lineage``: the table of generations, and what each of their ideas is worth. ``accuracy``: every measurement that is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from . import cli
from .cli_options import as_json, say


@click.command()
@click.option("--ideas", "with_ideas", is_flag=True, help="Each idea as a switch: the generation with it and without it.")
@click.option("--idea", "names", multiple=True, metavar="NAME", help="Of --ideas this one alone; may be repeated.")
@click.option("--gpu", "gpus", multiple=True, metavar="NAME", help="Of --ideas: on this chip [default: own and neighbours].")
@as_json
def lineage(with_ideas: bool, names: tuple[str, ...], gpus: tuple[str, ...], as_json: bool) -> None:
    """The table of generations: predicted beside published, and what binds each."""
    from . import render_lineage

    asked = with_ideas or bool(names)
    if gpus and not asked:
        raise ValueError("--gpu chooses chips for --ideas; each generation's row has a chip of its own: add --ideas")
    with _progress("predicting the lineage") as tell:
        if asked:
            rows = cli._validate("ideas").ideas(names, gpus, progress=tell)
        else:
            rows = cli._validate("lineage").lineage(progress=tell)
    if as_json:
        cli._print_json(rows)
    elif asked:
        render_lineage.ideas(rows)
    else:
        render_lineage.lineage(rows)


@click.command()
@click.option("--markdown", is_flag=True, help="As a Markdown table.")
@as_json
def accuracy(markdown: bool, as_json: bool) -> None:
    """How near the model is to all measurements that are kept, with the targets (some minutes).

    Errors are of the predicted time, or cycles where rows have them; negative is faster than measured.
    """
    from . import render_lineage

    if markdown and as_json:
        raise ValueError("--markdown and --json are two forms of one table; give one")
    measured = cli._validate("accuracy")
    with _progress("predicting") as tell:
        rows = measured.accuracy(progress=tell)
    if as_json:
        cli._print_json(rows)
    elif markdown:
        say(measured.markdown(rows))
    else:
        render_lineage.accuracy(rows)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that says what is under way, where a person looks."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(f"{what} ...") as status:
        yield lambda text: status.update(f"{what}: {escape(text)} ...")
