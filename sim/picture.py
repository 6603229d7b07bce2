"""What a timeline picture shows, before anyone draws it: lanes of warps, the use of each unit, a window where the loop is steady.

Generic over roles, statements and units: lanes come from the Program's roles, colours from families of op kinds, units from
:mod:`.timeline`. ``plot`` draws a Picture with matplotlib, ``validate.report`` as SVG. Times are cycles of the SM's clock since
its kernel began.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..model.instructions import Path
from ..model.program import Opcode, Program, Role
from .engine import PATH, SMEM, TICKS_PER_CYCLE
from .held import slowed
from .predict import Launch, Result
from .timeline import SUBPARTITIONS, UNITS, Interval, intervals, members, waits

#: Records of one kernel that a picture needs: some thirty K/V blocks of two CTAs.
RECORDS = 40_000
BLOCKS = 3
GROUP = 4  # warps of one warpgroup: they run alike, one a sub-partition, and share a lane
SHOWN = 0.015  # a unit that is used less has no row

#: Family of ops -> colour (Okabe and Ito's palette and two more that colour-blind readers tell from it) and the op kinds that
#: belong to it. A statement of several kinds belongs to the first family that claims one of them.
FAMILIES: dict[str, tuple[str, str]] = {
    "matrix product": ("#0072B2", r"mma"),
    "exp2": ("#D55E00", r"exp"),
    "rescale, divide": ("#CC79A7", r"scale|factor|merge|divide|correct|log_sum"),
    "row max and sums": ("#E69F00", r"row_|sum|max"),
    "global load": ("#009E73", r"^load|tma_load"),
    "global store": ("#F0E442", r"^store|tma_store|reduce_add|atomic"),
    "on-chip copy": ("#4433DD", r"smem|fragments|cross_warp|matrix|tmem|transpose|^move$|^column$|spill|refill"),
    "convert, mask": ("#56B4E9", r"convert|pack|mask|zero|select"),
    "other": ("#6E6E6E", r""),
    "sync": ("#882255", r"$^"),
    "wait": ("#D4D4D4", r"$^"),
}
#: Kinds that order work and do none, whatever else is in their names (wgmma_wait, tma_load_arrive).
SYNC = re.compile(r"barrier|commit|wait|fence|arrive|expect|(^|_)sync|setmaxnreg|^advance$|^tile$")
#: Rows of units from the top, and their labels; units that are not here follow under their own names.
UNIT_LABELS = {
    "port": "issue port", "tensor": "tensor cores", "mufu": "MUFU (exp2)", "fma": "FMA", "alu": "ALU", "lsu": "load/store",
    "smem": "SMEM port", "control": "control",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One op of a lane. ``labels``: what to write on it, longest first; ``trip``: how often its CTA ran it before."""

    start: float
    end: float
    family: str
    name: str
    labels: tuple[str, ...]
    tile: int
    trip: int
    instructions: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Warps that run alike, drawn as one row: the ops of the first of them."""

    name: str
    slot: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One trip of a CTA's main loop, or one tile where the kernel has no long loop."""

    slot: int
    start: float
    end: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Use of one unit: ``shares[family]`` per bin of the Picture (of all four sub-partitions), and its mean over the view."""

    name: str
    label: str
    shares: dict[str, NDArray[np.float64]]
    mean: float

    def stack(self, edges: NDArray[np.float64]) -> Iterator[tuple[str, list[tuple[float, float, float]]]]:
        """(family, corners of its area as (cycle, lower, upper)) from the base up; an area is level until its next corner."""
        low = np.zeros(len(edges))
        for name, share in self.shares.items():
            high = low + np.append(share, share[-1])
            rounded = np.round(np.stack([low, high]), 3)
            turns = np.flatnonzero(np.append(True, np.abs(np.diff(rounded)).sum(axis=0) > 0))
            corners = [*turns.tolist(), len(edges) - 1]
            yield name, [(float(edges[i]), float(rounded[0, i]), float(rounded[1, i])) for i in corners]
            low = high


@dataclass(frozen=True, kw_only=True)
class Picture:
    """``start`` to ``end`` is laid out, ``view`` is the steady window in it; ``edges`` are the bins of the units' shares.

    ``trip``: what ``period`` counts cycles of, a "block" of the main loop or a "tile".
    """

    kernel: str
    mhz: float
    trip: str
    start: float
    end: float
    view: tuple[float, float]
    period: float | None
    lanes: tuple[Lane, ...]
    blocks: tuple[Block, ...]
    units: tuple[Unit, ...]
    edges: NDArray[np.float64]

    @property
    def families(self) -> list[str]:
        """Families that appear, in the order of FAMILIES."""
        seen = {x.family for lane in self.lanes for x in lane.slices} | {f for unit in self.units for f in unit.shares}
        return [name for name in FAMILIES if name in seen]

    @property
    def slots(self) -> list[int]:
        return sorted({lane.slot for lane in self.lanes})


def ems(text: str) -> float:
    """About how wide ``text`` is in DejaVu Sans, in units of the font size."""
    return sum(0.95 if c in "mwMW%+" else 0.36 if c in "ijl.,:;|!'() " else 0.64 for c in text)


def family(name: str) -> str:
    """The family of a statement's name (kinds joined by +) or of a wait."""
    if name == "wait" or name.startswith("wait: "):
        return "wait"
    kinds = [kind for kind in name.split("+") if not SYNC.search(kind)]
    return next((f for f, (_, pattern) in FAMILIES.items() if any(re.search(pattern, kind) for kind in kinds)), "sync")


