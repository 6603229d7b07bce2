"""A Picture as an SVG that reads without scripts; ``timeline.js`` moves it: every slice and area carries its cycles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from ..sim.picture import FAMILIES, Lane, Picture, Slice, Unit, ems
from ..sim.predict import Result
from ..sim.unit_words import counted

WIDTH, LEFT, RIGHT = 1140, 140, 46  # pixels before a script fits it to the page
TOP, STRIP, LANE, GAP, UNIT = 24, 18, 34, 10, 30
FONT = 11  # pixels
WORDS = {name: f"f{i}" for i, name in enumerate(FAMILIES)}  # family -> CSS class

#: What a button does in ``timeline.js``, its name for those who hear it, and its sign.
BUTTONS = (
    ("left", "earlier", "←"),
    ("right", "later", "→"),
    ("in", "zoom in", "+"),
    ("out", "zoom out", "−"),
    ("view", "back to the steady window", "Steady"),
    ("all", "all blocks laid out here", "All"),
)


def timeline(laid: Picture, result: Result, *, number: str) -> str:
    """One ``<figure>``; ``number`` makes its ids unique on the page."""
    height, body = _rows(laid, number)
    described = describe(laid, result)
    legend = "".join(
        f'<li><svg width="14" height="14" aria-hidden="true"><rect width="14" height="14" class="{WORDS[name]}"/></svg>'
        f"{escape(name)}</li>"
        for name in laid.families
    )
    buttons = "".join(
        f'<button type="button" data-do="{do}" aria-label="{label}">{sign}</button>' for do, label, sign in BUTTONS
    )
    data = (
        f'data-start="{laid.start:.2f}" data-end="{laid.end:.2f}" data-from="{laid.view[0]:.2f}" data-to="{laid.view[1]:.2f}"'
        f' data-mhz="{laid.mhz:.2f}"'
    )
    return (
        f'<figure class="timeline" id="{number}" {data}>'
        f'<div class="controls" role="group" aria-label="Move the timeline">{buttons}'
        '<span class="hint">Wheel zooms, drag pans. Keys: arrows, +, −, 0; n and p step through the ops.</span></div>'
        f'<svg class="chart" role="img" tabindex="0" aria-label="{escape(described)}" viewBox="0 0 {WIDTH} {height}"'
        f' height="{height}" preserveAspectRatio="xMinYMin meet">{body}</svg>'
        '<p class="readout" aria-live="polite"></p>'
        f'<ul class="legend" aria-label="Colours">{legend}</ul>'
        f"<figcaption>{escape(described)}</figcaption></figure>"
    )


def describe(laid: Picture, result: Result) -> str:
    """The picture in words: its alternative text and caption."""
    ctas = len(laid.slots)
    steady = f" A {laid.trip} of each CTA takes {laid.period:,.0f} cycles." if laid.period else ""
    held = ", ".join(f"{unit.label} {100 * unit.mean:.0f} %" for unit in sorted(laid.units, key=lambda unit: -unit.mean))
    return (
        f"Timeline of one SM running {laid.kernel} with {counted(ctas, 'resident CTA')}, cycles"
        f" {laid.view[0]:,.0f} to {laid.view[1]:,.0f} at {laid.mhz:.0f} MHz.{steady} Held in this window: {held or 'no unit'}."
    )


def _rows(laid: Picture, number: str) -> tuple[float, str]:
    """(height, markup) of strips, lanes and units."""
    at, names, marks = float(TOP), list[str](), list[str]()
    for slot in laid.slots:
        names.append(_name(f"CTA {slot}", at + STRIP / 2, "strong"))
        for i, block in enumerate(b for b in laid.blocks if b.slot == slot):
            word = block.label.split()[-1]
            shade = int(word) % 2 if word.isdecimal() else i % 2
            kind = f"strip s{shade}"
            marks.append(_box(laid.view, (block.start, block.end), at, STRIP - 2, kind, (block.label, word)))
        at += STRIP
        for lane in (lane for lane in laid.lanes if lane.slot == slot):
            names.append(_name(lane.name, at + LANE / 2))
            marks += [_slice(laid, x, lane, at) for x in lane.slices]
            at += LANE
        at += GAP
    bottom_of_lanes = at
    at += GAP
    for unit in laid.units:
        names.append(_name(unit.label, at + UNIT / 2))
        share = f"{100 * unit.mean:.0f} %"
        names.append(f'<text class="share" x="{WIDTH - RIGHT + 6}" y="{at + UNIT / 2:.1f}">{share}</text>')
        marks.append(f'<rect class="base" x="{LEFT}" y="{at + 2:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{UNIT - 4}"/>')
        marks += _areas(laid, unit, at + UNIT - 2)
        at += UNIT
    clip = f'<clipPath id="{number}-clip"><rect x="{LEFT}" y="0" width="{WIDTH - LEFT - RIGHT}" height="{at:.1f}"/></clipPath>'
    axis = "".join(_ticks(laid, at))
    grid = f'<g class="axis" data-bottom="{at:.1f}" data-gap="{bottom_of_lanes:.1f}">{axis}</g>'
    body = f'{clip}{grid}<g clip-path="url(#{number}-clip)">{"".join(marks)}</g><g class="names">{"".join(names)}</g>'
    return at + 22, body


def _scale(view: tuple[float, float]) -> float:
    """Pixels a cycle."""
    return (WIDTH - LEFT - RIGHT) / (view[1] - view[0])


def _name(text: str, at: float, kind: str = "") -> str:
    return f'<text class="name {kind}" x="{LEFT - 8}" y="{at:.1f}">{escape(text)}</text>'


def _slice(laid: Picture, x: Slice, lane: Lane, at: float) -> str:
    waiting = x.family == "wait"
    tall, gap = (LANE / 2, LANE / 4) if waiting else (LANE - 4, 2.0)
    said = [x.name, f"block {x.trip}" if laid.trip == "block" else "", f"tile {x.tile}", f"CTA {lane.slot}, {lane.name}"]
    info = " · ".join(part for part in [*said, x.instructions] if part)
    return _box(laid.view, (x.start, x.end), at + gap, tall, f"op {WORDS[x.family]}", x.labels, info)


def _box(
    view: tuple[float, float],
    span: tuple[float, float],
    at: float,
    tall: float,
    kind: str,
    labels: tuple[str, ...],
    info: str = "",
) -> str:
    """A rectangle with its label: the longest that fits, and none where it is out of view."""
    start, end = span
    scale = _scale(view)
    left, right = max(start, view[0]), min(end, view[1])
    width = max(0.0, (right - left) * scale)
    text = next((label for label in labels if ems(label) * FONT + 5 < width), "")
    x = LEFT + (left - view[0]) * scale
    data = f' data-info="{escape(info)}"' if info else ""
    return (
        f'<g class="{kind}" data-s="{start:.2f}" data-e="{end:.2f}" data-labels="{escape("|".join(labels))}"{data}>'
        f'<rect x="{x:.2f}" y="{at:.1f}" width="{width - 0.8 if width > 3 else width:.2f}" height="{tall:.1f}"/>'
        f'<text x="{x + width / 2:.2f}" y="{at + tall / 2:.1f}">{escape(text)}</text></g>'
    )


def _areas(laid: Picture, unit: Unit, base: float) -> Iterator[str]:
    """Stacked areas in (cycles from start, share); only their group's transform changes when the view does."""
    scale = _scale(laid.view)
    move = f"translate({LEFT - (laid.view[0] - laid.start) * scale:.2f} {base:.1f}) scale({scale:.6f} {-(UNIT - 4)})"
    paths = []
    for name, corners in unit.stack(laid.edges):
        upper = "".join(
            f"V{high:.3g}H{after[0] - laid.start:.1f}" for (_, _, high), after in zip(corners, corners[1:], strict=False)
        )
        lower = "".join(f"V{low:.3g}H{at - laid.start:.1f}" for at, low, _ in reversed(corners[:-1]))
        label = escape(f"{unit.label}: {name}")
        paths.append(f'<path class="{WORDS[name]}" d="M0 {corners[0][1]:.3g}{upper}{lower}Z"><title>{label}</title></path>')
    yield f'<g class="area" data-base="{base:.1f}" data-tall="{UNIT - 4}" transform="{move}">{"".join(paths)}</g>'


def _ticks(laid: Picture, bottom: float) -> Iterator[str]:
    scale = _scale(laid.view)
    step = nice_step((laid.view[1] - laid.view[0]) / 8)
    at = math.ceil(laid.view[0] / step) * step
    while at <= laid.view[1]:
        x = LEFT + (at - laid.view[0]) * scale
        yield f'<path d="M{x:.1f} {TOP}V{bottom:.1f}"/><text x="{x:.1f}" y="{bottom + 14:.1f}">{at:,.0f}</text>'
        yield f'<text class="us" x="{x:.1f}" y="{TOP - 8}">{at / laid.mhz:.4g} us</text>'
        at += step


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``least``, and no less than one cycle."""
    power = 10.0 ** math.floor(math.log10(max(least, 1.0)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
