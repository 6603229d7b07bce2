"""Pieces that all compiled code shares, and how it is compiled: stamps, the event heap, index expressions, control flow."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import numba as nb
import numpy as np

from ..model.instructions import PIPES, Path
from ..model.program import Opcode
from . import engine

NEVER = np.int64(1) << 62
NEVER_ISSUED = -NEVER  # a product's end where there was none
N_PIPES = len(PIPES)
LOOP, END, SKIP = int(Opcode.LOOP), int(Opcode.END), int(Opcode.SKIP_IF_NEGATIVE)


def _stamp() -> str:
    """A digest of what compiled code takes from elsewhere: the fast engine's files, and the contract's numbers."""
    sources = sorted(FilePath(__file__).parent.glob("fast_*.py"))
    named = {name: value for name, value in vars(engine).items() if name.isupper() and isinstance(value, int)}
    numbers = [sorted(named.items()), [(op.name, int(op)) for op in (*Opcode, *Path)], PIPES]
    return hashlib.sha256(repr([_meaning(path) for path in sources] + numbers).encode()).hexdigest()[:12]


def _meaning(path: FilePath) -> str:
    """A file's code without comments and the words of its functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


STAMP = _stamp()


def jit(function: Callable[..., Any]) -> Any:
    """Compile ``function`` and keep the code on disk, where any folder for it can be written.

    numba notices when the function's own file changes. For the rest the file that it keeps carries STAMP in its name.
    """
    function.__qualname__ += f"-{STAMP}"
    try:
        return nb.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither beside the package nor in the user's cache
        return nb.njit(nogil=True)(function)


def part(function: Callable[..., Any]) -> Any:
    """Compile ``function`` into each function that calls it, without counts of references to the arrays that it is given: those
    took longer than most parts do. So a part may not allocate. Nor can Python call it: the two wrappers for that would each hold
    all of it once more, and compiling takes long enough."""
    options: dict[str, Any] = {"forceinline": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return nb.njit(**options)(function)


@part
def push(heap: Any, size: Any, value: Any) -> Any:
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent] <= value:
            break
        heap[i] = heap[parent]
        i = parent
    heap[i] = value
    return size + 1


@part
def pop(heap: Any, size: Any) -> Any:
    """Remove the smallest value (the caller has read it); returns the new size."""
    size -= 1
    value = heap[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = value
    return size


@part
def expression(row: Any, args: Any, loops: Any) -> Any:
    """Value of one :class:`~flashsim.model.program.Index`."""
    total = row[0]
    if row[1] >= 0:
        total += row[2] * args[row[1]]
    if row[3] >= 0:
        total += row[4] * loops[row[3]]
    if row[5] >= 0:
        total += row[6] * loops[row[5]]
    return total


@part
def control(code: Any, pc: Any, expressions: Any, args: Any, loops: Any, trips: Any) -> Any:
    """Where code goes on after its LOOP, END or SKIP_IF_NEGATIVE at ``pc``; counts the loops."""
    after = pc + 1
    op, jump = code[pc, 0], code[pc, 7]
    if op == LOOP:
        n = expression(expressions[code[pc, 3]], args, loops)
        if n <= 0:
            after = jump + 1
        else:
            depth = code[jump, 6]
            loops[depth], trips[depth] = 0, n
    elif op == END:
        depth = code[pc, 6]
        loops[depth] += 1
        if loops[depth] < trips[depth]:
            after = jump + 1
        else:
            loops[depth] = 0
    elif expression(expressions[code[pc, 3]], args, loops) < 0:
        after = jump
    return after
