"""Candidates of a sweep as dots: what is best over what it costs, the Pareto front marked. SVG that reads without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from html import escape

from ..sim.explore import Row

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 44
PIXEL = 3  # of dots nearer than this one is drawn
TICKS = 5
LOG = 3.0  # largest over smallest from where a scale is logarithmic


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What lies on the x axis: a row's column, its name in words, and how its ticks are written. ``binary``: in powers of two."""

    column: str
    title: str
    write: Callable[[float], str]
    binary: bool = False


def scatter(*, title: str, cost: Cost, y: str, dots: Sequence[tuple[Row, str]], front: Collection[int]) -> str:
    """``dots``: rows, best first, with what is said of each; ``y``: "ms" or "tflops"; ``front``: candidates that are marked."""
    name = cost.column
    across = Scale([row[name] for row, _ in dots], LEFT, WIDTH - RIGHT, log=False, binary=cost.binary)
    up = Scale([row[y] for row, _ in dots], HEIGHT - BOTTOM, TOP, log=True)
    drawn: set[tuple[int, int]] = set()
    below: list[str] = []
    above: list[str] = []
    for row, text in dots:
        at = across.at(row[name]), up.at(row[y])
        marked = row["candidate"] in front
        pixel = (round(at[0] / PIXEL), round(at[1] / PIXEL))
        if not marked and pixel in drawn:
            continue
        drawn.add(pixel)
        dot = f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{5 if marked else 3}" data-info="{escape(text)}"/>'
        (above if marked else below).append(dot)
    (first, value), *others = _staircase([(row[name], row[y]) for row, _ in dots])
    path = f"M{across.at(first):.1f} {up.at(value):.1f}" + "".join(f"H{across.at(a):.1f}V{up.at(b):.1f}" for a, b in others)
    grid = "".join(
        f'<path class="grid" d="M{LEFT} {up.at(v):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="up" x="{LEFT - 6}" y="{up.at(v):.1f}">{v:.4g}</text>'
        for v in up.ticks()
    )
    grid += "".join(
        f'<text class="across" x="{across.at(v):.1f}" y="{HEIGHT - BOTTOM + 14}">{escape(cost.write(v))}</text>'
        for v in across.ticks()
    )
    unit = {"ms": "ms", "tflops": "TFLOP/s"}[y]
    return (
        f'<figure class="scatter"><figcaption class="caption">{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}, a dot a candidate">'
        f'{grid}<text class="up" x="{LEFT - 6}" y="8">{unit}</text>'
        f'<text class="unit end" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}">{escape(cost.title)}</text>'
        f'<path class="best" d="{path}H{WIDTH - RIGHT}"/>'
        f'<g class="dots">{"".join(below)}</g><g class="front">{"".join(above)}</g></svg></figure>'
    )


def _staircase(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of the best value that is to be had for at most so much. ``points``: best value first."""
    corners: list[tuple[float, float]] = []
    for cost, value in points:
        if not corners or cost < corners[-1][0]:
            corners.append((cost, value))
    return corners[::-1]


class Scale:
    """Values to places from ``start`` to ``end``, with a twentieth of room at either side; logarithmic only where ``log`` and
    the values spread by more than LOG. ``binary``: ticks are a power of two apart."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool, binary: bool = False) -> None:
        self.low, self.high = float(min(values)), float(max(values))
        self.start, self.end, self.binary = start, end, binary
        self.log = log and self.low > 0 and self.high / self.low > LOG

    def _place(self, value: float) -> float:
        return math.log(value) if self.log else value

    def at(self, value: float) -> float:
        a, b = self._place(self.low), self._place(self.high)
        share = (self._place(value) - a) / (b - a) if b > a else 0.5
        return self.start + (0.05 + 0.9 * share) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within the values; the ends themselves where there are none."""
        if self.low == self.high:
            return [self.low]
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [m * 10.0**p for p in powers for m in (1, 2, 5) if self.low <= m * 10.0**p <= self.high]
        else:
            least = (self.high - self.low) / TICKS
            power = 10.0 ** math.floor(math.log10(least))
            step = (
                2.0 ** math.ceil(math.log2(least))
                if self.binary
                else next(f * power for f in (1, 2, 5, 10) if f * power >= least)
            )
            first = math.ceil(self.low / step)
            found = [step * n for n in range(first, math.floor(self.high / step) + 1)]
        return found if len(found) > 1 else [self.low, self.high]
