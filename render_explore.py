"""What ``explore`` and ``whatif`` print: tables and heat maps for people, and the same as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .model.assumed import assumptions
from .render import _console, _smem, _table, brief, milliseconds

if TYPE_CHECKING:
    from .sim.explore import Row, Sweep
    from .sim.whatif import Case

SHOWN_REASONS = 8
SHOWN_VALUES = 8  # of one axis in the sensitivity table, and of each axis of a heat map in text
MAP_VALUES = 12
SHOWN_PCT = 0.05  # what moves less than this counts as nothing
BAR = 8  # characters of half a tornado
#: Notes of a change, by how they begin, and what is said of all that have such a one.
NOTES = {"1/": "free is a hundredth, since these may not be zero", "100 ": "free is a hundred times the rate, depth or limit"}
KINDS = {"": "together", "2x": "twice as fast", "half": "half as fast"}
COLOURS = {"free": "#a6d4a0", "2x": "#3a8f3a", "half": "#c8553d"}
SHADES = ("green", "green3", "yellow3", "dark_orange", "red")
STEPS_PCT = (2, 10, 30, 100)  # up to where a cell of a heat map has which shade


def exploration(sweep: Sweep, found: Mapping[str, Any], *, top: int) -> None:
    """The tables of ``explore``; ``found`` is :func:`flashsim.sim.findings.report`'s."""
    from .sim.findings import heat_map, ranked, two_axes
    from .sim.limiter import HOST_BOUND

    console = _console()
    rows: Sequence[Row] = found["rows"]
    objective = found["objective"]
    whole = "" if found["planned"] == found["space"] else f" of {found['space']:,} combinations"
    left = f", {found['planned'] - found['evaluated']:,} not simulated" if found["evaluated"] < found["planned"] else ""
    failed = f", {found['failed']} failed" if found["failed"] else ""
    console.print(
        f"[bold]{escape(found['schedule'])} on {escape(found['gpu'])}[/bold]: {found['evaluated']:,} candidates{whole}{left}:"
        f" {found['ok']:,} ran, {found['pruned']:,} cannot run{failed}"
    )
    console.print(escape("varied: " + "  ".join(f"{name}={_short(text)}" for name, text in found["vary"].items())))
    good = ranked(objective, rows)
    if good:
        console.print(_candidates(f"best by {_objective(objective)}", sweep, good[:top], good[0], objective))
        if good[0]["limiter"] == HOST_BOUND:
            console.print("the best are bound by the host's launch path and equal in time: they are in order of cycles")
        for note in (*found["notes"], found["mixture"]):
            if note:
                console.print(escape(f"note: {note}"))
        console.print(_candidates("Pareto front: time, registers, SMEM", sweep, found["pareto"][:top], good[0], objective))
        _more(console, len(found["pareto"]) - top)
        console.print("[bold]how much each field matters[/bold]: the best candidate of each value, above the best of all")
        console.print(_sensitivity(found["sensitivity"]))
        axes = two_axes(sweep, rows, MAP_VALUES)
        if axes:
            heat = heat_map(sweep, rows, *axes)
            console.print(f"[bold]heat map[/bold]: per cent above the best, {escape(heat['y'])} down, {escape(heat['x'])} across")
            console.print(_heat_text(heat))
    if found["reasons"]:
        _reasons(console, found["reasons"])


def _objective(name: str) -> str:
    return "time" if name == "ms" else "TFLOP/s (problems differ)"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _more(console: Console, n: int) -> None:
    if n > 0:
        console.print(f"and {n} more")


def _candidates(title: str, sweep: Sweep, rows: Sequence[Row], best: Row, objective: str) -> Table:
    """One line a row: number, values of the axes, then results."""
    from .sim.explore import column, loss
    from .sim.space import word

    names = [axis.name for axis in sweep.space.axes]
    table = _table(title, "#", *names, "ms", "TFLOP/s", "above\nbest", "regs", "SMEM", "CTAs\n/SM", "MHz", "counts", text=0)
    table.columns[-1].justify = "left"
    for each in table.columns:
        each.no_wrap = True  # where it is narrow, limiters give way
    table.add_column("limiter", justify="left", overflow="fold")
    for row in rows:
        above = 100 * (loss(objective, row) / loss(objective, best) - 1)
        table.add_row(
            str(row["candidate"]), *(escape(word(row[column(name)])) for name in names), milliseconds(row["ms"]),
            f"{row['tflops']:.1f}", _pct(above),
            str(row["registers_per_thread"]), _smem(row["smem_bytes_per_cta"]), str(row["ctas_per_sm"]),
            f"{row['clock_mhz']:.0f}", escape(row["counts_from"]), escape(brief(row["limiter"])),
        )  # fmt: skip
    return table


