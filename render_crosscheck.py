"""What ``flashsim crosscheck`` prints: errors by group with the worst row of each; where asked every row with its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .render import _console, _signed, _table

#: Columns of a row that rows may be grouped by, and their heads.
KEYS = {"gpu": "gpu", "kernel": "kernel", "pass": "pass", "dtype": "dtype", "head_dim": "dim", "causal": "causal"}
SHOWN_REASONS = 8


def crosscheck(report: Mapping[str, Any], *, file: str, by: Sequence[str], every_row: bool) -> None:
    """One line over all rows, a table with a line a group (``by``: some of KEYS), and why rows were skipped."""
    console = _console()
    good = [row for row in report["rows"] if row["status"] == "ok"]
    skipped = [row for row in report["rows"] if row["status"] != "ok"]
    console.print(f"[bold]{escape(file)}[/bold]: {len(good):,} rows predicted, {len(skipped):,} skipped")
    if good:
        errors = report["summary"]["overall"]
        console.print(
            f"absolute error: median {errors['median_abs_error_pct']:.1f} %, mean {errors['mean_abs_error_pct']:.1f} %,"
            f" largest {errors['max_abs_error_pct']:.1f} %{escape(_furthest(good, by))};"
            f" bias {errors['bias_pct']:+.1f} % (negative: predicted faster than measured)"
        )
        if every_row:
            console.print(_rows(good))
        console.print(_groups(good, by))
    if skipped:
        _skipped(console, report["summary"]["skipped_reasons"])
    if good and not every_row:
        console.print("--rows shows each row with its verdict, --by gpu,kernel other groups, --json everything", style="dim")


def keys_of(text: str | None) -> tuple[str, ...]:
    """The columns that ``--by`` names, without it all but the pass. Raises ValueError for what is no such column."""
    if text is None:
        return tuple(key for key in KEYS if key != "pass")
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in KEYS:
            raise ValueError(f"--by got {name!r}; it takes columns of {', '.join(KEYS)}, as in --by gpu,kernel")
    return names


def _groups(good: Sequence[Mapping[str, Any]], by: Sequence[str]) -> Table:
    from .validate.summary import grouped

    if "pass" not in by and len({row["pass"] for row in good}) > 1:
        by = (*by, "pass")  # a forward's error says nothing of a backward's
    table = _table("", *(KEYS[key] for key in by), text=len(by))
    table.title = None
    for head in ("rows", "mean\n|error|", "bias", "worst"):
        table.add_column(head, justify="right")
    for each in table.columns:
        each.no_wrap = True
    table.add_column("at line", justify="left", overflow="fold")
    for values, errors in grouped(good, by):
        worst = errors["worst"]
        table.add_row(
            *(escape(_word(key, value)) for key, value in zip(by, values, strict=True)), f"{errors['n']:,}",
            _signed(errors["mean_abs_error_pct"]).lstrip("+"), _signed(errors["bias_pct"]), _signed(worst["error_pct"]),
            escape(f"{worst['line']}: {_size(worst['label'])}"),
        )  # fmt: skip
    return table


def _furthest(good: Sequence[Mapping[str, Any]], by: Sequence[str]) -> str:
    """The group that is furthest off in the mean, by what tells it from others, and the mean without it; "" where all are one."""
    from .validate.summary import grouped

    groups = grouped(good, by)
    if len(groups) < 2:
        return ""
    values, errors = max(groups, key=lambda group: group[1]["mean_abs_error_pct"])
    told = [i for i in range(len(by)) if len({others[i] for others, _ in groups}) > 1]
    name = " ".join(f"{KEYS[by[i]]} {_word(by[i], values[i])}" for i in told)
    others = [abs(row["error_pct"]) for row in good if tuple(row[key] for key in by) != values]
    far, rest = errors["mean_abs_error_pct"], sum(others) / len(others)
    return f", furthest off {name} ({errors['n']:,} rows, mean {far:.1f} %; of all others {rest:.1f} %)"


def _word(key: str, value: Any) -> str:
    return ("yes" if value else "no") if key == "causal" else str(value)


def _size(label: str) -> str:
    """The part of a problem's label that no column of the groups tells: its batch, heads and length."""
    return " ".join(word for word in label.split() if word[0] in "BHN" and word[1:2].isdigit())


def _rows(good: Sequence[Mapping[str, Any]]) -> Table:
    """Each row in the unit that it was given in; the peak is the datasheet's."""
    from .validate.verdict import amount

    table = _table("", "line", "row", "predicted", "measured", "of tensor\npeak", "error", text=0)
    table.title = None
    table.columns[1].justify = "left"
    for each in table.columns[2:]:
        each.no_wrap = True
    table.add_column("verdict", justify="left", overflow="fold")
    for row in good:
        unit = row["given"]
        what = " ".join(str(row[key]) for key in ("gpu", "kernel", "label") if row.get(key))
        predicted, measured = (amount(row[f"{side}_{unit}"], unit) for side in ("predicted", "measured"))
        rate = row["measured_tflops"]
        share = f"{100 * rate / row['peak_tflops']:.0f} %" if rate else ""
        table.add_row(
            str(row["line"]), escape(what), predicted, measured, share, _signed(row["error_pct"]), escape(row["verdict"]),
        )  # fmt: skip
    return table


def _skipped(console: Console, reasons: Mapping[str, Mapping[str, int]]) -> None:
    """Why rows were left out; rows with one reason count together."""
    console.print("[bold]skipped[/bold]")
    table = _table("", "rows", "first line", text=0)
    table.title = None
    table.add_column("why", justify="left", overflow="fold")
    most = sorted(reasons.items(), key=lambda item: -item[1]["n"])
    for reason, found in most[:SHOWN_REASONS]:
        table.add_row(str(found["n"]), str(found["first_line"]), escape(reason))
    console.print(table)
    if len(most) > SHOWN_REASONS:
        console.print(f"and {len(most) - SHOWN_REASONS} more reasons")
