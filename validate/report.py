"""One HTML file that holds a prediction or a comparison whole: ``report(rows, gpu)``. It asks nothing of the network.

Style, script and timelines are inside the file, so it works from a disk, in an e-mail and in ten years.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from ..model.attention import Attention
from ..model.gpu import GPU
from ..model.instructions import INSTRUCTIONS
from ..model.schedules import SCHEDULES
from ..sim.fast_lru import HBM_READ, HBM_WRITE, L2_READ, L2_WRITE
from ..sim.held import held
from ..sim.limiter import UNIT_WORDS, WAIT_WORDS
from ..sim.picture import FAMILIES, UNIT_LABELS, picture
from ..sim.plot import ink_on
from ..sim.predict import Launch, Result
from ..sim.residency import LOCAL
from ..sim.unit_words import counted
from .page import bar, cards, falling, made, numbers, page, percent, row, size, table
from .report_timeline import WORDS, timeline

Rows = Sequence[tuple[str, Result | str]]

CONTEXT = 6  # trips of the main loop on either side of a timeline's first view
BINS = 1200
SHOWN_STALL = 0.0005
UNIT_NAMES = {**UNIT_WORDS, **UNIT_LABELS, "l2": "L2", "hbm": "HBM"}
#: What is left of a warp's life. The engine keeps no count of its own for the two parts of the first.
ISSUING = "not waiting: it issues, or the compiler's stall counts hold it"
OVER = "no CTA is left for its slot"
STALL_NAMES = {**WAIT_WORDS, **UNIT_NAMES}


def report(rows: Rows, gpu: GPU, attention: Attention, *, command: str = "") -> str:
    """The page. ``rows``: labels with their Results (simulated with ``record_limit=picture.RECORDS``) or why there is none;
    one row is a prediction, several are a comparison. ``command``: what made it, to be printed."""
    sections = [_Section(id=f"s{i}", label=label, outcome=outcome) for i, (label, outcome) in enumerate(rows)]
    question, answer = _question(rows, gpu, attention)
    links = [(s.id, s.label) for s in sections]
    if len(rows) > 1:
        links.insert(0, ("compare", "Comparison"))
    links += [("numbers", f"Numbers of {gpu.name}"), ("made", "How this was made")]
    body = (
        _HATCH,
        _comparison(rows) if len(rows) > 1 else "",
        *(_section(s) for s in sections),
        numbers(gpu),
        made(command, _sources(rows)),
    )
    keep, scripts = f"({gpu.name})", ("page.js", "timeline.js")
    return page(question, answer, links, "".join(body), scripts=scripts, keep=keep, style=_colours())


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
        times = others[0][1].ms / best.ms
        over = f", {f'{times:.2f} times ' if times >= 1.005 else ''}as fast as {escape(others[0][0])}"
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
        shown = (
            f"{x.ms:.4g}", f"{x.tflops:.1f}", f"{100 * x.utilization:.1f} %", f"{x.cycles:,.0f}", f"{x.clock_mhz:.0f}",
            size(x.bytes["hbm_read"] + x.bytes["hbm_write"]), f"{first / x.ms:.2f}x",
        )  # fmt: skip
        tds = "".join(f'<td class="n">{value}</td>' for value in shown)
        cells.append(
            f'<tr{best}><th scope="row">{link}</th>{bar(x.tflops / most)}{tds}<td class="words">{escape(x.limiter)}</td></tr>'
        )
    columns = ("schedule", "", "*ms", "*TFLOP/s", "*of peak", "*cycles", "*MHz", "*HBM", "*speed-up", "limiter")
    return (
        '<section id="compare"><h2>Comparison</h2>'
        f"{table('Bars: TFLOP/s. Speed-up: over the first schedule that runs.', columns, cells)}</section>"
    )


# --- one schedule ---


def _section(section: _Section) -> str:
    x, head = section.outcome, f'<section id="{section.id}"><h2>{escape(section.label)}</h2>'
    if isinstance(x, str):
        return f'{head}<p class="refused">{escape(x)}</p></section>'
    shown = (
        ("time", f"{x.ms:.4g} ms", f"{x.cycles:,.0f} cycles"),
        ("rate", f"{x.tflops:.1f} TFLOP/s", f"{x.tflops_exact:.1f} counting unmasked pairs only"),
        ("of the 16-bit tensor peak", f"{100 * x.utilization:.1f} %", "at the clock used"),
        ("clock", f"{x.clock_mhz:.0f} MHz", x.clock_rule),
    )
    kinds = ", ".join(f"{n} {kind}" for kind, n in x.provenance.items())
    return "".join(
        (
            head,
            f'{cards(shown)}<p>Limiter: <strong>{escape(x.limiter)}</strong>.</p>',
            *(f'<p class="note">Note: {escape(note)}.</p>' for note in x.notes),
            f'<p class="note">{escape(x.attention.label)} on {escape(x.gpu)}; numbers used: {escape(kinds)}.</p>',
            "<h3>Timeline</h3>",
            *_timelines(x, section.id),
            "<h3>Where the time goes</h3>",
            f'<div class="columns">{_units(x)}{_stalls(x)}</div>{_bounds(x)}',
            "<h3>Bytes</h3>",
            f'<div class="columns">{_ledger(x)}{_tensors(x)}</div>',
            "<h3>Warp instructions</h3>",
            _counters(x),
            _instructions(x),
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
    most, holds = max(x.units, key=lambda name: x.units[name]), held(x)
    rows = []
    for name, share in falling(x.units):
        cells = (bar(share), percent(share), percent(holds[name]), f"{x.bounds[name]:,.0f}")
        rows.append(row(UNIT_NAMES.get(name, name), *cells, binds=name == most))
    note = "Held: with what products beside them add to instructions; a warp waits for as long as a unit is held."
    columns = ("unit", "", "*busy", "*held", "*cycles it alone needs")
    return f"<div>{table('Units busy, over the whole chip and run', columns, rows)}<p class=\"note\">{note}</p></div>"


def _stalls(x: Result) -> str:
    rows = [
        row(STALL_NAMES.get(name, name), bar(share), percent(share))
        for name, share in falling(x.stalls)
        if share >= SHOWN_STALL
    ]
    over = tail(x)
    for name, rest in ((ISSUING, 1 - sum(x.stalls.values()) - over), (OVER, over)):
        if rest >= SHOWN_STALL:
            rows.append(row(name, bar(rest), percent(rest)))
    return table("What warps wait for", ("wait", "", "*share of a warp's life"), rows)


def tail(x: Result) -> float:
    """Share of the slots' life after their last CTA has ended."""
    over = 0.0
    for launch in x.launches:
        _, sm, slot, _, end = launch.run.ctas.T
        last = np.zeros((launch.job.sms, launch.job.slots))
        np.maximum.at(last, (sm, slot), end)
        over += float(1 - last.mean() / max(1, launch.run.ticks)) * launch.cycles / x.cycles
    return over


