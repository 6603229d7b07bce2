"""What ``flashsim lineage`` and ``accuracy`` print: generations, what each idea is worth, errors against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from .render import _console, _signed, _size, _table, brief


def lineage(entries: Sequence[Mapping[str, Any]]) -> None:
    """One row a generation, then the chain of speed-ups, then what binds each and where its published number comes from."""
    console = _console()
    table = _table("Lineage, forward", "generation", "gpu", "TFLOP/s", "published", "error", "MHz", "HBM", text=2)
    for row in entries:
        published, error = row["published_tflops"], row["error_pct"]
        table.add_row(
            row["generation"], row["gpu"], f"{row['predicted_tflops']:.1f}", f"{published:.1f}" if published else "-",
            _signed(error) if published else "-", f"{row['clock_mhz']:.0f}", _size(row["hbm_gb"] * 1e9),
        )  # fmt: skip
    console.print(table)
    console.print("error: of the predicted time, negative is faster than published\n")
    chain = _table("Speed-ups", "generation", "over", "predicted", "published", text=2)
    for row in entries:
        for step in row["speedups"]:
            published = step["published"]
            words = f"{published[0]:.2f}x" if published and published[0] == published[1] else ""
            if published and not words:
                words = f"{published[0]:.1f} to {published[1]:.1f}x"
            chain.add_row(row["generation"], step["over"], f"{step['predicted']:.2f}x", words or "-")
    console.print(chain)
    console.print()
    binds = _table("What binds", "generation", "limiter", "problem; switches; published in", text=3)
    for row in entries:
        switches = "".join(f"{name}={str(value).lower()}; " for name, value in row["switches"].items())
        told = f"{row['shape']}; {switches}{row['source']}{f'; mean of {n} launches' if (n := row['repeats']) else ''}"
        binds.add_row(row["generation"], escape(row["limiter"]), escape(told))
    console.print(binds)
    console.print("predict gives a row again with --set SWITCH=VALUE, --clock and, for a mean of launches, --repeats")


def accuracy(rows: Sequence[Mapping[str, Any]]) -> None:
    """One row an entry; what misses its target is marked, and counted below."""
    console = _console()
    table = _table("Accuracy", "what", "rows", "mean", "bias", "worst", "target")
    for row in rows:
        most = row["worst_target"]
        target = "".join([f"{row['mean_target']:g} %" if row["mean_target"] else "-", f", none over {most:g} %" if most else ""])
        table.add_row(
            row["what"], str(row["rows"]), f"{row['mean_abs_pct']:.1f} %", _signed(row["bias_pct"]), _signed(row["worst_pct"]),
            target + (" missed" if row["met"] is False else ""),
        )  # fmt: skip
    console.print(table)
    asked = [row["met"] for row in rows if row["met"] is not None]
    console.print(f"{sum(row['rows'] for row in rows)} rows, {sum(asked)} of {len(asked)} targets met")


def ideas(rows: Sequence[Mapping[str, Any]]) -> None:
    """An idea a block: what the papers claim, and a row a chip with both sides and, in words, what is lost without it."""
    console = _console()
    last = ""
    for row in rows:
        if row["idea"] != last:
            last = row["idea"]
            both = f"; with it: {escape(row['with_it'])}" if row["with_it"] else ""
            console.print(
                f"\n[bold]{row['generation']}: {escape(row['idea'])}[/bold]   without it: {escape(row['without_it'])}{both};"
                f" {escape(row['shape'])}\n[dim]published: {escape(row['claim'])} ({escape(row['source'])})[/dim]"
            )
            of_one = [each for each in rows if each["idea"] == last]
            console.print(_sides(of_one))


def _sides(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("", "gpu", "cycles with", "without", text=1)
    table.title = None
    table.add_column("without it", justify="left", overflow="fold", ratio=3)
    table.add_column("binds, without -> with it", justify="left", overflow="fold", ratio=2)
    for row in rows:
        if row["reason"]:
            table.add_row(row["gpu"], "-", "-", escape(row["reason"]), "")
            continue
        having, lacking = row["with"], row["without"]
        binds = [brief(side["limiter"]) for side in (lacking, having)]
        table.add_row(
            row["gpu"], f"{having['cycles']:,.0f}", f"{lacking['cycles']:,.0f}", escape(row["worth"]),
            escape(binds[0] if binds[0] == binds[1] else " -> ".join(binds)),
        )  # fmt: skip
    return table

