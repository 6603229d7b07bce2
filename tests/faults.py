"""Broken pipelines: functions that take a Program and return one with a fault, its statements and its code alike.

A statement is found by what it is (:func:`find`), then taken away, changed, moved or put in. Code rows follow: those of an
ordering op go with it, jumps and statement numbers are set anew, so that an engine can run what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from flashsim.model.lowering_async import arrivals, expected_bytes
from flashsim.model.program import CODE_COLUMNS, Opcode, Program, Role, Statement

OPCODE, COUNT, ARG, BYTES, JUMP, STATEMENT, BARRIER, RING = (
    CODE_COLUMNS.index(name) for name in ("opcode", "count", "arg", "bytes", "jump", "statement", "barrier", "ring")
)
#: Rows that belong to one ordering op and go where it goes; all others may be shared by several statements.
ORDERS = (
    Opcode.COMMIT, Opcode.WAIT_GROUP, Opcode.BARRIER, Opcode.NAMED_ARRIVE, Opcode.MB_ARRIVE, Opcode.MB_WAIT, Opcode.ADVANCE,
    Opcode.MMA_COMMIT, Opcode.MMA_WAIT,
)  # fmt: skip


class Row:
    """A code row that knows its statement and its jump's target as objects, so that both survive edits."""

    def __init__(self, columns: list[int]) -> None:
        self.columns = columns
        self.statement: Statement | None = None
        self.target: Row | None = None


