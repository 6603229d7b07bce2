"""The rows of a Program's code while it is written: instruction counts of a binary spread over them, runs packed into bundles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise

import numpy as np

from .instructions import COUNTERS, INSTRUCTIONS
from .program import CODE_COLUMNS, IntArray, Opcode

#: Issue cycles of a bundle, about: the grain at which warps share a sub-partition. An mma.sync counts as MMA_WEIGHT.
BUNDLE_WEIGHT = 14
MMA_WEIGHT = 6

#: Which instruction stands for a binary's extra work in each pipe (moves, address arithmetic, loop control).
EXTRA_INSTRUCTION = {
    "fma": "mov", "alu": "int_alu", "other": "control", "lsu": "control", "xu": "ex2", "stl": "stl", "ldl": "ldl",
    "ldl_far": "ldl_far", "off": "fmul_off", "stall": "stall",
}  # fmt: skip

OPCODE, BUNDLE, COUNT, ARG, BYTES, TENSOR, INDEX, JUMP, STATEMENT, BARRIER, RING = range(len(CODE_COLUMNS))

ISSUE, DEPEND = int(Opcode.ISSUE), int(Opcode.DEPEND)

Bundle = tuple[tuple[str, int], ...]  # (instruction, number) pairs
Segments = Sequence[Mapping[str, float]]  # counts and stall cycles of the parts of a stretch, one after the other
Edited = list[list[list[int]]]  # of each row from some place on: the rows that take its place


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a bundle holds: instructions in all and by counter, whether a product, a shuffle, a transfer of tensor memory, a try
    of an mbarrier."""

    total: int
    counted: dict[str, int]
    product: bool
    shuffle: bool
    transfer: bool
    asks: bool


@lru_cache(maxsize=4096)
def content(bundle: Bundle) -> Content:
    kinds = [INSTRUCTIONS[name] for name, _ in bundle]
    counted: dict[str, int] = {}
    for kind, (_, n) in zip(kinds, bundle, strict=True):
        counted[kind.counter] = counted.get(kind.counter, 0) + n
    return Content(
        total=sum(counted.values()), counted=counted, product=any(kind.columns for kind in kinds),
        shuffle=any(kind.name == "shfl" for kind in kinds), transfer=any(kind.pipe == "tmem" for kind in kinds),
        asks=any(kind.name == "try_wait" for kind in kinds),
    )  # fmt: skip


@lru_cache(maxsize=16)  # programs that differ in registers alone have the same
def tabulated(bundles: tuple[Bundle, ...]) -> tuple[tuple[str, ...], IntArray]:
    """(names of the instructions in ``bundles``, how many of each a bundle has); the array's shape is (bundles, names)."""
    names = tuple(sorted({name for bundle in bundles for name, _ in bundle}))
    column = {name: i for i, name in enumerate(names)}
    counts = np.zeros((len(bundles), len(names)), np.int64)
    for i, bundle in enumerate(bundles):
        for name, n in bundle:
            counts[i, column[name]] = n
    counts.setflags(write=False)
    return names, counts


