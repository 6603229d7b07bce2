"""One HTML file that holds an exploration: ``report_sweep(record)``, where ``record`` is what :func:`read_record` gives.

The best, the Pareto front as pictures, what each field is worth, a map of any two fields, why candidates did not run, and every
candidate with a search field. It needs the sweep's file alone, not its schedule or its chip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import combinations
from statistics import median
from typing import Any

from ..model.gpu import GPU, load_gpu
from ..sim.explore import Row, column, loss, numbers_digest
from ..sim.findings import heat_map, ranked, report, two_axes
from ..sim.limiter import HOST_BOUND
from ..sim.space import word
from ..sim.sweep_file import Record
from .page import bar, cards, filters, made, numbers, page, percent, smem, table
from .sweep_chart import Cost, scatter

TOP = 15
LISTED = 1000  # candidates of the searchable table
SHOWN_VALUES = 16  # of one field in the table of what matters
MAP_FIELDS, MAP_VALUES = 8, 24  # of the heat maps: the fields that matter most, and the values of one side
NAMED = 3  # fields that the title names
STEPS_PCT = (0.05, 2, 5, 10, 20, 40, 80)  # up to where a cell of a heat map has which shade
COSTS = (
    Cost(column="registers_per_thread", title="registers a thread", write="{:.0f}".format),
    Cost(column="smem_bytes_per_cta", title="SMEM a CTA", write=smem, binary=True),
)
WORDS = {"ms": "time", "tflops": "TFLOP/s"}
RESULTS = ("*ms", "*TFLOP/s", "*of peak", "*above best", "*registers", "*SMEM", "*CTAs/SM", "*MHz", "counts", "limiter")


def report_sweep(record: Record, *, command: str = "") -> str:
    """The page. ``command``: what made the page. Raises ValueError where no candidate ran."""
    found = report(record, record.rows, planned=record.planned)
    if not found["ok"]:
        first = f", the first because {found['reasons'][0]['reason']}" if found["reasons"] else ""
        raise ValueError(f"nothing to report: none of the {found['evaluated']} candidates ran{first}")
    good, gpu = ranked(record.objective, record.rows), _chip(record)
    parts: dict[str, tuple[str, str]] = {
        "best": ("Best", _best(record, good)),
        "pareto": ("Pareto front", _pareto(record, good, found["pareto"])),
        "fields": ("What matters", _fields(record, found["sensitivity"])),
        "maps": ("Heat map", _maps(record, found["sensitivity"])),
        "reasons": ("Did not run", _reasons(record, found["reasons"])),
        "candidates": ("Candidates", _candidates(record, good)),
    }
    shown = {name: (title, body) for name, (title, body) in parts.items() if body}
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{inside}</section>' for name, (title, inside) in shown.items())
    links = [(name, title) for name, (title, _) in shown.items()]
    if gpu:
        links.append(("numbers", f"Numbers of {gpu.name}"))
    links.append(("made", "How this was made"))
    last = f"{numbers(gpu) if gpu else ''}{made(record.command, _sources(record, gpu, command))}"
    question, answer = _question(record, gpu, good)
    return page(question, answer, links, _overview(record, found, good) + body + last, scripts=("page.js", "sweep.js"))


def _chip(record: Record) -> GPU | None:
    """The chip, where its file here has the numbers that the sweep ran with."""
    with suppress(ValueError, OSError):
        gpu = load_gpu(record.sweep["gpu"])
        if numbers_digest(gpu) == record.sweep["gpu_numbers"]:
            return gpu
    return None


# --- the question and its answer ---


def _question(record: Record, gpu: GPU | None, good: Sequence[Row]) -> tuple[str, str]:
    names = record.names
    varied = ", ".join(names) if len(names) <= NAMED else f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    where = gpu.full_name if gpu else record.sweep["gpu"]
    sizes = {name: value for name, value in record.sweep["problem"].items() if name not in names}
    shape = ", ".join(
        name if value is True else f"{name} {word(value)}"
        for name, value in sizes.items()
        if value is not False and (name, value) != ("pass", "fwd")
    )
    question = f"Which {varied} make {record.sweep['schedule']} fastest on {where}{f' for {shape}' if shape else ''}?"
    best = good[0]
    rate = f"{best['ms']:.4g} ms, {best['tflops']:.1f} TFLOP/s"
    answer = f"<strong>{escape(_values(record, best))}</strong>: {rate}. Limiter: <strong>{escape(best['limiter'])}</strong>."
    return question, answer


def _values(record: Record, row: Row) -> str:
    return " ".join(f"{name}={word(row[column(name)])}" for name in record.names)


def _overview(record: Record, found: Mapping[str, Any], good: Sequence[Row]) -> str:
    least = loss(record.objective, good[0])
    middle = median(loss(record.objective, row) for row in good) / least
    worst = loss(record.objective, good[-1]) / least
    whole = "the whole space" if found["planned"] == found["space"] else f"of {found['space']:,} combinations"
    left = found["planned"] - found["evaluated"]
    shown = cards(
        (
            ("candidates", f"{found['evaluated']:,}", f"{whole}{f'; {left:,} not simulated yet' if left else ''}"),
            ("ran", f"{found['ok']:,}", f"{found['pruned']:,} cannot run, {found['failed']:,} failed"),
            ("best over the median", f"{middle:.2f}x", f"over the slowest {worst:.2f}x"),
            ("Pareto front", f"{len(found['pareto'])}", "unbeaten in time, registers and SMEM"),
        )
    )
    note = "" if record.complete else '<p class="refused">The sweep is unfinished: what is here may change.</p>'
    mixed = f'<p class="note">Note: {escape(found["mixture"])}.</p>' if found["mixture"] else ""
    return shown + note + mixed


# --- tables of candidates ---


def _row(record: Record, row: Row, best: Row) -> str:
    """A candidate: its number, the varied values (in bold where they are not the best's), its results."""
    above = 100 * (loss(record.objective, row) / loss(record.objective, best) - 1)
    values = "".join(
        f'<td class="v{" off" if row[column(name)] != best[column(name)] else ""}">{escape(word(row[column(name)]))}</td>'
        for name in record.names
    )
    results = (
        f"{row['ms']:.4g}", f"{row['tflops']:.1f}", percent(row["utilization"]), _above(above),
        str(row["registers_per_thread"]), smem(row["smem_bytes_per_cta"]), str(row["ctas_per_sm"]), f"{row['clock_mhz']:.0f}",
    )  # fmt: skip
    cells = "".join(f'<td class="n">{text}</td>' for text in results)
    head = f'<th scope="row">{row["candidate"]}</th>'
    origin = f"<td>{escape(row['counts_from'])}</td>"
    return f'<tr>{head}{values}{cells}{origin}<td class="words">{escape(row["limiter"])}</td></tr>'


def _above(pct: float) -> str:
    return f"{pct:+.1f} %" if abs(pct) >= STEPS_PCT[0] else "0 %"


def _columns(record: Record) -> tuple[str, ...]:
    return ("#", *record.names, *RESULTS)


def _best(record: Record, good: Sequence[Row]) -> str:
    caption = f"The first {min(TOP, len(good))} by {WORDS[record.objective]}; values other than the best's are bold"
    host = ""
    if good[0]["limiter"] == HOST_BOUND:
        host = '<p class="note">The best are bound by the host’s launch path and equal in time: they are in order of cycles.</p>'
    return host + table(caption, _columns(record), [_row(record, row, good[0]) for row in good[:TOP]])


def _pareto(record: Record, good: Sequence[Row], front: Sequence[Row]) -> str:
    dots = [(row, _dot(record, row)) for row in good]
    ids = {row["candidate"] for row in front}
    what = "TFLOP/s" if record.objective == "tflops" else "Time"
    varying = [cost for cost in COSTS if len({row[cost.column] for row in good}) > 1]
    charts = "".join(
        scatter(title=f"{what} over {cost.title}", cost=cost, y=record.objective, dots=dots, front=ids) for cost in varying
    )
    line = '<p class="note">Large dots: the front of all three; the line is the best of its two alone, so some lie off it.</p>'
    drawn = f'<div class="columns">{charts}</div>{line}<p class="readout" aria-live="polite"></p>' if varying else ""
    alike = [f"{cost.title} ({cost.write(good[0][cost.column])})" for cost in COSTS if cost not in varying]
    same = f'<p class="note">All candidates that ran have the same {" and ".join(alike)}.</p>' if alike else ""
    caption = "Nothing beats these in time, registers and SMEM alike"
    listed = table(caption, _columns(record), [_row(record, row, good[0]) for row in front[:TOP]])
    more = f'<p class="note">and {len(front) - TOP} more</p>' if len(front) > TOP else ""
    return f"{drawn}{same}{listed}{more}"


def _dot(record: Record, row: Row) -> str:
    costs = f"{row['registers_per_thread']} registers, {smem(row['smem_bytes_per_cta'])}, {row['ctas_per_sm']} CTAs/SM"
    head = f"#{row['candidate']} {_values(record, row)}"
    return f"{head} · {row['ms']:.4g} ms, {row['tflops']:.1f} TFLOP/s · {costs} · {row['counts_from']} counts · {row['limiter']}"


def _candidates(record: Record, good: Sequence[Row]) -> str:
    rows = [_row(record, row, good[0]) for row in good[:LISTED]]
    note = f"The {LISTED:,} best of {len(good):,} that ran; the sweep’s file has all. " if len(good) > LISTED else ""
    hint = f'<p class="note">{note}A click on a column’s name sorts by it, another turns the order round.</p>'
    return f'{hint}{filters("128 0.31 barriers ...")}<div class="sortable">{table("", _columns(record), rows)}</div>'


# --- what matters ---


def _fields(record: Record, entries: Sequence[Mapping[str, Any]]) -> str:
    if not any(len(entry["values"]) > 1 for entry in entries):
        return ""
    widest = max(entry["spread_pct"] for entry in entries) or 1.0
    rows = [row for entry in entries for row in _field(record, entry, widest)]
    caption = "The best candidate of each value, above the best of all; the field that matters most first"
    return table(caption, ("field", "value", "", "*above best", "*ms", "*TFLOP/s", "*ran", "*candidate"), rows)


def _field(record: Record, entry: Mapping[str, Any], widest: float) -> Iterator[str]:
    """A line a value of one field; those of which no candidate ran come last."""
    name, values = entry["axis"], {_key(value["value"]): value for value in entry["values"]}
    mine: dict[tuple[type, Any], list[Row]] = {}
    for row in record.rows:
        mine.setdefault(_key(row[column(name)]), []).append(row)
    nearest = sorted(values, key=lambda key: values[key]["above_best_pct"])[:SHOWN_VALUES]
    shown = [*(key for key in values if key in nearest), *[key for key in mine if key not in values][:SHOWN_VALUES]]
    left = len(mine) - len(shown)
    for i, key in enumerate(shown):
        rest = f"<small>and {left} more values</small>" if left else ""
        field = f'<th scope="rowgroup" rowspan="{len(shown)}">{escape(name)}{rest}</th>' if not i else ""
        ran = sum(row["status"] == "ok" for row in mine[key])
        found, share = values.get(key), f"{ran:,} of {len(mine[key]):,}"
        cells, length = ["none ran", "", "", share, ""], '<td class="bar"></td>'
        if found:
            above, first = found["above_best_pct"], f"#{found['candidate']}"
            cells = [_above(above), f"{found['ms']:.4g}", f"{found['tflops']:.1f}", share, first]
            length = bar(above / widest)
        results = "".join(f'<td class="n">{text}</td>' for text in cells)
        yield f"<tr{' class=first' if not i else ''}>{field}<td>{escape(word(key[1]))}</td>{length}{results}</tr>"


def _key(value: Any) -> tuple[type, Any]:
    return type(value), value


def _maps(record: Record, entries: Sequence[Mapping[str, Any]]) -> str:
    """A map for each pair of the fields that matter most; all but the first hidden until they are chosen."""
    first = two_axes(record, record.rows, MAP_VALUES)
    if first is None:
        return ""
    names = [e["axis"] for e in entries if 1 < len({_key(v) for v in _all(record, e["axis"])}) <= MAP_VALUES][:MAP_FIELDS]
    maps = [_map(record, x, y, shown=(x, y) == first) for x, y in combinations(names, 2)]
    choice = ""
    if len(names) > 2:
        labels = (("across", first[0]), ("down", first[1]))
        choice = '<div class="choose">' + "".join(_choice(label, names, chosen) for label, chosen in labels) + "</div>"
    legend = "".join(f'<li><i class="h{i}"></i>{_step(i)}</li>' for i in range(len(STEPS_PCT) + 1))
    return (
        '<p class="note">Per cent above the best of all, for the best candidate of each pair of values; - is where none ran.</p>'
        f'{choice}{"".join(maps)}<ul class="legend shades">{legend}</ul>'
    )


def _all(record: Record, name: str) -> list[Any]:
    return [row[column(name)] for row in record.rows]


def _choice(label: str, names: Sequence[str], chosen: str) -> str:
    options = "".join(
        f'<option{" selected" if name == chosen else ""} value="{escape(name)}">{escape(name)}</option>' for name in names
    )
    return f"<label>{label} <select>{options}</select></label>"


def _step(i: int) -> str:
    if not i:
        return "the best"
    return f"to {STEPS_PCT[i]:g} %" if i < len(STEPS_PCT) else f"above {STEPS_PCT[-1]:g} %"


def _map(record: Record, x: str, y: str, *, shown: bool) -> str:
    heat = heat_map(record, record.rows, x, y)
    heads = "".join(f'<th scope="col">{escape(word(value))}</th>' for value in heat["xs"])
    rows = []
    for value, cells in zip(heat["ys"], heat["cells"], strict=True):
        inside = "".join(f'<td class="{_shade(pct)}">{"-" if pct is None else f"{pct:.1f}"}</td>' for pct in cells)
        rows.append(f'<tr><th scope="row">{escape(word(value))}</th>{inside}</tr>')
    name = f"{escape(y)} down, {escape(x)} across"
    inside = f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return (
        f'<figure class="map" data-x="{escape(x)}" data-y="{escape(y)}"{"" if shown else " hidden"}>'
        f'<figcaption>{name}</figcaption><div class="scroll"><table aria-label="{name}">{inside}</table></div></figure>'
    )


def _shade(pct: float | None) -> str:
    return "none" if pct is None else f"h{sum(pct > step for step in STEPS_PCT)}"


# --- what did not run, and provenance ---


def _reasons(record: Record, groups: Sequence[Mapping[str, Any]]) -> str:
    lost, rows = sum(group["count"] for group in groups), {row["candidate"]: row for row in record.rows}
    lines = [
        f'<tr><td class="n">{group["count"]:,}</td>{bar(group["count"] / lost)}'
        f'<td class="words">{"failed: " if group["status"] == "failed" else ""}{escape(group["reason"])}</td>'
        f'<td>#{group["first"]} {escape(_values(record, rows[group["first"]]))}</td></tr>'
        for group in groups
    ]
    caption = f"{lost:,} of {len(record.rows):,} candidates; sentences that differ in their numbers alone count together"
    return table(caption, ("*candidates", "", "why", "the first of them"), lines) if groups else ""


def _sources(record: Record, gpu: GPU | None, command: str) -> Iterator[str]:
    sweep, names = record.sweep, record.names
    if command:
        yield f"This page: {command}"
    state = "complete" if record.complete else f"{len(record.rows):,} of {record.planned:,} candidates"
    yield f"Sweep of {record.date or 'an unknown date'} by flashsim {sweep.get('flashsim', '?')}, {state}"
    fixed = "  ".join(f"{name}={value}" for name, value in sweep["fields"].items() if name not in names)
    yield f"Schedule {sweep['schedule']}; not varied: {fixed or 'nothing'}"
    yield f"Varied: {'  '.join(f'{name}={text}' for name, text in sweep['vary'].items())}"
    yield f"Problem: {', '.join(f'{name} {word(value)}' for name, value in sweep['problem'].items() if name not in names)}"
    yield f"Clock {sweep.get('clock')}, engine {sweep.get('engine')}"
    same = "as in its file here" if gpu else "other than in a chip file here: set by hand, or changed since"
    yield f"Chip {sweep['gpu']}: its numbers (digest {sweep['gpu_numbers'][:12]}) are {same}"