def picture(
    result: Result,
    *,
    kernel: str | None = None,
    span: tuple[float | None, float | None] = (None, None),
    blocks: int = BLOCKS,
    context: int = 0,
    every_warp: bool = False,
    bins: int = 1000,
) -> Picture:
    """Lay out one kernel of ``result`` (the longest, unless ``kernel`` names another); simulate with ``record_limit=RECORDS``.

    ``span``: cycles to show, None for the ends of a steady window of ``blocks`` trips, with ``context`` trips on either side of
    the view. Raises ValueError where nothing was recorded, the kernel is unknown or the span holds no records.
    """
    launch = _launch(result, kernel)
    program = launch.program
    statements = intervals(program, launch.job, launch.run)
    statements = [x for x in statements if x.sm == statements[0].sm]
    if not statements:
        raise ValueError(f"{program.name} has no records: simulate with record_limit={RECORDS}")
    anchor = _anchor(program, statements)
    starts = [x.start / TICKS_PER_CYCLE for x in _longest_run(anchor)]
    recorded = (statements[0].start / TICKS_PER_CYCLE, max(x.end for x in statements) / TICKS_PER_CYCLE)
    view, outer, period = _window(starts, recorded, blocks, context)
    if span != (None, None):
        view = outer = _checked(span, view, recorded)
    edges = np.linspace(*outer, bins + 1)
    both = sorted([*statements, *waits(program, statements)], key=lambda x: (x.start, x.end))
    kept = [x for x in both if x.end > outer[0] * TICKS_PER_CYCLE and x.start < outer[1] * TICKS_PER_CYCLE]
    return Picture(
        kernel=program.name,
        mhz=launch.clock.mhz,
        trip="block" if max(x.trip for x in anchor) > 0 else "tile",
        start=outer[0],
        end=outer[1],
        view=view,
        period=period,
        lanes=tuple(_lanes(program, kept, every_warp=every_warp)),
        blocks=tuple(_blocks(statements, anchor[0], outer)),
        units=tuple(_units(launch, [x for x in kept if x.statement >= 0], edges, view)),
        edges=edges,
    )


def _launch(result: Result, kernel: str | None) -> Launch:
    if kernel is None:
        return max(result.launches, key=lambda x: x.cycles)
    names = [x.program.name for x in result.launches]
    if kernel not in names:
        raise ValueError(f"{result.schedule} has no kernel {kernel!r}; it has {', '.join(names)}: change --kernel")
    return result.launches[names.index(kernel)]


# --- the window ---


def _anchor(program: Program, statements: Sequence[Interval]) -> list[Interval]:
    """Runs of the statement that opens the main loop, on the warp that has most matrix products to do."""
    by_warp: dict[tuple[int, int], list[Interval]] = {}
    for x in statements:
        by_warp.setdefault((x.slot, x.warp), []).append(x)
    mine = max(by_warp.values(), key=lambda xs: (sum(family(x.name) == "matrix product" for x in xs), -xs[0].slot, -xs[0].warp))
    counts = Counter(x.statement for x in mine)
    most = max(counts.values())
    opening = min(s for s, n in counts.items() if n == most)
    return [x for x in mine if x.statement == opening]