def _bounds(x: Result) -> str:
    low, high = x.bounds["max_of_units"], x.bounds["sum_of_units"]
    one_by_one = "all units one after the other, on all SMs and without waits"
    named = (("lower: the busiest unit alone", low), ("predicted", x.cycles), (one_by_one, high))
    top = max(value for _, value in named)
    rows = [row(name, bar(value / top), f"{value:,.0f}", f"{value / low:.2f}x") for name, value in named]
    return table("Bounds", ("", "", "*cycles", "*over the lower bound"), rows)


def _ledger(x: Result) -> str:
    least = {"hbm_read": x.attention.compulsory_read_bytes, "hbm_write": x.attention.compulsory_write_bytes}
    rows = []
    for name, label in (("hbm_read", "HBM read"), ("hbm_write", "HBM write"), ("l2", "L2"), ("smem", "SMEM")):
        moved, needed = x.bytes[name], least.get(name)
        again = (size(needed), size(max(0, moved - needed)), f"{moved / needed:.2f}x") if needed else ("", "", "")
        rows.append(row(label, size(moved), *again))
    if dirty := x.bytes.get("dirty_left"):
        rows.insert(2, row("of it, in L2 when the kernel ends", size(dirty), "", "", ""))
    columns = ("", "*moved", "*compulsory", "*refetched or scratch", "*ratio")
    return table("Ledger: compulsory is every input once and every output once", columns, rows)


