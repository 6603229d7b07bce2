"""A timeline as a PNG, SVG or PDF file: ``plot(result, path)``. Needs matplotlib, the ``plot`` extra."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .picture import FAMILIES, Block, Picture, Slice, ems, picture
from .predict import Result
from .unit_words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
WIDTH = 12.8  # inches; 125 pixels each where the picture is shown 1600 wide
DPI = 250
LANE, STRIP, UNIT, GAP = 0.44, 0.22, 0.34, 0.16  # heights in inches
LEFT, RIGHT, TOP, BOTTOM = 1.62, 0.62, 1.12, 0.80  # margins in inches
FONT = 8.0
INK, FAINT, GRID = "#1a1a1a", "#666666", "#e4e4e4"
STRIPES = ("#eef2f6", "#dde4ec")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": FONT, "text.color": INK,
    "axes.edgecolor": "#999999", "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.6,
    "hatch.linewidth": 0.5, "svg.fonttype": "none", "svg.hashsalt": "flashsim", "figure.facecolor": "white",
}  # fmt: skip


def plot(result: Result, path: Path, **window: Any) -> Picture:
    """Draw one SM's timeline into ``path``, whose suffix chooses the format; ``window`` as :func:`.picture.picture` takes it.

    Simulate with ``record_limit=picture.RECORDS``. Raises ValueError for another suffix, where matplotlib is missing, and as
    ``picture`` does; OSError where the file cannot be written.
    """
    check_path(path)
    import matplotlib
    from matplotlib.figure import Figure

    laid = picture(result, **window)
    with matplotlib.rc_context(STYLE):
        figure = draw(laid, result, Figure)
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
        figure.savefig(path, dpi=DPI, metadata=metadata)
    return laid


def check_path(path: Path) -> None:
    """Refuse, before anything long runs, a suffix that cannot be drawn, and a machine without matplotlib."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"cannot draw {path.name}: the name must end in {', '.join(SUFFIXES)}; change -o")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a timeline picture needs matplotlib, which is not installed: pip install '.[plot]'")


def draw(laid: Picture, result: Result, figure_type: type[Figure]) -> Figure:
    """The whole figure: title, lanes, units, legend."""
    lanes = sum(STRIP + GAP + LANE * sum(lane.slot == slot for lane in laid.lanes) for slot in laid.slots)
    units = UNIT * len(laid.units)
    height = TOP + lanes + 0.30 + units + BOTTOM
    figure = figure_type(figsize=(WIDTH, height))

    def axes(top: float, tall: float) -> Axes:
        return figure.add_axes((LEFT / WIDTH, 1 - (top + tall) / height, 1 - (LEFT + RIGHT) / WIDTH, tall / height))

    above = axes(TOP, lanes)
    _draw_lanes(above, laid, lanes)
    if laid.units:
        below = axes(TOP + lanes + 0.30, units)
        _draw_units(below, laid)
    else:
        below = above
    _draw_scales(above, below, laid)
    _draw_title(figure, laid, result, height)
    _draw_legend(figure, laid, height)
    return figure


def title(result: Result) -> str:
    return f"{result.schedule} on {result.gpu}:  {result.attention.label}"


def subtitle(result: Result) -> str:
    """Time, rate and limiter; where the host is slower than the kernels, both times."""
    cycles = f"{result.cycles:,.0f} cycles at {result.clock_mhz:.0f} MHz"
    time = f"{result.ms:.4g} ms"
    kernels = f"{time} on the host's launch path, kernels take {cycles}" if result.host_bound else f"{cycles} = {time}"
    return f"{kernels},  {result.tflops:.4g} TFLOP/s.  Limiter: {result.limiter}"


def caption(laid: Picture, result: Result) -> str:
    """What part of the run the picture shows."""
    ctas = len(laid.slots)
    resident = f"{counted(ctas, 'CTA')} resident"
    kernel = f"kernel {laid.kernel}, " if len(result.launches) > 1 else ""
    steady = f", {laid.period:,.0f} cycles a {laid.trip} of each CTA" if laid.period else ""
    return f"One SM, {kernel}{resident}, cycles {laid.view[0]:,.0f} to {laid.view[1]:,.0f}{steady}"


# --- lanes ---


def _draw_lanes(axes: Axes, laid: Picture, height: float) -> None:
    axes.set_ylim(height, 0)
    axes.set_xlim(*laid.view)
    at, ticks, names = 0.0, list[float](), list[str]()
    for slot in laid.slots:
        _draw_strip(axes, laid, [b for b in laid.blocks if b.slot == slot], at)
        ticks.append(at + STRIP / 2)
        names.append(f"CTA {slot}")
        at += STRIP
        for lane in (lane for lane in laid.lanes if lane.slot == slot):
            for x in lane.slices:
                _draw_slice(axes, laid, x, at)
            ticks.append(at + LANE / 2)
            names.append(lane.name)
            at += LANE
        at += GAP
    axes.set_yticks(ticks, names)
    for label, name in zip(axes.get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name.startswith("CTA ") else "normal")
    axes.tick_params(axis="y", length=0)


def _inches(laid: Picture, start: float, end: float) -> tuple[float, float]:
    """What of the span the view shows, as (width in inches, its middle in cycles)."""
    left, right = max(start, laid.view[0]), min(end, laid.view[1])
    return (right - left) / (laid.view[1] - laid.view[0]) * (WIDTH - LEFT - RIGHT), (left + right) / 2