class Rows:
    """Code rows (CODE_COLUMNS) and the bundles they name. ``statement``: the number of the one that rows are added for."""

    def __init__(self) -> None:
        self.code: list[list[int]] = []
        self.asynchronous = False  # whether it holds products that run on after their issue
        self.bundles: list[Bundle] = []
        self.numbers: dict[Bundle, int] = {}  # of the bundles
        self.contents: list[Content] = []
        self.mixtures: dict[Bundle, list[tuple[int, int]]] = {}  # of each packed run's counts: bundles and how often
        self.single: list[list[int]] = []  # rows of one instruction each, which are not mixed with others
        self.arranged: list[tuple[list[int], Segments]] = []  # rows whose instructions a binary has in segments
        self.statement = -1

    def __len__(self) -> int:
        return len(self.code)

    def add(
        self, opcode: Opcode, *, bundle: int = -1, count: int = 0, arg: int = -1, total_bytes: int = 0,
        tensor: int = -1, index: int = -1, jump: int = -1, barrier: int = -1, ring: int = -1,
    ) -> None:  # fmt: skip
        self.code.append([int(opcode), bundle, count, arg, total_bytes, tensor, index, jump, self.statement, barrier, ring])

    def bundle(self, bundle: Bundle) -> int:
        """Its number; instructions that a bundle does not have are left out of it."""
        number = self.numbers.get(bundle)
        if number is None:
            number = self.numbers[bundle] = len(self.bundles)
            self.bundles.append(bundle)
            self.contents.append(content(bundle))
        return number

    def ideal(self, start: int) -> dict[str, int]:
        """Instructions by counter in the code from ``start`` on."""
        ideal = dict.fromkeys((*COUNTERS, "none"), 0)
        for row in self.code[start:]:
            if row[OPCODE] == ISSUE:
                for counter, n in self.contents[row[BUNDLE]].counted.items():
                    ideal[counter] += n * row[COUNT]
        return ideal

    def spread(self, start: int, counts: Mapping[str, float], *, products: bool = True, others: bool = True) -> None:
        """Add what the binary issues beyond the ideal, spread over the code from ``start`` on in proportion to its instructions.

        A compiler scatters moves and address arithmetic through the whole loop; where exactly is not modelled. Without
        ``products`` the proportion is to all but matrix instructions, without ``others`` to these alone.
        """
        ideal = self.ideal(start)
        matrix, all_ = ideal["tensor"], sum(ideal.values())
        total = (matrix if products else 0) + (all_ - matrix if others else 0)
        wanted = {c: counts[c] - ideal.get(c, 0) for c in counts if c in EXTRA_INSTRUCTION}
        extra = {c: n for c, n in wanted.items() if n > 0}
        passed, given = 0, dict.fromkeys(extra, 0)
        edited: Edited = []
        for row in self.code[start:]:
            added = [row]
            edited.append(added)
            if row[OPCODE] != ISSUE:
                continue
            own = self.contents[row[BUNDLE]]
            matrix = own.counted.get("tensor", 0)
            passed += row[COUNT] * ((matrix if products else 0) + (own.total - matrix if others else 0))
            for counter, n in extra.items():
                due = round(n * passed / total) - given[counter]
                if due > 0:
                    given[counter] += due
                    extra_row = self.issue(((EXTRA_INSTRUCTION[counter], 1),), due, -1, row[STATEMENT])
                    added.insert(len(added) - own.asks, extra_row)  # an mbarrier's address comes before its try
        self.replace(start, edited)

    def pad(self, start: int, stall_cycles: float, *, others: bool = True) -> None:
        """Hold the warp so that all but the products from ``start`` on take a lone warp the compiler's ``stall_cycles`` or more.

        Dependences of fixed latency are in those counts, so the waits for them go, but for those on a shuffle's result, on
        what tensor memory transfers and on an mbarrier's answer.
        """
        self.release(start)
        products = self._products()
        asynchronous = any(row[BUNDLE] in products for row in self.code[start:])
        ideal = self.ideal(start)
        issued = sum(ideal.values()) - (0 if asynchronous else ideal["tensor"])
        if issued:  # stalls stand between asynchronous products too; mma.sync holds the warp by itself
            self.spread(start, {"stall": max(0.0, stall_cycles - issued)}, products=asynchronous, others=others)

    def release(self, start: int) -> None:
        """Take away the waits of fixed latency from ``start`` on: where stall counts were read, they hold the warp."""
        kept: Edited = []
        shuffled = transferred = False
        for row in self.code[start:]:
            if row[OPCODE] == ISSUE:
                own = self.contents[row[BUNDLE]]
                shuffled = own.shuffle
                transferred |= own.transfer or own.asks
            kept.append([] if row[OPCODE] == DEPEND and not (shuffled or transferred) else [row])
            transferred &= row[OPCODE] != DEPEND
        self.replace(start, kept)

    def line_up(self, start: int) -> None:
        """Issue what is not a product from ``start`` on one instruction at a time, since each waits for the one before it: after
        its share of the run's stalls it asks for the sub-partition's port again. Called after :meth:`pad`."""
        edited: Edited = []
        run: list[list[int]] = []
        for row in [*self.code[start:], None]:
            if row is not None and row[OPCODE] == ISSUE and row[BYTES] == 0 and not self.contents[row[BUNDLE]].product:
                run.append(row)
                edited.append([])
                continue
            if run:
                edited[-1] += self._lined_up(run)
                run = []
            if row is not None:
                edited.append([row])
        self.replace(start, edited)

    def _lined_up(self, rows: list[list[int]]) -> list[list[int]]:
        each_of = [(name, n * row[COUNT], row) for row in rows for name, n in self.bundles[row[BUNDLE]]]
        steps = [(name, row[ARG], row[STATEMENT]) for name, n, row in each_of if name != "stall" for _ in range(n)]
        stalls, out = sum(n for name, n, _ in each_of if name == "stall"), []
        for i, (name, board, statement) in enumerate(steps):
            own = stalls * (i + 1) // len(steps) - stalls * i // len(steps)
            out.append(self.issue(((name, 1), *((("stall", own),) if own else ())), 1, board, statement))
        self.single += out
        return out

    def arrange(self, start: int, segments: Segments) -> None:
        """Divide the run from ``start`` on among ``segments`` as a binary does, instead of mixing all of it evenly."""
        self.arranged += [(row, segments) for row in self.code[start:] if row[OPCODE] == ISSUE]

    def pack(self) -> None:
        """Turn each run of instructions between waits into bundles of about BUNDLE_WEIGHT issue cycles, evenly mixed."""
        targets = {row[JUMP] for row in self.code}
        products = self._products()
        self.asynchronous = any(row[BUNDLE] in products for row in self.code)
        single = {id(row) for row in self.single}
        segments = {id(row): each for row, each in self.arranged}
        edited: Edited = []
        run: list[list[int]] = []
        begin, board, own = 0, -1, None  # of the run: its first row, the scoreboard that it sets, and its segments
        for i, row in enumerate(self.code):
            plain = row[OPCODE] == ISSUE and row[BYTES] == 0 and row[BUNDLE] not in products and id(row) not in single
            ends = not plain or i in targets or (row[ARG] >= 0 and board >= 0 and row[ARG] != board)
            if run and (ends or segments.get(id(row)) is not own):
                edited[begin] = self._mixed(run, board, own)
                run, board = [], -1
            if not plain:
                edited.append([row])
                continue
            begin, own = (begin, own) if run else (i, segments.get(id(row)))
            run.append(row)
            board = max(board, row[ARG])
            edited.append([])
        self.replace(0, edited)

    def replace(self, start: int, edited: Edited) -> None:
        """Put ``edited`` in place of the code from ``start`` on, and move its jumps along; none leads there from before."""
        places = list(accumulate(map(len, edited), initial=start))
        self.code[start:] = chain.from_iterable(edited)
        for row in self.code[start:]:
            if row[JUMP] >= start:
                row[JUMP] = places[row[JUMP] - start]

    def _products(self) -> set[int]:
        """The bundles that are products of a warpgroup or of a CTA."""
        return {number for number, own in enumerate(self.contents) if own.product}

    def issue(self, bundle: Bundle, times: int, board: int, statement: int) -> list[int]:
        return [ISSUE, self.bundle(bundle), times, board, 0, -1, -1, -1, statement, -1, -1]

    def _mixed(self, rows: list[list[int]], board: int, segments: Segments | None) -> list[list[int]]:
        counts: dict[str, int] = {}
        for row in rows:
            for name, n in self.bundles[row[BUNDLE]]:
                counts[name] = counts.get(name, 0) + n * row[COUNT]
        packed, statement = [], rows[0][STATEMENT]
        for part in divided(counts, segments) if segments else (counts,):
            run = tuple((name, n) for name, n in part.items() if n)
            if run not in self.mixtures:  # a kernel's k-steps, and its loops, repeat most of their runs
                self.mixtures[run] = [(self.bundle(bundle), times) for bundle, times in mixed(run, self.asynchronous)]
            packed += [[ISSUE, bundle, times, board, 0, -1, -1, -1, statement, -1, -1] for bundle, times in self.mixtures[run]]
        return packed


