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
    code = program.code
    issues = code[:, OPCODE] == Opcode.ISSUE
    size = np.where(issues, code[:, COUNT] * instructions(program)[code[:, BUNDLE]], 0)
    region = np.cumsum(_region_begins(program))
    found, sizes = np.full((len(code), 3), (-1, 0, 0)), list[int]()
    numbers: dict[tuple[str, int, int], int] = {}  # (code of a role, its region, stretch there) -> number
    for role, end in zip(program.roles, [*(r.start for r in program.roles[1:]), len(code)], strict=True):
        for number in range(region[role.start], region[end - 1] + 1):
            rows = role.start + np.flatnonzero((region[role.start : end] == number) & (size[role.start : end] > 0))
            before = np.cumsum(size[rows]) - size[rows]
            part = before * INSTRUCTION_BYTES // STRETCH_BYTES
            for place, of in enumerate(np.unique(part)):
                inside = rows[part == of]
                key = (role.code or role.name, int(number - region[role.start]), place)
                if key not in numbers:
                    numbers[key] = len(sizes)
                    sizes.append(int(size[inside].sum()))
                found[inside, 0] = numbers[key]
                found[inside[0], 1] = 1
                found[inside, 2] = np.cumsum(size[inside][::-1])[::-1]
    return Stretches(found, np.array(sizes, np.int64))


def _region_begins(program: Program) -> IntArray:
    """1 for each row to which code jumps, which follows a jump, or which is a role's first."""
    code, begins = program.code, np.zeros(len(program.code) + 1, np.int64)
    jumps = np.flatnonzero(np.isin(code[:, OPCODE], (Opcode.LOOP, Opcode.END, Opcode.SKIP_IF_NEGATIVE)))
    begins[jumps + 1] = 1
    begins[code[jumps, JUMP] + (code[jumps, OPCODE] != Opcode.SKIP_IF_NEGATIVE)] = 1
    begins[[role.start for role in program.roles]] = 1
    return begins[:-1]