def _longest_run(anchor: Sequence[Interval]) -> list[Interval]:
    """The trips of the tile that has most of them; all runs where no tile has enough for a window."""
    trips = Counter(x.tile for x in anchor)
    tile, most = trips.most_common(1)[0]
    return [x for x in anchor if x.tile == tile] if most > BLOCKS + 1 else list(anchor)


def _window(
    starts: list[float], recorded: tuple[float, float], blocks: int, context: int
) -> tuple[tuple[float, float], tuple[float, float], float | None]:
    """(view, what is around it, cycles a trip): the trips in the middle, where prologue and epilogue are far."""
    if len(starts) <= blocks + 1:
        return recorded, recorded, None
    first = (len(starts) - blocks) // 2
    left, right = max(0, first - context), min(len(starts) - 1, first + blocks + context)
    period = (starts[right] - starts[left]) / (right - left)
    margin = 0.02 * (starts[first + blocks] - starts[first])
    view = (starts[first] - margin, starts[first + blocks] + margin)
    return view, (starts[left] - margin, starts[right] + margin), period


def _checked(
    span: tuple[float | None, float | None], view: tuple[float, float], recorded: tuple[float, float]
) -> tuple[float, float]:
    width, (start, end) = view[1] - view[0], span
    if end is not None:
        end = min(end, recorded[1])
    if start is None:
        assert end is not None
        start = end - width
    start = max(start, recorded[0])
    if end is None:
        end = min(start + width, recorded[1])
    if not start < end:
        raise ValueError(
            f"cycles {start:.0f} to {end:.0f} hold no records; cycles {recorded[0]:.0f} to {recorded[1]:.0f} were recorded:"
            " change --from and --to"
        )
    return start, end


def _blocks(statements: Sequence[Interval], opening: Interval, outer: tuple[float, float]) -> Iterator[Block]:
    """Trips of the main loop of each CTA, where a trip lasts until the next one begins."""
    same = [x for x in statements if x.statement == opening.statement and x.warp == opening.warp]
    looped = max(x.trip for x in same) > 0
    ends = {(x.slot, x.tile): x.end for x in sorted(statements, key=lambda x: x.end)}
    for slot in sorted({x.slot for x in same}):
        for x, after in pairwise([*(x for x in same if x.slot == slot), None]):
            assert x is not None
            goes_on = after is not None and after.tile == x.tile
            end = after.start if after is not None and goes_on else ends[x.slot, x.tile]
            start, stop = x.start / TICKS_PER_CYCLE, end / TICKS_PER_CYCLE
            if stop > outer[0] and start < outer[1]:
                yield Block(slot=slot, start=start, end=stop, label=f"block {x.trip}" if looped else f"tile {x.tile}")


# --- lanes ---


def _lanes(program: Program, kept: Sequence[Interval], *, every_warp: bool) -> Iterator[Lane]:
    by_warp: dict[tuple[int, int], list[Interval]] = {}
    for x in kept:
        by_warp.setdefault((x.slot, x.warp), []).append(x)
    labels = {i: _labels(program, i) for i in {x.statement for x in kept if x.statement >= 0}}
    for slot in sorted({slot for slot, _ in by_warp}):
        for role, first, count in _warp_groups(program.roles, 1 if every_warp else GROUP):
            run = by_warp.get((slot, first), [])
            begin = sum(r.warps for r in program.roles[: program.roles.index(role)])
            number = f"warp {first - begin}" if count == 1 else f"warps {first - begin}-{first - begin + count - 1}"
            slices = tuple(_slice(x, labels.get(x.statement)) for x in run if x.end > x.start)
            yield Lane(name=f"{role.name} {number}", slot=slot, slices=slices)


def _warp_groups(roles: Sequence[Role], size: int) -> Iterator[tuple[Role, int, int]]:
    """(role, first warp of the CTA, number of warps) of each lane."""
    first = 0
    for role in roles:
        for offset in range(0, role.warps, size):
            yield role, first + offset, min(size, role.warps - offset)
        first += role.warps