def _draw_strip(axes: Axes, laid: Picture, blocks: list[Block], at: float) -> None:
    for i, block in enumerate(blocks):
        width, middle = _inches(laid, block.start, block.end)
        if width <= 0:
            continue
        parity = int(block.label.split()[-1]) % 2 if block.label.split()[-1].isdecimal() else i % 2
        axes.broken_barh([(block.start, block.end - block.start)], (at, STRIP - 0.03), facecolor=STRIPES[parity], zorder=1)
        if _fits(block.label, width, FONT - 1):
            axes.text(middle, at + STRIP / 2 - 0.01, block.label, ha="center", va="center", fontsize=FONT - 1, color=FAINT)


def _draw_slice(axes: Axes, laid: Picture, x: Slice, at: float) -> None:
    width, middle = _inches(laid, x.start, x.end)
    if width <= 0:
        return
    colour, waiting = FAMILIES[x.family][0], x.family == "wait"
    tall, gap = (LANE * 0.5, LANE * 0.25) if waiting else (LANE - 0.06, 0.03)
    style: dict[str, Any] = {"hatch": "//////", "edgecolor": "#9a9a9a", "linewidth": 0} if waiting else {"linewidth": 0}
    axes.broken_barh([(x.start, x.end - x.start)], (at + gap, tall), facecolor=colour, zorder=2, **style)
    if not waiting and width > 0.01:
        axes.vlines(x.start, at + gap, at + gap + tall, color="white", linewidth=0.5, zorder=3)
    text = next((label for label in x.labels if _fits(label, width, FONT - 0.5)), None)
    if text and not (waiting and width < 0.5):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85} if waiting else None
        axes.text(
            middle, at + LANE / 2, text, ha="center", va="center", fontsize=FONT - 0.5, color=ink_on(colour), zorder=4, bbox=box
        )


def _fits(text: str, inches: float, size: float) -> bool:
    return ems(text) * size / 72 + 0.05 < inches


def ink_on(colour: str) -> str:
    """Black or white, whichever has more contrast on ``colour`` (WCAG relative luminance)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "white" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else INK


# --- units ---


def _draw_units(axes: Axes, laid: Picture) -> None:
    rows = len(laid.units)
    axes.set_ylim(rows, 0)
    axes.set_xlim(*laid.view)
    for row, unit in enumerate(laid.units):
        base = row + 1
        axes.axhspan(row + 0.12, base, color="#f6f6f6", zorder=0)
        for name, corners in unit.stack(laid.edges):
            at, low, high = np.array(corners).T
            colour = FAMILIES[name][0]
            axes.fill_between(at, base - 0.88 * low, base - 0.88 * high, step="post", color=colour, linewidth=0, zorder=2)
        share = f"{100 * unit.mean:.0f} %"
        axes.text(1.006, base - 0.44, share, transform=axes.get_yaxis_transform(), va="center", fontsize=FONT)
    axes.set_yticks([row + 0.56 for row in range(rows)], [unit.label for unit in laid.units])
    axes.tick_params(axis="y", length=0)
    axes.text(1.006, -0.06, "held", transform=axes.get_yaxis_transform(), va="bottom", fontsize=FONT - 1, color=FAINT)


# --- around ---


def _draw_scales(above: Axes, below: Axes, laid: Picture) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    cycles = FuncFormatter(lambda x, _: f"{x:,.0f}")
    for axes in dict.fromkeys((above, below)):
        axes.xaxis.set_major_locator(MaxNLocator(9, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(cycles)
        axes.grid(axis="x", color=GRID, linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    if above is not below:
        above.tick_params(axis="x", length=0, labelbottom=False)
        above.spines["bottom"].set_visible(False)
    below.set_xlabel("SM cycles since the kernel began", labelpad=2)

    def to_us(x: Any) -> Any:
        return x / laid.mhz

    def to_cycles(x: Any) -> Any:
        return x * laid.mhz

    us = above.secondary_xaxis("top", functions=(to_us, to_cycles))
    us.xaxis.set_major_locator(MaxNLocator(9))
    us.tick_params(labelsize=FONT - 1, colors=FAINT, length=2, pad=1)
    us.spines["top"].set_visible(False)
    above.annotate(
        f"us at {laid.mhz:.0f} MHz", (0, 1), xytext=(-24, 4), textcoords="offset points", xycoords="axes fraction", ha="right",
        va="bottom", fontsize=FONT - 1, color=FAINT,
    )  # fmt: skip


def _draw_title(figure: Figure, laid: Picture, result: Result, height: float) -> None:
    left = 0.16 / WIDTH
    figure.text(left, 1 - 0.16 / height, title(result), fontsize=FONT + 5, fontweight="bold", va="top")
    line = textwrap.shorten(subtitle(result), 175, placeholder=" ...")
    figure.text(left, 1 - 0.46 / height, line, fontsize=FONT + 0.5, va="top")
    figure.text(left, 1 - 0.67 / height, caption(laid, result), fontsize=FONT, color=FAINT, va="top")


def _draw_legend(figure: Figure, laid: Picture, height: float) -> None:
    from matplotlib.patches import Patch

    patches = []
    for name in laid.families:
        hatch: dict[str, Any] = {"hatch": "//////", "edgecolor": "#9a9a9a", "linewidth": 0} if name == "wait" else {}
        patches.append(Patch(facecolor=FAMILIES[name][0], label=name, **hatch))
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(LEFT / WIDTH, 0.1 / height), ncols=len(patches), frameon=False,
        fontsize=FONT, handlelength=1.2, handleheight=0.9, columnspacing=1.4, handletextpad=0.5, borderpad=0,
    )  # fmt: skip
