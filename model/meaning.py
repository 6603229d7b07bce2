"""What each tile operation computes, in numpy: the meanings that ``ops.OPS`` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .program import Statement

Array = NDArray[Any]
LOG2_E = float(np.log2(np.e))


class State(Protocol):
    """What a meaning may touch: the tile's named arrays and global memory (implemented by ``sim.values``).

    ``scale`` multiplies scores and ``descale`` O; P is 2^``offset_log2`` times itself (FP8).
    """

    tiles: MutableMapping[str, Array]
    args: Mapping[str, int]
    loops: Mapping[str, int]
    scale: float
    descale: float
    offset_log2: float
    operand: Callable[[Array], Array]

    def index(self, statement: Statement) -> int: ...
    def converted(self, tile: Array, into: str) -> Array: ...
    def load(self, tensor: str, block: int, into: str, *, clipped: bool = False) -> Array: ...
    def store(self, tensor: str, block: int, tile: Array, *, clipped: bool = False) -> None: ...
    def visible(self, q_block: int, kv_block: int, shape: tuple[int, int]) -> Array: ...


def unfinished(s: Statement) -> bool:
    """Whether a statement does a part of an operation that does not end it; the part that does computes the numbers."""
    first, last = s.attrs.get("share", (0.0, 1.0))
    return bool(last < 1.0 or first >= 1.0)


def clipped(s: Statement) -> bool:
    """Whether blocks beyond the tensor's last read as zeros and are not written: TMA boxes, and copies with a predicate."""
    return s.kind in ("tma_load", "tma_store") or bool(s.attrs.get("clipped", False))


def nothing(state: State, statement: Statement) -> None:
    """Ordering ops move no numbers."""