def _pct(value: float) -> str:
    return f"{value:+.1f} %" if abs(value) >= SHOWN_PCT else "0 %"


def _sensitivity(entries: Sequence[Mapping[str, Any]]) -> Table:
    from .sim.space import word

    table = _table("", "field", "spread")
    table.add_column("value: above best", justify="left", overflow="fold")
    for entry in entries:
        values = entry["values"]
        shown = sorted(values, key=lambda v: v["above_best_pct"])[:SHOWN_VALUES]
        texts = [f"{word(v['value'])}: {_pct(v['above_best_pct'])}" for v in values if v in shown]
        rest = f"  ({len(values) - len(shown)} values above these)" if len(values) > len(shown) else ""
        table.add_row(escape(entry["axis"]), _pct(entry["spread_pct"]), escape("   ".join(texts) + rest))
    return table


def _heat_text(heat: Mapping[str, Any]) -> Table:
    """Per cent above the best in every cell; a dot where nothing ran."""
    from .sim.space import word

    table = _table("", "", *(word(x) for x in heat["xs"]))
    for y, cells in zip(heat["ys"], heat["cells"], strict=True):
        table.add_row(escape(word(y)), *("." if v is None else f"[{_shade(v)}]{v:.1f}[/]" for v in cells))
    return table


def _shade(above_pct: float) -> str:
    return SHADES[sum(above_pct > step for step in STEPS_PCT)]


def _reasons(console: Console, groups: Sequence[Mapping[str, Any]]) -> None:
    console.print("[bold]why candidates did not run[/bold] (sentences that differ in numbers alone count as one)")
    table = _table("", "candidates", "", text=0)
    table.columns[1].justify = "left"
    for group in groups[:SHOWN_REASONS]:
        lead = "failed: " if group["status"] == "failed" else ""
        more = f" (#{group['first']}, and others alike)" if group["count"] > 1 else f" (#{group['first']})"
        table.add_row(str(group["count"]), escape(f"{lead}{group['reason']}{more}"))
    console.print(table)
    _more(console, len(groups) - SHOWN_REASONS)


# --- what if ---


def what_if(case: Case, rows: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]]) -> None:
    """The base, then one line a change (or a unit with its changes), the largest gain first."""
    console = _console()
    base = rows[0]
    console.print(f"[bold]{escape(case.schedule.name)} on {escape(case.gpu.name)}: {escape(case.attention.label)}[/bold]")
    console.print(
        f"{milliseconds(base['ms'])} ms, {base['cycles']:,.0f} cycles at {base['clock_mhz']:.0f} MHz,"
        f" {base['tflops']:.1f} TFLOP/s; limiter: {escape(base['limiter'])}"
    )
    for note in assumptions(case.schedule, case.gpu, case.attention):
        console.print(escape(f"note: {note}"))
    if any(len(line["saved_pct"]) > 1 for line in lines):
        moved = _moved(lines)
        console.print(_tornado(moved))
        console.print("per cent of time saved; negative: lost")
        if len(moved) < len(lines):
            console.print(escape(f"without effect: {', '.join(line['change'] for line in lines if line not in moved)}"))
        lines = moved
    else:
        console.print(_changes(base, rows[1:]))
    _notes(console, lines)