class Edit:
    """A Program taken apart: statements and rows as lists to change; :meth:`done` puts it together again."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.statements = list(program.statements)
        self.rows = [Row(row) for row in program.code.tolist()]
        for row in self.rows:
            row.statement = self.statements[row.columns[STATEMENT]]
            row.target = self.rows[row.columns[JUMP]] if row.columns[JUMP] >= 0 else None
        self.starts = [self.rows[role.start] for role in program.roles]

    def ordering(self, s: Statement) -> list[Row]:
        return [row for row in self.rows if row.statement is s and row.columns[OPCODE] in ORDERS]

    def drop(self, s: Statement) -> None:
        """Take a statement away; rows that others may share stay, under the statement before it."""
        for row in self.ordering(s):
            self._retarget(row, self.rows[self.rows.index(row) + 1])
            self.rows.remove(row)
        i = self._index(s)
        heir = self.statements[i - 1] if i else self.statements[1]
        for row in self.rows:
            row.statement = heir if row.statement is s else row.statement
        del self.statements[i]

    def put(self, s: Statement, rows: list[Row], before: Statement) -> None:
        """Put a statement with its rows before another one."""
        self.statements.insert(self._index(before), s)
        later = {id(each) for each in self.statements[self._index(before) :]}
        at = next(i for i, row in enumerate(self.rows) if id(row.statement) in later)
        for row in rows:
            row.statement = s
        self.rows[at:at] = rows

    def _retarget(self, old: Row, new: Row) -> None:
        for row in self.rows:
            row.target = new if row.target is old else row.target
        self.starts = [new if row is old else row for row in self.starts]

    def _index(self, s: Statement) -> int:
        return next(i for i, each in enumerate(self.statements) if each is s)

    def done(self, **fields: Any) -> Program:
        number = {id(row): i for i, row in enumerate(self.rows)}
        place = {id(s): i for i, s in enumerate(self.statements)}
        for row in self.rows:
            assert row.statement is not None
            row.columns[STATEMENT] = place[id(row.statement)]
            row.columns[JUMP] = number[id(row.target)] if row.target else -1
        starts = zip(self.program.roles, self.starts, strict=True)
        return replace(
            self.program,
            statements=tuple(self.statements),
            code=np.array([row.columns for row in self.rows], np.int64),
            roles=tuple(replace(role, start=number[id(row)]) for role, row in starts),
            **fields,
        )


def find(program: Program, kind: str, *, role: str = "", nth: int = 0, writes: str = "", **attrs: Any) -> int:
    """Number of the ``nth`` statement (-1: the last) of ``kind`` with these attributes, in ``role`` if given."""
    names = [r.name for r in program.roles]
    found = [
        i
        for i, s in enumerate(program.statements)
        if s.kind == kind
        and (not role or names[s.role] == role)
        and (not writes or writes in s.writes)
        and all(s.attrs.get(name) == value for name, value in attrs.items())
    ]
    return found[nth]


# --- edits ---


def without(program: Program, *numbers: int) -> Program:
    """Take statements away."""
    edit = Edit(program)
    for s in [program.statements[i] for i in numbers]:
        edit.drop(s)
    return edit.done()


def moved(program: Program, number: int, before: int) -> Program:
    """A statement goes before another one of its role."""
    edit, s, there = Edit(program), program.statements[number], program.statements[before]
    rows = edit.ordering(s)
    following = edit.rows[edit.rows.index(rows[-1]) + 1] if rows else None
    for row in rows:
        assert following is not None
        edit._retarget(row, following)
        edit.rows.remove(row)
    del edit.statements[edit._index(s)]
    edit.put(s, rows, there)
    return edit.done()


def repeated(program: Program, number: int) -> Program:
    """An ordering op happens twice."""
    edit, s = Edit(program), program.statements[number]
    again = replace(s)
    edit.put(again, [Row(list(row.columns)) for row in edit.ordering(s)], s)
    return edit.done()


def changed(program: Program, number: int, **attrs: Any) -> Program:
    """A statement's attributes differ; None takes one away. The code's barrier, bytes and parity follow."""
    edit, s = Edit(program), program.statements[number]
    new = replace(s, attrs={name: value for name, value in {**s.attrs, **attrs}.items() if value is not None})
    edit.statements[number] = new
    kinds = {kind: [b.name for b in program.barriers if b.kind == kind] for kind in ("mbarrier", "named")}
    for row in edit.rows:
        if row.statement is not s:
            continue
        row.statement = new
        opcode = row.columns[OPCODE]
        if opcode in (Opcode.MB_ARRIVE, Opcode.MB_WAIT):
            row.columns[BARRIER] = kinds["mbarrier"].index(new.attrs["barrier"])
            row.columns[RING] = [r.name for r in program.rings].index(new.attrs["ring"])
        if opcode == Opcode.MB_WAIT:
            row.columns[COUNT] = int(bool(new.attrs.get("previous", False)))
        elif opcode == Opcode.MB_ARRIVE:
            row.columns[COUNT] = arrivals(new)
            row.columns[BYTES] = expected_bytes(new, {b.name: b for b in program.buffers})
        elif opcode in (Opcode.WAIT_GROUP, Opcode.MMA_WAIT):
            row.columns[ARG] = int(new.attrs.get("arg", 0))
        elif opcode in (Opcode.BARRIER, Opcode.NAMED_ARRIVE) and "barrier" in new.attrs:
            row.columns[ARG] = kinds["named"].index(new.attrs["barrier"])
    return edit.done()


def reading(program: Program, number: int, *reads: str) -> Program:
    """A statement reads other tiles."""
    statements = list(program.statements)
    statements[number] = replace(statements[number], reads=reads)
    return replace(program, statements=tuple(statements))


def counting(program: Program, name: str, count: int) -> Program:
    """A barrier is complete after ``count`` arrivals."""
    code = program.code.copy()
    named = [b.name for b in program.barriers if b.kind == "named"]
    if name in named:
        mine = np.isin(code[:, OPCODE], (int(Opcode.BARRIER), int(Opcode.NAMED_ARRIVE))) & (code[:, ARG] == named.index(name))
        code[mine, COUNT] = count
    barriers = tuple(replace(b, count=count) if b.name == name else b for b in program.barriers)
    return replace(program, barriers=barriers, code=code)


def registers(program: Program, **roles: int) -> Program:
    """Roles hold so many registers a thread; a name stands for all roles that begin with it."""

    def held(role: Role) -> int:
        return next((n for name, n in roles.items() if role.name.startswith(name)), role.registers)

    return replace(program, roles=tuple(replace(role, registers=held(role)) for role in program.roles))


def ordering(program: Program, kinds: Iterable[str]) -> list[int]:
    """Numbers of the statements of these kinds."""
    return [i for i, s in enumerate(program.statements) if s.kind in set(kinds)]
