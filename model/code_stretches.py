"""A Program's code in stretches: how many bytes of instructions stand where, and which roles run the same.

An instruction cache holds lines of 128 bytes or so; a stretch is a coarser grain, of code that is always passed from its first
instruction to its last: between two places to which or from which code jumps, cut to some STRETCH_BYTES.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .instructions import INSTRUCTIONS
from .program import IntArray, Opcode, Program
from .rows import BUNDLE, COUNT, JUMP, OPCODE, tabulated

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
    names, counts = tabulated(program.bundles)
    real = np.array([INSTRUCTIONS[name].counter != "none" for name in names], np.int64)
    return np.asarray(counts @ real)


def stretches(program: Program) -> Stretches:
    """The program's, which keeps them."""
    kept: Stretches | None = program.__dict__.get("_stretches")
    if kept is None:
        kept = program.__dict__["_stretches"] = _stretches(program)
    return kept


def _stretches(program: Program) -> Stretches:
    code, begins = program.code, _region_begins(program)
    issues = code[:, OPCODE] == Opcode.ISSUE
    size = np.where(issues, code[:, COUNT] * instructions(program)[np.where(issues, code[:, BUNDLE], 0)], 0)
    held = np.flatnonzero(size)  # rows that hold instructions
    rows = np.tile(np.array([-1, 0, 0]), (len(code), 1))
    if not len(held):
        return Stretches(rows, np.zeros(0, np.int64))
    region = np.cumsum(begins)
    before = np.cumsum(size) - size
    passed = before - before[np.flatnonzero(begins)[region - 1]]  # since the region's begin
    place = passed * INSTRUCTION_BYTES // STRETCH_BYTES
    first = np.ones(len(held), np.bool_)  # of a run of rows in one stretch
    first[1:] = (np.diff(region[held]) != 0) | (np.diff(place[held]) != 0)
    run = np.cumsum(first) - 1
    total = np.add.reduceat(size[held], np.flatnonzero(first))
    rows[held, 1] = first
    rows[held, 2] = np.cumsum(total)[run] - before[held]
    starts = {role.start: role.code or role.name for role in program.roles}
    numbers: dict[tuple[str, int, int], int] = {}  # (code of a role, its region, stretch there) -> number
    number_of = list[int]()
    for i in held[first].tolist():
        start = max(start for start in starts if start <= i)
        key = (starts[start], int(region[i] - region[start]), int(place[i]))
        number_of.append(numbers.setdefault(key, len(numbers)))
    rows[held, 0] = np.array(number_of)[run]
    sizes = np.zeros(len(numbers), np.int64)
    np.maximum.at(sizes, number_of, total)
    return Stretches(rows, sizes)


def _region_begins(program: Program) -> IntArray:
    """1 for each row to which code jumps, which follows a jump, or which is a role's first."""
    code, begins = program.code, np.zeros(len(program.code) + 1, np.int64)
    jumps = np.flatnonzero(np.isin(code[:, OPCODE], (Opcode.LOOP, Opcode.END, Opcode.SKIP_IF_NEGATIVE)))
    begins[jumps + 1] = 1
    begins[code[jumps, JUMP] + (code[jumps, OPCODE] != Opcode.SKIP_IF_NEGATIVE)] = 1
    begins[[role.start for role in program.roles]] = 1
    return begins[:-1]