def _moved(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lines of which a change has an effect, or could not be."""
    return [line for line in lines if any(v is None or abs(v) >= SHOWN_PCT for v in line["saved_pct"].values())]


def _notes(console: Console, lines: Sequence[Mapping[str, Any]]) -> None:
    """Where free is not quite free, the units that share a note in one line each."""
    shared: dict[str, list[str]] = {}
    for line in lines:
        for note in line["notes"]:
            kind = next((words for start, words in NOTES.items() if note.startswith(start)), f"{line['change']}: {note}")
            shared.setdefault(kind, []).append(line["change"])
    for words, names in shared.items():
        console.print(escape(f"{words}: {', '.join(names)}" if words in NOTES.values() else words), style="dim")


def _tornado(lines: Sequence[Mapping[str, Any]]) -> Table:
    kinds = list(dict.fromkeys(kind for line in lines for kind in line["saved_pct"]))
    table = _table("what each unit costs", "unit", "what it is", *(escape(kind) for kind in kinds), text=2)
    table.add_column("", justify="left")
    for each in (table.columns[0], *table.columns[2:]):
        each.no_wrap = True  # where it is narrow, words fold
    widest = max((abs(v) for line in lines for v in line["saved_pct"].values() if v is not None), default=0.0) or 1.0
    for line in lines:
        saved = line["saved_pct"]
        cells = ["-" if saved.get(kind) is None else _pct(saved[kind]) for kind in kinds]
        gain = max((v for v in saved.values() if v is not None), default=0.0)
        loss = -min((v for v in saved.values() if v is not None), default=0.0)
        left, right = round(BAR * max(0.0, loss) / widest), round(BAR * max(0.0, gain) / widest)
        table.add_row(escape(line["change"]), escape(line["what"]), *cells, _bar(left, right))
    return table


def _bar(left: int, right: int) -> str:
    return f"[red]{'░' * left:>{BAR}}[/]│[green]{'█' * right}[/]"


def _changes(base: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("changes", "change", "", "ms", "time\nsaved", "cycles", "cycles\nsaved", "MHz", text=2)
    for each in table.columns:
        each.no_wrap = True  # where it is narrow, words fold
    table.add_column("what it is", justify="left", overflow="fold")
    for row in sorted(rows, key=lambda row: -row.get("saved_pct", -1e9)):
        head = (escape(row["change"]), escape(row["kind"]))
        if row["status"] == "ok":
            limiter = brief(row["limiter"])
            moved = "" if limiter == brief(base["limiter"]) else f"now {limiter}"
            table.add_row(
                *head, milliseconds(row["ms"]), _pct(row["saved_pct"]), f"{row['cycles']:,.0f}", _pct(row["cycles_saved_pct"]),
                f"{row['clock_mhz']:.0f}", escape("; ".join(text for text in (row["what"], moved) if text)),
            )  # fmt: skip
        else:
            table.add_row(*head, *["-"] * 5, escape(row["reason"]))
    return table


# --- pictures ---


def _figure(width: float, height: float) -> Any:
    from .sim.extras import extra

    return extra("matplotlib.figure", "plot", "a picture").Figure(figsize=(width, height), layout="constrained")


def heat_png(heat: Mapping[str, Any], objective: str, title: str, path: Path) -> None:
    """A heat map as PNG, its colours from dark (best) to light for all eyes. Raises OSError where ``path`` cannot be written."""
    from .sim.extras import extra
    from .sim.plot import ink_on
    from .sim.space import word

    xs, ys, cells = heat["xs"], heat["ys"], heat["cells"]
    figure = _figure(2.5 + 0.75 * len(xs), 1.8 + 0.5 * len(ys))
    axes = figure.subplots()
    values = [[float("nan") if v is None else v for v in row] for row in cells]
    axes.set_facecolor("0.85")  # where nothing ran
    image = axes.imshow(values, cmap="cividis", aspect="auto")
    axes.set_xticks(range(len(xs)), [word(x) for x in xs], rotation=45 if len(xs) > 8 else 0)
    axes.set_yticks(range(len(ys)), [word(y) for y in ys])
    axes.set(xlabel=heat["x"], ylabel=heat["y"])
    figure.suptitle(title, fontsize=10)
    as_hex = extra("matplotlib.colors", "plot", "a picture").to_hex
    if len(xs) * len(ys) <= 400:
        for j, row in enumerate(cells):
            for i, v in enumerate(row):
                ink = ink_on(as_hex(axes.get_facecolor() if v is None else image.cmap(image.norm(v))))
                axes.text(i, j, "-" if v is None else f"{v:.1f}", ha="center", va="center", fontsize=8, color=ink)
    figure.colorbar(image, label=f"% above the best {'time' if objective == 'ms' else 'TFLOP/s'}")
    figure.savefig(path, format="png", dpi=150)


def tornado_png(lines: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Time saved by each change, one bar a kind, the largest gain on top; without what has no effect.

    Raises OSError where ``path`` cannot be written.
    """
    kinds = list(dict.fromkeys(kind for line in lines for kind in line["saved_pct"]))
    still = len(lines) - len(moved) if (moved := _moved(lines)) else 0
    lines = moved or lines
    figure = _figure(9, 1.5 + 0.4 * len(lines))
    axes = figure.subplots()
    thickness = 0.8
    for kind in kinds:
        lengths = [line["saved_pct"].get(kind) or 0.0 for line in lines]
        axes.barh(range(len(lines)), lengths, height=thickness, label=KINDS.get(kind, kind), color=COLOURS.get(kind))
        thickness *= 0.7
    labels = ["\n".join(text for text in (line["change"], line["what"]) if text) for line in lines]
    axes.set_yticks(range(len(lines)), labels, fontsize=8)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", linewidth=0.8)
    others = f"; {still} others have no effect" if still else ""
    axes.set(xlabel=f"time saved, % (negative: lost){others}", title=title)
    axes.grid(axis="x", alpha=0.3)
    if len(kinds) > 1:
        axes.legend()
    figure.savefig(path, format="png", dpi=150)