def divided(counts: Mapping[str, int], segments: Segments) -> list[dict[str, int]]:
    """``counts`` in segments, each instruction in proportion to what its pipe has there, with each segment's own stalls."""
    out: list[dict[str, int]] = [{} for _ in segments]
    for name, n in counts.items():
        counter = INSTRUCTIONS[name].counter
        there = [segment.get(counter, 0) for segment in segments]
        if counter == "none" or not sum(there):
            if counter != "none":
                out[-1][name] = n
            continue
        places = [0, *(round(n * part / sum(there)) for part in accumulate(there))]
        for part, (first, last) in zip(out, pairwise(places), strict=True):
            part[name] = last - first
    for part, segment in zip(out, segments, strict=True):
        part["stall"] = max(0, round(segment["stall_cycles"] - sum(part.values())))
    return out


@lru_cache(maxsize=4096)  # the candidates of a sweep, too, have most of their runs in common
def mixed(counts: Bundle, asynchronous: bool) -> tuple[tuple[Bundle, int], ...]:
    """``counts`` in bundles of about BUNDLE_WEIGHT issue cycles, as even as whole instructions allow: each with how often it
    follows itself. ``asynchronous``: products run on beside them, where short bundles tell, so that stalls weigh too.
    """
    weights = {"hmma": MMA_WEIGHT, "stall": int(asynchronous)}
    parts = max(1, round(sum(n * weights.get(name, 1) for name, n in counts) / BUNDLE_WEIGHT))
    names = [name for name, _ in counts]
    shares = zip(*([n * (i + 1) // parts - n * i // parts for i in range(parts)] for _, n in counts), strict=True)
    return tuple(
        (tuple((name, n) for name, n in zip(names, share, strict=True) if n), sum(1 for _ in same))
        for share, same in groupby(shares)
    )