def _slice(x: Interval, labels: tuple[str, ...] | None) -> Slice:
    return Slice(
        start=x.start / TICKS_PER_CYCLE,
        end=x.end / TICKS_PER_CYCLE,
        family=family(x.name),
        name=labels[0] if labels else x.name,
        labels=labels or (x.name, x.name.removeprefix("wait: ")),
        tile=x.tile,
        trip=x.trip,
        instructions=", ".join(f"{n} {name}" for name, n in x.instructions),
    )


def _labels(program: Program, statement: int) -> tuple[str, ...]:
    """A statement's name with what it writes, then shorter ones, for narrow boxes."""
    inside = [program.statements[i] for i in members(program, statement)]
    kinds = list(dict.fromkeys(s.kind for s in inside))
    mine = family("+".join(kinds))
    main = next(s for s in inside if family(s.kind) == mine)
    named = f"{main.kind} {main.writes[0]}" if main.writes else main.kind
    whole = [named if s is main else s.kind for s in inside]
    return tuple(dict.fromkeys((" + ".join(dict.fromkeys(whole)), named, main.kind)))


# --- units ---


def _units(launch: Launch, kept: Sequence[Interval], edges: NDArray[np.float64], view: tuple[float, float]) -> Iterator[Unit]:
    held_of = {name: [x.held[i] for x in kept] for i, name in enumerate(UNITS)}
    passed = _smem_ticks(launch)
    held_of.setdefault("smem", [int(passed[x.last_row + 1] - passed[x.first_row]) for x in kept])
    inside = (edges[:-1] >= view[0]) & (edges[1:] <= view[1])
    families, slower = np.array([family(x.name) for x in kept]), slowed(launch)
    whole = {"smem", "tensor"} if (launch.job.bundles[:, PATH] == Path.TCGEN05).any() else {"smem"}  # one for the whole SM
    for name in [*(n for n in UNIT_LABELS if n in held_of), *(n for n in held_of if n not in UNIT_LABELS)]:
        held, wide = np.array(held_of[name]) * slower.get(name, 1.0), 1 if name in whole else SUBPARTITIONS
        shares = {}
        for each in FAMILIES:
            mine = np.flatnonzero((families == each) & (held > 0))
            if len(mine):
                shares[each] = _spread([kept[i] for i in mine.tolist()], held[mine], edges) / wide
        shares = _served(shares)
        mean = float(sum(shares.values(), np.zeros(len(edges) - 1))[inside].mean()) if inside.any() else 0.0
        if mean > SHOWN:
            yield Unit(name=name, label=UNIT_LABELS.get(name, name), shares=shares, mean=mean)


def _spread(group: Sequence[Interval], held: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Share of each bin that ``group`` holds a unit, each hold spread evenly over its interval, or over itself if it is longer
    (work that goes on after its warp has issued it)."""
    starts = np.array([x.start for x in group], dtype=float)
    ends = np.maximum([x.end for x in group], starts + held)
    ticks = edges * TICKS_PER_CYCLE
    passed = np.clip((ticks[None, :] - starts[:, None]) / np.maximum(ends - starts, 1)[:, None], 0, 1)
    shares: NDArray[np.float64] = np.diff(held @ passed) / np.diff(ticks)
    return shares


def _served(asked: dict[str, NDArray[np.float64]]) -> dict[str, NDArray[np.float64]]:
    """The same work where no bin holds more than the unit can do: what is too much for one waits for the next."""
    if not asked or (left := np.array(list(asked.values()))).sum(axis=0).max() <= 1:
        return asked
    for i in range(left.shape[1] - 1):
        total = left[:, i].sum()
        if total > 1:
            left[:, i + 1] += left[:, i] * (1 - 1 / total)
            left[:, i] /= total
    left[:, -1] /= max(1.0, left[:, -1].sum())
    return dict(zip(asked, left, strict=True))


def _smem_ticks(launch: Launch) -> NDArray[Any]:
    """Ticks of the SM's shared-memory port that the code rows before each row take: what lies between two is theirs."""
    code, bundles = launch.program.code, launch.job.bundles
    per_row = np.where(code[:, 0] == Opcode.ISSUE, bundles[code[:, 1], SMEM] * code[:, 2], 0)
    return np.concatenate([[0], np.cumsum(per_row)])