def _tensors(x: Result) -> str:
    sizes = {tensor.name: tensor.size_bytes for launch in x.launches for tensor in launch.program.tensors}
    moves: dict[str, list[int]] = {}
    for launch in x.launches:
        for name, more in launch.traffic.by_tensor.items():
            moves[name] = [a + b for a, b in zip(moves.get(name, [0] * len(more)), more, strict=True)]
    spilled = x.bytes["l2_sm"] - sum(moved[L2_READ] + moved[L2_WRITE] for moved in moves.values())
    if spilled:  # stores of spilled registers pass L1, each on its own; the replay has their frames
        moves[LOCAL][L2_WRITE] += spilled
    rows = []
    usual = list(x.attention.tensor_bytes)
    for name in sorted(moves, key=lambda name: usual.index(name) if name in usual else len(usual)):
        moved = moves[name]
        cells = [size(moved[i]) if moved[i] else "" for i in (HBM_READ, HBM_WRITE, L2_READ, L2_WRITE)]
        rows.append(row(name, size(sizes[name]) if name in sizes else "", *cells))
    columns = ("tensor", "*size", "*HBM read", "*HBM written", "*L2 read", "*L2 written")
    return table("By tensor; L2 as the SMs ask it", columns, rows)


def _counters(x: Result) -> str:
    total = max(1, x.instructions["total"])
    rows = [row(name, bar(n / total), f"{n:,}", percent(n / total)) for name, n in x.instructions.items()]
    note = f'<p class="note">Counts from: {escape("; ".join(x.counts_from))}.</p>'
    return f"<div>{table('By pipe, as the profiler counts', ('pipe', '', '*warp instructions', '*share'), rows)}{note}</div>"


def _instructions(x: Result) -> str:
    counts = {name: sum(launch.counts.get(name, 0) for launch in x.launches) for name in INSTRUCTIONS}
    rows = [
        row(name, f"<td><code>{escape(INSTRUCTIONS[name].sass)}</code></td><td>{INSTRUCTIONS[name].pipe}</td>", f"{n:,}")
        for name, n in falling(counts)
        if n
    ]
    return table("By instruction", ("instruction", "SASS", "pipe", "*warp instructions"), rows)


def _occupancy(launch: Launch) -> str:
    fits, program = launch.occupancy, launch.program
    idle = f", {launch.dispatch.idle_sms} SMs idle" if launch.dispatch.idle_sms else ""
    roles = ", ".join(f"{role.name} {counted(role.warps, 'warp')} at {role.registers} registers" for role in program.roles)
    caption = (
        f"{program.name}: {counted(fits.ctas_per_sm, 'CTA')} of {counted(program.warps, 'warp')} per SM, bound by {fits.limiter};"
        f" {counted(len(program.tiles), 'CTA')}, {launch.dispatch.waves:.2f} waves{idle}. Roles: {roles}"
    )
    rows = [
        row(name, f"<td>{escape(arithmetic)}</td>", binds=name == fits.limiter) for name, arithmetic in fits.arithmetic.items()
    ]
    return table(caption, ("limit", "arithmetic"), rows)


def _program(launch: Launch) -> str:
    name, text = escape(launch.program.name), escape(str(launch.program))
    return f'<details><summary>{name} as text</summary><pre tabindex="0">{text}</pre></details>'


# --- provenance ---


def _sources(rows: Rows) -> Iterator[str]:
    for label, outcome in rows:
        if isinstance(outcome, Result) and outcome.schedule in SCHEDULES:
            yield f"{label}: instruction counts from {'; '.join(outcome.counts_from)}"
    yield "FLOPs by the papers' convention: causal halved, a multiply-add is two."
