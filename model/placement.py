"""Where a compiler puts a loop's vector work: beside its products and between them.

A loop that multiplies twice (S = Q K^T, then P V) has three parts: up to the end of its first product, from there to the begin of
its last one, and the rest. Written in order, softmax lies in the middle one. A compiler's scheduler moves what is not needed yet
among the products: P V begins with the first 16 keys of P, so that most exponentials, sums and conversions can wait.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from .profiles import Usual
from .rows import ARG, BUNDLE, BYTES, COUNT, EXTRA_INSTRUCTION, ISSUE, OPCODE, STATEMENT, Content, Edited, Rows

#: Counters whose instructions move; what is added: spilled registers, and of "fma" what a predicate turns off; and what stays
#: with its data.
MOVED = ("fma", "alu", "xu")
ADDED = ("off", "stl", "ldl", "ldl_far")
LOADS = ("lsu", "other")
SCORES, BETWEEN, VALUES = PARTS = range(3)

#: What each part issues but for products, by counter (MOVED, ADDED, LOADS), and the sum of its stall counts ("stall").
Parts = Sequence[Mapping[str, float]]


class Sown(NamedTuple):
    """Rows that are to be spread over each part."""

    scores: list[list[int]]
    between: list[list[int]]
    values: list[list[int]]


class Placement:
    """The code of ``rows`` from ``start`` on in its three parts. Rows of the statements ``apart`` stay as and where they are:
    what masks a block comes on top of a loop without masks."""

    def __init__(self, rows: Rows, start: int, apart: Container[int] = ()) -> None:
        self.rows, self.start, self.apart = rows, start, apart

    def usual(self, usual: Usual) -> Parts:
        """The parts of a loop whose binary was not read."""
        parts: list[dict[str, float]] = [dict(each) for each in self._issued()]
        for counter in MOVED:
            rest = sum(p[counter] for p in parts) * usual.overhead.get(counter, 1.0) - parts[SCORES][counter]
            parts[BETWEEN][counter] = rest * (1 - usual.late[counter])
            parts[VALUES][counter] = rest * usual.late[counter]
        for part in (BETWEEN, VALUES):
            parts[part]["off"] = round(usual.off * parts[part]["xu"])
        issued = [sum(n for counter, n in p.items() if counter != "off") for p in parts]  # "fma" holds those already
        return [p | {"stall": cycles * n} for p, cycles, n in zip(parts, usual.stalls, issued, strict=True)]

    def apply(self, parts: Parts) -> None:
        """Issue in each part what ``parts`` says: what the middle one has too many of goes among the products, what is still
        missing is added. All but the products then takes a lone warp the stall cycles, or more."""
        have, sown = self._issued(), Sown([], [], [])
        for counter in MOVED:
            want = [round(p.get(counter, 0) - (p.get("off", 0) if counter == "fma" else 0)) for p in parts]
            missing = [max(0, w - h[counter]) for w, h in zip(want, have, strict=True)]
            spare = have[BETWEEN][counter] - want[BETWEEN]
            for to in (VALUES, SCORES):
                moved = max(0, min(spare, missing[to]))
                sown[to].extend(self._take(counter, moved))
                spare, missing[to] = spare - moved, missing[to] - moved
            for to in PARTS:
                sown[to].extend(self._extra(counter, missing[to]))
        for to in PARTS:
            for counter in ADDED:
                sown[to].extend(self._extra(counter, round(parts[to].get(counter, 0))))
        self._sow(sown)
        self.rows.spread(self.start, {c: sum(p.get(c, 0) for p in parts) for c in LOADS})
        self.rows.release(self.start)
        issued = [sum(each.values()) for each in self._issued()]
        self._sow(Sown(*(self._extra("stall", round(p["stall"]) - n) for p, n in zip(parts, issued, strict=True))))

    # --- pieces ---

    def _parted(self) -> list[tuple[int, list[int]]]:
        """The rows from ``start`` on, each with the number of its part."""
        code, contents = self.rows.code[self.start :], self.rows.contents
        products = [i for i, row in enumerate(code) if row[OPCODE] == ISSUE and "tensor" in contents[row[BUNDLE]].counted]
        first, last = (code[i][STATEMENT] for i in (products[0], products[-1]))
        end = max(i for i in products if code[i][STATEMENT] == first)
        begin = min(i for i in products if code[i][STATEMENT] == last)
        return [(SCORES if i <= end else VALUES if i >= begin else BETWEEN, row) for i, row in enumerate(code)]

    def _content(self, row: list[int]) -> Content:
        return self.rows.contents[row[BUNDLE]]

    def _products(self, row: list[int]) -> int:
        return row[COUNT] * self._content(row).counted.get("tensor", 0) if row[OPCODE] == ISSUE else 0

    def _vector(self, row: list[int]) -> int:
        return row[COUNT] * sum(self._content(row).counted.get(c, 0) for c in MOVED) if self._own(row) else 0

    def _own(self, row: list[int]) -> bool:
        return row[OPCODE] == ISSUE and row[STATEMENT] not in self.apart

    def _issued(self) -> list[dict[str, int]]:
        """Instructions of each part by counter, without products and what stands apart."""
        issued = [dict.fromkeys((*MOVED, *LOADS), 0) for _ in PARTS]
        for part, row in self._parted():
            if self._own(row):
                have = issued[part]
                for counter, n in self._content(row).counted.items():
                    if counter in have:
                        have[counter] += n * row[COUNT]
        return issued

    def _take(self, counter: str, n: int) -> list[list[int]]:
        """``n`` instructions of the middle part, the last ones first."""
        taken: list[list[int]] = []
        for part, row in reversed(self._parted()) if n else ():
            plain = part == BETWEEN and self._own(row) and row[BYTES] == 0 and row[ARG] < 0
            if n and plain and counter in self._content(row).counted:
                moved = min(row[COUNT], n)
                row[COUNT] -= moved
                n -= moved
                taken.append([*row[:COUNT], moved, *row[COUNT + 1 :]])
        return taken

    def _extra(self, counter: str, n: int) -> list[list[int]]:
        return [self.rows.issue(((EXTRA_INSTRUCTION[counter], 1),), n, -1, -1)] if n > 0 else []

    def _sow(self, sown: Sown) -> None:
        """Spread rows over their parts: evenly over the products, in the middle over the vector work that stands there."""
        parted = self._parted()
        weights = [self._vector(row) if part == BETWEEN else self._products(row) for part, row in parted]
        totals, passed = [0, 0, 0], [0, 0, 0]
        for (part, _), weight in zip(parted, weights, strict=True):
            totals[part] += weight
        edited: Edited = []
        for (part, row), weight in zip(parted, weights, strict=True):
            edited.append([row] if row[OPCODE] != ISSUE or row[COUNT] else [])
            before, passed[part] = passed[part], passed[part] + weight
            for each in sown[part] if weight else ():
                n = each[COUNT] * passed[part] // totals[part] - each[COUNT] * before // totals[part]
                if n:
                    edited[-1].append([*each[:COUNT], n, *each[COUNT + 1 : STATEMENT], row[STATEMENT], *each[STATEMENT + 1 :]])
        self.rows.replace(self.start, edited)
