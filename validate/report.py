"""One HTML file that holds a prediction or a comparison whole: ``report(rows, gpu)``. It asks nothing of the network.

Style, script and timelines are inside the file, so it works from a disk, in an e-mail and in ten years.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import metadata, resources
from pathlib import Path

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS
from ..model.schedules import SCHEDULES
from ..sim.picture import FAMILIES, UNIT_LABELS, picture
from ..sim.plot import ink_on
from ..sim.predict import UNIT_WORDS, WAIT_WORDS, Launch, Result
from ..sim.residency import HBM_READ, HBM_WRITE, L2_READ, L2_WRITE
from ..sim.whole_file import write_whole
from .report_timeline import WORDS, timeline

Rows = Sequence[tuple[str, Result | str]]

CONTEXT = 6  # trips of the main loop on either side of a timeline's first view
BINS = 1200
SHOWN_STALL = 0.0005
KINDS = {
    "datasheet": "the maker's documents",
    "measured": "a microbenchmark or a published measurement",
    "derived": "arithmetic on other numbers",
    "assumed": "a guess or the user's own value",
}
UNIT_NAMES = {**UNIT_WORDS, **UNIT_LABELS, "l2": "L2", "hbm": "HBM"}
STALL_NAMES = {**WAIT_WORDS, **UNIT_NAMES}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def report(rows: Rows, gpu: GPU, attention: Attention, *, command: str = "") -> str:
    """The page. ``rows``: labels with their Results (simulated with ``record_limit=picture.RECORDS``) or why there is none;
    one row is a prediction, several are a comparison. ``command``: what made it, to be printed."""
    sections = [_Section(id=f"s{i}", label=label, outcome=outcome) for i, (label, outcome) in enumerate(rows)]
    question, answer = _question(rows, gpu, attention)
    links = [(s.id, s.label) for s in sections]
    if len(rows) > 1:
        links.insert(0, ("compare", "Comparison"))
    links += [("numbers", f"Numbers of {gpu.name}"), ("made", "How this was made")]
    whole = escape(question).replace(f"({gpu.name})", f'<span class="whole">({gpu.name})</span>')
    listed = "".join(f'<li><a href="#{where}">{escape(text)}</a></li>' for where, text in links)
    body = "".join(
        (
            f'<a class="skip" href="#main">Skip to the content</a><header><h1>{whole}</h1>',
            f'<p class="answer">{answer}</p></header>',
            f'<nav aria-label="Sections"><ul>{listed}</ul></nav>',
            '<main id="main">',
            _comparison(rows) if len(rows) > 1 else "",
            *(_section(s) for s in sections),
            _numbers(gpu, [outcome for _, outcome in rows if isinstance(outcome, Result)]),
            _made(command, rows),
            '</main><footer>flashsim predicts; it measures nothing.</footer><div id="tip" role="tooltip" hidden></div>',
        )
    )
    style, script = (resources.files(__package__).joinpath(f"report.{kind}").read_text() for kind in ("css", "js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(question)}</title><style>{style}{_colours()}</style></head>"
        f"<body>{_HATCH}{body}<script>{script}</script></body></html>\n"
    )


def write_report(text: str, path: Path) -> None:
    """Write the page, whole or not at all. Raises OSError."""
    write_whole(text, path)


@dataclass(frozen=True, kw_only=True)
class _Section:
    id: str
    label: str
    outcome: Result | str


_HATCH = (
    '<svg width="0" height="0" aria-hidden="true" style="position:absolute"><defs><pattern id="hatch" width="6" height="6"'
    ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--wait)"/>'
    '<path d="M0 0V6" stroke="var(--hatch)" stroke-width="1.5"/></pattern></defs></svg>'
)


def _colours() -> str:
    rules = []
    for name, word in WORDS.items():
        colour = FAMILIES[name][0]
        fill, ink = ("url(#hatch)", "var(--ink)") if name == "wait" else (colour, ink_on(colour))
        rules.append(f".{word},.{word} rect{{fill:{fill}}}.chart .{word} text{{fill:{ink}}}")
    return "".join(rules)


# --- the question and its answer ---


def _question(rows: Rows, gpu: GPU, attention: Attention) -> tuple[str, str]:
    """(question in words, answer as HTML)."""
    where = f"{gpu.full_name} ({gpu.name}) for {attention.label}"
    good = [(label, outcome) for label, outcome in rows if isinstance(outcome, Result)]
    labels = [label for label, _ in rows]
    question = (
        f"How fast is {labels[0]} on {where}, and what binds it?"
        if len(rows) == 1
        else f"Which is fastest on {where}: {', '.join(labels[:-1])} or {labels[-1]}?"
    )
    if not good:
        return question, escape("; ".join(str(outcome) for _, outcome in rows))
    label, best = min(good, key=lambda row: row[1].ms)
    over = ""
    if len(good) > 1:
        others = sorted((row for row in good if row[1] is not best), key=lambda row: row[1].ms)
        over = f", {others[0][1].ms / best.ms:.2f} times as fast as {escape(others[0][0])}"
    name = f"<strong>{escape(label)}</strong>: " if len(rows) > 1 else ""
    rate = f"<strong>{best.ms:.4g} ms, {best.tflops:.1f} TFLOP/s</strong>"
    return question, f"{name}{rate}{over}. Limiter: <strong>{escape(best.limiter)}</strong>."


def _comparison(rows: Rows) -> str:
    good = [outcome for _, outcome in rows if isinstance(outcome, Result)]
    first, most = (good[0].ms if good else 1.0), max((x.tflops for x in good), default=1.0)
    cells = []
    for i, (label, x) in enumerate(rows):
        link = f'<a href="#s{i}">{escape(label)}</a>'
        if isinstance(x, str):
            cells.append(f'<tr><th scope="row">{link}</th><td colspan="9" class="refused">{escape(x)}</td></tr>')
            continue
        best = ' class="best"' if x.ms == min(y.ms for y in good) else ""
        numbers = (
            f"{x.ms:.4g}", f"{x.tflops:.1f}", f"{100 * x.utilization:.1f} %", f"{x.cycles:,.0f}", f"{x.clock_mhz:.0f}",
            size(x.bytes["hbm_read"] + x.bytes["hbm_write"]), f"{first / x.ms:.2f}x",
        )  # fmt: skip
        tds = "".join(f'<td class="n">{number}</td>' for number in numbers)
        cells.append(
            f'<tr{best}><th scope="row">{link}</th>{_bar(x.tflops / most)}{tds}<td class="words">{escape(x.limiter)}</td></tr>'
        )
    columns = ("schedule", "", "*ms", "*TFLOP/s", "*of peak", "*cycles", "*MHz", "*HBM", "*speed-up", "limiter")
    return (
        '<section id="compare"><h2>Comparison</h2>'
        f"{_table('Bars: TFLOP/s. Speed-up: over the first schedule that runs.', columns, cells)}</section>"
    )


# --- one schedule ---


def _section(section: _Section) -> str:
    x, head = section.outcome, f'<section id="{section.id}"><h2>{escape(section.label)}</h2>'
    if isinstance(x, str):
        return f'{head}<p class="refused">{escape(x)}</p></section>'
    cards = (
        ("time", f"{x.ms:.4g} ms", f"{x.cycles:,.0f} cycles"),
        ("rate", f"{x.tflops:.1f} TFLOP/s", f"{x.tflops_exact:.1f} counting unmasked pairs only"),
        ("of the 16-bit tensor peak", f"{100 * x.utilization:.1f} %", "at the clock used"),
        ("clock", f"{x.clock_mhz:.0f} MHz", x.clock_rule),
    )
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>" for name, value, more in cards
    )
    kinds = ", ".join(f"{n} {kind}" for kind, n in x.provenance.items())
    return "".join(
        (
            head,
            f'<dl class="cards">{shown}</dl><p>Limiter: <strong>{escape(x.limiter)}</strong>.</p>'
            f'<p class="note">{escape(x.attention.label)} on {escape(x.gpu)}; numbers used: {escape(kinds)}.</p>',
            "<h3>Timeline</h3>",
            *_timelines(x, section.id),
            "<h3>Where the time goes</h3>",
            f'<div class="columns">{_units(x)}{_stalls(x)}</div>{_bounds(x)}',
            "<h3>Bytes</h3>",
            f'<div class="columns">{_ledger(x)}{_tensors(x)}</div>',
            "<h3>Warp instructions</h3>",
            f'<div class="columns">{_counters(x)}{_instructions(x)}</div>',
            "<h3>Occupancy</h3>",
            *(_occupancy(launch) for launch in x.launches),
            "<h3>Program</h3>",
            *(_program(launch) for launch in x.launches),
            "</section>",
        )
    )


def _timelines(x: Result, where: str) -> Iterator[str]:
    for i, launch in enumerate(x.launches):
        if len(x.launches) > 1:
            share = 100 * launch.cycles / x.cycles
            yield f"<h4>{escape(launch.program.name)}, {share:.0f} % of the cycles</h4>"
        laid = picture(x, kernel=launch.program.name, context=CONTEXT, bins=BINS)
        yield timeline(laid, x, number=f"{where}-t{i}")


def _units(x: Result) -> str:
    most = max(x.units, key=lambda name: x.units[name])
    rows = [
        _row(UNIT_NAMES.get(name, name), _bar(share), percent(share), f"{x.bounds[name]:,.0f}", binds=name == most)
        for name, share in _falling(x.units)
    ]
    return _table("Units busy, over the whole chip and run", ("unit", "", "*busy", "*cycles it alone needs"), rows)


def _stalls(x: Result) -> str:
    rows = [
        _row(STALL_NAMES.get(name, name), _bar(share), percent(share))
        for name, share in _falling(x.stalls)
        if share >= SHOWN_STALL
    ]
    rest = 1 - sum(x.stalls.values())
    if rest > 0:
        rows.append(_row("not waiting: issuing", _bar(rest), percent(rest)))
    return _table("What warps wait for", ("wait", "", "*share of a warp's life"), rows)


def _bounds(x: Result) -> str:
    low, high = x.bounds["max_of_units"], x.bounds["sum_of_units"]
    named = (("lower: the busiest unit alone", low), ("predicted", x.cycles), ("upper: the units one after the other", high))
    top = max(value for _, value in named)
    rows = [_row(name, _bar(value / top), f"{value:,.0f}", f"{value / low:.2f}x") for name, value in named]
    return _table("Bounds", ("", "", "*cycles", "*over the lower bound"), rows)


def _ledger(x: Result) -> str:
    least = {"hbm_read": x.attention.compulsory_read_bytes, "hbm_write": x.attention.compulsory_write_bytes}
    rows = []
    for name, label in (("hbm_read", "HBM read"), ("hbm_write", "HBM write"), ("l2", "L2"), ("smem", "SMEM")):
        moved, needed = x.bytes[name], least.get(name)
        again = (size(needed), size(max(0, moved - needed)), f"{moved / needed:.2f}x") if needed else ("", "", "")
        rows.append(_row(label, size(moved), *again))
    if dirty := x.bytes.get("dirty_left"):
        rows.insert(2, _row("of it, in L2 when the kernel ends", size(dirty), "", "", ""))
    columns = ("", "*moved", "*compulsory", "*refetched or scratch", "*ratio")
    return _table("Ledger: compulsory is every input once and every output once", columns, rows)


def _tensors(x: Result) -> str:
    sizes = {tensor.name: tensor.size_bytes for launch in x.launches for tensor in launch.program.tensors}
    moves: dict[str, list[int]] = {}
    for launch in x.launches:
        for name, more in launch.traffic.by_tensor.items():
            moves[name] = [a + b for a, b in zip(moves.get(name, [0] * len(more)), more, strict=True)]
    rows = []
    for name, moved in moves.items():
        cells = [size(moved[i]) if moved[i] else "" for i in (HBM_READ, HBM_WRITE, L2_READ, L2_WRITE)]
        rows.append(_row(name, size(sizes[name]) if name in sizes else "", *cells))
    columns = ("tensor", "*size", "*HBM read", "*HBM written", "*L2 read", "*L2 written")
    return _table("By tensor; L2 as the SMs ask it", columns, rows)


def _counters(x: Result) -> str:
    total = max(1, x.instructions["total"])
    rows = [_row(name, _bar(n / total), f"{n:,}", percent(n / total)) for name, n in x.instructions.items()]
    note = f'<p class="note">Counts from: {escape("; ".join(x.counts_from))}.</p>'
    return f"<div>{_table('By pipe, as the profiler counts', ('pipe', '', '*warp instructions', '*share'), rows)}{note}</div>"


def _instructions(x: Result) -> str:
    counts = {name: sum(launch.counts.get(name, 0) for launch in x.launches) for name in INSTRUCTIONS}
    rows = [
        _row(name, f"<td><code>{escape(INSTRUCTIONS[name].sass)}</code></td><td>{INSTRUCTIONS[name].pipe}</td>", f"{n:,}")
        for name, n in _falling(counts)
        if n
    ]
    return _table("By instruction", ("instruction", "SASS", "pipe", "*warp instructions"), rows)


def _occupancy(launch: Launch) -> str:
    fits, program = launch.occupancy, launch.program
    idle = f", {launch.dispatch.idle_sms} SMs idle" if launch.dispatch.idle_sms else ""
    roles = ", ".join(f"{role.name} {role.warps} warps at {role.registers} registers" for role in program.roles)
    caption = (
        f"{program.name}: {fits.ctas_per_sm} CTAs of {program.warps} warps per SM, bound by {fits.limiter};"
        f" {len(program.tiles):,} CTAs, {launch.dispatch.waves:.2f} waves{idle}. Roles: {roles}"
    )
    rows = [
        _row(name, f"<td>{escape(arithmetic)}</td>", binds=name == fits.limiter) for name, arithmetic in fits.arithmetic.items()
    ]
    return _table(caption, ("limit", "arithmetic"), rows)


def _program(launch: Launch) -> str:
    name, text = escape(launch.program.name), escape(str(launch.program))
    return f'<details><summary>{name} as text</summary><pre tabindex="0">{text}</pre></details>'


# --- provenance ---


def _numbers(gpu: GPU, results: Sequence[Result]) -> str:
    rows = []
    kinds = dict.fromkeys(KINDS, 0)
    for name, number in gpu.numbers():
        kinds[number.kind] = kinds.get(number.kind, 0) + 1
        rows.append(
            f'<tr data-kind="{escape(number.kind)}"><th scope="row"><code>{escape(name)}</code></th>'
            f'<td class="n">{float(number):.12g}</td><td>{escape(number.unit)}</td>'
            f'<td><span class="kind {escape(number.kind)}">{escape(number.kind)}</span></td><td>{escape(number.source)}</td></tr>'
        )
    boxes = "".join(
        f'<label><input type="checkbox" value="{kind}" checked> {kind} ({n}): {escape(KINDS.get(kind, ""))}</label>'
        for kind, n in kinds.items()
    )
    columns = ("number", "*value", "unit", "kind", "source")
    chip = f"{escape(gpu.full_name)}, {escape(gpu.architecture)}"
    return (
        f'<section id="numbers"><h2>Numbers of {escape(gpu.name)}</h2><p>{chip}: every'
        " number that the prediction may use, none of them fitted to a kernel.</p>"
        '<div class="filters"><label>Find <input type="search" placeholder="hbm, latency, microbench ..."></label>'
        f'{boxes}<span id="count" class="note" aria-live="polite"></span></div>{_table("", columns, rows)}</section>'
    )


def _made(command: str, rows: Rows) -> str:
    items = [f"<li>flashsim {escape(metadata.version('flashsim'))}</li>"]
    if command:
        items.append(f"<li>Again: <code>{escape(command)}</code></li>")
    for label, outcome in rows:
        if isinstance(outcome, Result) and outcome.schedule in SCHEDULES:
            counts = "; ".join(outcome.counts_from)
            items.append(f"<li>{escape(label)}: instruction counts from {escape(counts)}</li>")
    items.append("<li>FLOPs by the papers' convention: causal halved, a multiply-add is two.</li>")
    return f'<section id="made"><h2>How this was made</h2><ul>{"".join(items)}</ul></section>'


# --- pieces ---


def _table(caption: str, columns: Iterable[str], rows: Iterable[str]) -> str:
    """``columns``: a star marks those of numbers, an empty name the one of bars. The caption stays put when the table scrolls."""
    heads = []
    for i, column in enumerate(columns):
        kind = ' class="n"' if column[:1] == "*" else ' class="bar"' if i and not column else ""
        heads.append(f'<th scope="col"{kind}>{escape(column.removeprefix("*"))}</th>')
    title, name = (f'<p class="caption">{escape(caption)}</p>', f' aria-label="{escape(caption)}"') if caption else ("", "")
    table = f"<table{name}><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="table">{title}<div class="scroll">{table}</div></div>'


def _row(name: str, *cells: str, binds: bool = False) -> str:
    """Cells that begin with <td are markup, others numbers."""
    inside = "".join(cell if cell.startswith("<td") else f'<td class="n">{escape(cell)}</td>' for cell in cells)
    return f'<tr{" class=binds" if binds else ""}><th scope="row">{escape(name)}</th>{inside}</tr>'


def _bar(share: float) -> str:
    return f'<td class="bar"><span><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span></td>'


def _falling(shares: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def size(n: float) -> str:
    """Bytes in words, three digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"
