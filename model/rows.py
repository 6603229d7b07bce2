"""The rows of a Program's code while it is written: instruction counts of a binary spread over them, runs packed into bundles."""

from __future__ import annotations

from collections.abc import Mapping

from .instructions import COUNTERS, INSTRUCTIONS
from .program import CODE_COLUMNS, Opcode

#: Issue cycles of a bundle, about: the grain at which warps share a sub-partition. An mma.sync counts as MMA_WEIGHT.
BUNDLE_WEIGHT = 14
MMA_WEIGHT = 6

#: Which instruction stands for a binary's extra work in each pipe (moves, address arithmetic, loop control).
EXTRA_INSTRUCTION = {
    "fma": "mov", "alu": "int_alu", "other": "control", "lsu": "control", "xu": "ex2", "stl": "stl", "ldl": "ldl",
    "ldl_far": "ldl_far", "stall": "stall",
}  # fmt: skip

OPCODE, BUNDLE, COUNT, ARG, BYTES, TENSOR, INDEX, JUMP, STATEMENT, BARRIER, RING = range(len(CODE_COLUMNS))

Edited = list[tuple[int, list[list[int]]]]


class Rows:
    """Code rows (CODE_COLUMNS) and the bundles they name."""

    def __init__(self) -> None:
        self.code: list[list[int]] = []
        self.asynchronous = False  # whether it holds products that run on after their issue
        self.bundles: list[tuple[tuple[str, int], ...]] = []
        self.numbers: dict[tuple[tuple[str, int], ...], int] = {}  # of the bundles
        self.products: list[bool] = []  # whether each bundle has a product

    def __len__(self) -> int:
        return len(self.code)

    def add(
        self, opcode: Opcode, *, statement: int, bundle: int = -1, count: int = 0, arg: int = -1, total_bytes: int = 0,
        tensor: int = -1, index: int = -1, jump: int = -1, barrier: int = -1, ring: int = -1,
    ) -> None:  # fmt: skip
        self.code.append([int(opcode), bundle, count, arg, total_bytes, tensor, index, jump, statement, barrier, ring])

    def bundle(self, counts: Mapping[str, int]) -> int:
        key = tuple((name, n) for name, n in counts.items() if n)
        number = self.numbers.setdefault(key, len(self.bundles))
        if number == len(self.bundles):
            self.bundles.append(key)
            self.products.append(any(INSTRUCTIONS[name].columns for name, _ in key))
        return number

    def ideal(self, start: int) -> dict[str, int]:
        """Instructions by counter in the code from ``start`` on."""
        ideal = dict.fromkeys((*COUNTERS, "none"), 0)
        for row in self.code[start:]:
            if row[OPCODE] == Opcode.ISSUE:
                for name, n in self.bundles[row[BUNDLE]]:
                    ideal[INSTRUCTIONS[name].counter] += n * row[COUNT]
        return ideal

    def spread(self, start: int, counts: Mapping[str, float], *, products: bool = True) -> None:
        """Add what the binary issues beyond the ideal, spread over the code from ``start`` on in proportion to its instructions.

        A compiler scatters moves and address arithmetic through the whole loop; where exactly is not modelled. Without
        ``products`` the proportion is to all but matrix instructions.
        """
        ideal = self.ideal(start)
        total = sum(ideal.values()) - (0 if products else ideal["tensor"])
        extra = {c: counts[c] - ideal.get(c, 0) for c in counts if c in EXTRA_INSTRUCTION}
        body, passed, given = self.code[start:], 0, dict.fromkeys(extra, 0)
        edited: Edited = []
        for i, row in enumerate(body):
            added = [row]
            if row[OPCODE] == Opcode.ISSUE:
                counted = [n for name, n in self.bundles[row[BUNDLE]] if products or INSTRUCTIONS[name].counter != "tensor"]
                passed += row[COUNT] * sum(counted)
                for counter, n in extra.items():
                    due = round(n * passed / total) - given[counter]
                    if due > 0:
                        given[counter] += due
                        added.append(self._issue({EXTRA_INSTRUCTION[counter]: 1}, due, -1, row[STATEMENT]))
            edited.append((i, added))
        self.replace(start, edited, len(body))

    def pad(self, start: int, stall_cycles: float) -> None:
        """Hold the warp so that all but the products from ``start`` on take a lone warp the compiler's ``stall_cycles`` or more.

        Dependences of fixed latency are in those counts, so the waits for them go, but for those on a shuffle's result or
        on what tensor memory transfers.
        """
        kept: Edited = []
        shuffled = transferred = False
        for i, row in enumerate(self.code[start:]):
            if row[OPCODE] == Opcode.ISSUE:
                names = [name for name, _ in self.bundles[row[BUNDLE]]]
                shuffled = "shfl" in names
                transferred |= any(INSTRUCTIONS[name].pipe == "tmem" for name in names)
            kept.append((i, [] if row[OPCODE] == Opcode.DEPEND and not (shuffled or transferred) else [row]))
            transferred &= row[OPCODE] != Opcode.DEPEND
        self.replace(start, kept, len(kept))
        asynchronous = any(row[OPCODE] == Opcode.ISSUE and self._product(row) for row in self.code[start:])
        ideal = self.ideal(start)
        issued = sum(ideal.values()) - (0 if asynchronous else ideal["tensor"])
        if issued:  # stalls stand between asynchronous products too; mma.sync holds the warp by itself
            self.spread(start, {"stall": max(0.0, stall_cycles - issued)}, products=asynchronous)

    def pack(self) -> None:
        """Turn each run of instructions between waits into bundles of about BUNDLE_WEIGHT issue cycles, evenly mixed."""
        targets = {row[JUMP] for row in self.code if row[JUMP] >= 0}
        self.asynchronous = any(row[OPCODE] == Opcode.ISSUE and self._product(row) for row in self.code)
        edited: Edited = []
        run: list[int] = []
        board = -1  # that the run sets
        for i, row in enumerate(self.code):
            plain = row[OPCODE] == Opcode.ISSUE and row[BYTES] == 0 and not self._product(row)
            if run and (not plain or i in targets or (row[ARG] >= 0 and board >= 0 and row[ARG] != board)):
                edited.append((run[0], self._mixed([self.code[j] for j in run])))
                run, board = [], -1
            if plain:
                run.append(i)
                board = max(board, row[ARG])
            else:
                edited.append((i, [row]))
        self.replace(0, edited, len(self.code))

    def replace(self, start: int, edited: Edited, length: int) -> None:
        """Put ``edited`` (old offset, new rows) in place of the code from ``start`` on, and move the jumps along."""
        new: list[list[int]] = []
        moved = {}
        for old, rows in edited:
            moved[start + old] = start + len(new)
            new += rows
        moved[start + length] = start + len(new)
        self.code[start:] = new
        for row in self.code:
            if row[JUMP] >= start:
                row[JUMP] = moved[row[JUMP]]

    def _product(self, row: list[int]) -> bool:
        return self.products[row[BUNDLE]]

    def _issue(self, counts: Mapping[str, int], times: int, board: int, statement: int) -> list[int]:
        return [int(Opcode.ISSUE), self.bundle(counts), times, board, 0, -1, -1, -1, statement, -1, -1]

    def _mixed(self, rows: list[list[int]]) -> list[list[int]]:
        counts: dict[str, int] = {}
        for row in rows:
            for name, n in self.bundles[row[BUNDLE]]:
                counts[name] = counts.get(name, 0) + n * row[COUNT]
        weights = {"hmma": MMA_WEIGHT, "stall": int(self.asynchronous)}  # beside a running product short bundles tell
        weight = sum(n * weights.get(name, 1) for name, n in counts.items())
        parts = max(1, round(weight / BUNDLE_WEIGHT))
        board = max(row[ARG] for row in rows)
        out: list[list[int]] = []
        for i in range(parts):
            share = {name: n * (i + 1) // parts - n * i // parts for name, n in counts.items()}
            bundle = self.bundle(share)
            if out and out[-1][BUNDLE] == bundle:
                out[-1][COUNT] += 1
            else:
                out.append(self._issue(share, 1, board, rows[0][STATEMENT]))
        return out
