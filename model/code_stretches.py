"""A Program's code in stretches: how many bytes of instructions stand where, and which roles run the same.

An instruction cache holds lines of 128 bytes or so; a stretch is a coarser grain, of code that is always passed from its first
instruction to its last: between two places to which or from which code jumps, cut to some STRETCH_BYTES.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .instructions import INSTRUCTIONS
from .program import IntArray, Opcode, Program
from .rows import BUNDLE, COUNT, JUMP, OPCODE

INSTRUCTION_BYTES = 16  # sm_70 and later
STRETCH_BYTES = 1024


class Stretches(NamedTuple):
    """``rows``: of each row of code the stretch that it lies in or -1, whether that begins there, and how many instructions of it
    come from the row's first one on. ``sizes``: instructions of each stretch."""

    rows: IntArray
    sizes: IntArray

    @property
    def total_bytes(self) -> int:
        return INSTRUCTION_BYTES * int(self.sizes.sum())


def instructions(program: Program) -> IntArray:
    """Of each bundle, how many instructions of the binary it stands for: all but stall counts."""
    real = [sum(n for name, n in bundle if INSTRUCTIONS[name].counter != "none") for bundle in program.bundles]
    return np.array(real, np.int64)


def stretches(program: Program) -> Stretches:
    """The program's, which keeps them."""
    kept: Stretches | None = program.__dict__.get("_stretches")
    if kept is None:
        kept = program.__dict__["_stretches"] = _stretches(program)
    return kept


def _stretches(program: Program) -> Stretches:
    starts = {role.start: role.code or role.name for role in program.roles}
    begins, issued = _region_begins(program).tolist(), instructions(program).tolist()
    found, sizes = [[-1, 0, 0] for _ in begins], list[int]()
    numbers: dict[tuple[str, int, int], int] = {}  # (code of a role, its region, stretch there) -> number
    role, region, passed, last = "", 0, 0, -1
    for i, (opcode, bundle, count) in enumerate(program.code[:, [OPCODE, BUNDLE, COUNT]].tolist()):
        role, region = (starts[i], 0) if i in starts else (role, region + begins[i])
        if begins[i]:
            passed, last = 0, -1
        size = count * issued[bundle] if opcode == Opcode.ISSUE else 0
        if not size:
            continue
        place = passed * INSTRUCTION_BYTES // STRETCH_BYTES
        number = numbers.setdefault((role, region, place), len(sizes))
        if number == len(sizes):
            sizes.append(0)
        found[i] = [number, int(place != last), size]
        passed, last = passed + size, place
    left = 0
    for row in reversed(found):
        if row[0] >= 0:
            row[2] = left = left + row[2]
        if row[1]:
            sizes[row[0]], left = max(sizes[row[0]], left), 0
    return Stretches(np.array(found, np.int64).reshape(-1, 3), np.array(sizes, np.int64))


def _region_begins(program: Program) -> IntArray:
    """1 for each row to which code jumps, which follows a jump, or which is a role's first."""
    code, begins = program.code, np.zeros(len(program.code) + 1, np.int64)
    jumps = np.flatnonzero(np.isin(code[:, OPCODE], (Opcode.LOOP, Opcode.END, Opcode.SKIP_IF_NEGATIVE)))
    begins[jumps + 1] = 1
    begins[code[jumps, JUMP] + (code[jumps, OPCODE] != Opcode.SKIP_IF_NEGATIVE)] = 1
    begins[[role.start for role in program.roles]] = 1
    return begins[:-1]