def load(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = state.load(s.reads[0], state.index(s), s.writes[0], clipped=clipped(s))


def store(state: State, s: Statement) -> None:
    state.store(s.writes[0], state.index(s), state.tiles[s.reads[0]], clipped=clipped(s))


def copy(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = state.tiles[s.reads[0]]


def column(state: State, s: Statement) -> None:
    at = state.index(s)
    state.tiles[s.writes[0]] = state.tiles[s.reads[0]][:, at : at + 1]


def mma(state: State, s: Statement) -> None:
    if unfinished(s):
        return
    a, b = (state.operand(state.tiles[name]).astype(np.float32) for name in s.reads)
    if s.attrs.get("transpose_b"):
        b = b.T
    parts = int(s.attrs.get("parts", 1))
    if s.attrs.get("split") == "k":
        pieces = np.split(np.arange(a.shape[1]), parts)
        out = np.stack([a[:, p] @ b[p] for p in pieces])
    else:
        out = a @ b
    if s.attrs.get("accumulate"):
        out = state.tiles[s.writes[0]] + out
    state.tiles[s.writes[0]] = out


def zero(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = np.full(s.attrs["shape"], s.attrs.get("value", 0.0), dtype=np.float32)


def mask(state: State, s: Statement) -> None:
    tile = state.tiles[s.writes[0]]
    own = s.attrs.get("q_index")
    q_block = state.args["q_block"] if own is None else own.value(state.args, state.loops)
    seen = state.visible(q_block, state.index(s), (tile.shape[-2], tile.shape[-1]))
    state.tiles[s.writes[0]] = np.where(seen, tile, -np.inf).astype(np.float32)


def row_max(state: State, s: Statement) -> None:
    if unfinished(s):
        return
    tile, name = state.tiles[s.reads[0]], s.writes[0]
    if s.attrs.get("split") == "cols":
        parts = np.stack(np.split(tile, int(s.attrs["parts"]), axis=-1))
        state.tiles[name] = parts.max(axis=-1)
        return
    if len(s.writes) > 1:
        state.tiles[s.writes[1]] = state.tiles[name]
    top = tile.max(axis=-1)
    state.tiles[name] = np.maximum(state.tiles[name], top) if len(s.writes) > 1 else top


def finite(m: Array) -> Array:
    """A row with no visible key has maximum -inf; subtracting 0 instead keeps its exponentials at 0 (FA2's rule)."""
    return np.where(np.isneginf(m), np.float32(0.0), m)


def exp2(state: State, s: Statement) -> None:
    if unfinished(s):
        return
    c = np.float32(state.scale * LOG2_E)
    tile, m = state.tiles[s.reads[0]], finite(state.tiles[s.reads[1]])
    state.tiles[s.writes[0]] = np.exp2(tile * c - (m[..., None] * c - np.float32(state.offset_log2)), dtype=np.float32)


def row_sum(state: State, s: Statement) -> None:
    if unfinished(s):
        return
    tile, name = state.tiles[s.reads[0]], s.writes[0]
    if s.attrs.get("split") == "cols":
        state.tiles[name] = np.stack(np.split(tile, int(s.attrs["parts"]), axis=-1)).sum(axis=-1)
    else:
        state.tiles[name] = state.tiles[name] + tile.sum(axis=-1)


def rescale(state: State, s: Statement) -> None:
    """O and l times exp2((m_previous - m) * scale); an O that was ``divided`` by l is multiplied by it again."""
    c = np.float32(state.scale * LOG2_E)
    new, old = (state.tiles[name] for name in s.reads)
    factor = np.exp2((old - finite(new)) * c, dtype=np.float32)
    undo = state.tiles[s.writes[1]] if s.attrs.get("divided") else np.float32(1)
    state.tiles[s.writes[0]] = state.tiles[s.writes[0]] * (factor * undo)[:, None]
    state.tiles[s.writes[1]] = state.tiles[s.writes[1]] * factor


def row_scale(state: State, s: Statement) -> None:
    """l times exp2((m_previous - m) * scale); the factor stays for O."""
    c = np.float32(state.scale * LOG2_E)
    new, old = (state.tiles[name] for name in s.reads)
    factor = np.exp2((old - finite(new)) * c, dtype=np.float32)
    state.tiles[s.writes[0]], state.tiles[s.writes[1]] = state.tiles[s.writes[0]] * factor, factor


def scale_rows(state: State, s: Statement) -> None:
    if unfinished(s):
        return
    state.tiles[s.writes[0]] = state.tiles[s.writes[0]] * state.tiles[s.reads[0]][:, None]


def convert(state: State, s: Statement) -> None:
    state.tiles[s.writes[0]] = state.converted(state.tiles[s.reads[0]], s.writes[0])


def divide(state: State, s: Statement) -> None:
    """O / l and LSE = scale * m + ln l; a row that saw no key gives O = 0 and LSE = -inf."""
    o, lse = s.writes
    l, m = (state.tiles[name] for name in s.reads)
    with np.errstate(divide="ignore"):
        log_l = np.log(l) - np.float32(state.offset_log2 / LOG2_E)
        state.tiles[lse] = np.where(l > 0, state.scale * finite(m) + log_l, -np.inf).astype(np.float32)
    state.tiles[o] = (state.tiles[o] / np.where(l > 0, l, 1.0)[:, None] * np.float32(state.descale)).astype(np.float32)


def divide_rows(state: State, s: Statement) -> None:
    """O / l; a row that has seen no key stays 0."""
    l = state.tiles[s.reads[0]]
    state.tiles[s.writes[0]] = (state.tiles[s.writes[0]] / np.where(l > 0, l, 1.0)[:, None]).astype(np.float32)


def cross_warp(state: State, s: Statement) -> None:
    """All warps' parts combined; with a second operand, which keeps the value before, also with what there was."""
    parts, name = state.tiles[s.reads[0]], s.writes[0]
    if len(s.writes) > 1:
        state.tiles[s.writes[1]] = state.tiles[name]
        parts = np.concatenate([state.tiles[name][None], parts])
    state.tiles[name] = parts.max(axis=0) if s.attrs["combine"] == "max" else parts.sum(axis=0)


def cross_warp_tile(state: State, s: Statement) -> None:
    total = state.tiles[s.reads[0]].sum(axis=0)
    state.tiles[s.writes[0]] = state.tiles[s.writes[0]] + total if s.attrs.get("accumulate") else total


def merge(state: State, s: Statement) -> None:
    """FA1 algorithm 1, lines 11-13: (O, l, m) of the blocks so far and of this block, normalised."""
    o, l, m = (state.tiles[name] for name in s.writes)
    o_new, l_new, m_new = (state.tiles[name] for name in s.reads)
    c = np.float32(state.scale * LOG2_E)
    top = np.maximum(m, m_new)
    old = l * np.exp2((m - finite(top)) * c, dtype=np.float32)
    fresh = np.exp2((m_new - finite(top)) * c, dtype=np.float32)
    total = old + fresh * l_new
    divisor = np.where(total > 0, total, 1.0)[:, None]
    state.tiles[s.writes[0]] = ((old[:, None] * o + fresh[:, None] * o_new) / divisor).astype(np.float32)
    state.tiles[s.writes[1]], state.tiles[s.writes[2]] = total.astype(np.float32), top


def log_sum(state: State, s: Statement) -> None:
    l, m = (state.tiles[name] for name in s.reads)
    with np.errstate(divide="ignore"):
        value = np.where(l > 0, state.scale * finite(m) + np.log(l), -np.inf)
    state.tiles[s.writes[0]] = value.astype(np.float32)
