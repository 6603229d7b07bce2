"""What Blackwell's tile operations compute, in numpy: lazy row maxima, partly emulated exponentials, stores in pieces."""

from __future__ import annotations

import numpy as np

from .lowering_tmem import emulated_until
from .lowprecision import exp2_emulated
from .meaning import LOG2_E, Array, State, finite, unfinished
from .program import Statement


def copy_whole(state: State, s: Statement) -> None:
    """A tile that leaves in pieces is there with its last one."""
    if not unfinished(s):
        state.tiles[s.writes[0]] = state.tiles[s.reads[0]]


def convert_whole(state: State, s: Statement) -> None:
    if not unfinished(s):
        state.tiles[s.writes[0]] = state.converted(state.tiles[s.reads[0]], s.writes[0])


def lane_max(state: State, s: Statement) -> None:
    """The scores come into registers, and with them the row maximum: a row keeps its old one unless the new one exceeds it by
    more than ``threshold_log2``, in units of log2 of the scaled scores."""
    m, m_old, registers = s.writes
    tile, old = state.tiles[s.reads[0]], state.tiles[m]
    top = np.maximum(old, tile.max(axis=-1))
    growth = (finite(top) - old) * np.float32(state.scale * LOG2_E)  # infinite for a row that has seen no key before
    state.tiles[registers], state.tiles[m_old] = tile, old
    state.tiles[m] = np.where(growth <= s.attrs["threshold_log2"], old, top).astype(np.float32)


def lane_masked_max(state: State, s: Statement) -> None:
    """As :func:`lane_max`, of the scores that the mask leaves."""
    name = s.reads[0]
    tile = state.tiles[name]
    own = s.attrs.get("q_index")
    q_block = state.args["q_block"] if own is None else own.value(state.args, state.loops)
    seen = state.visible(q_block, state.index(s), (tile.shape[-2], tile.shape[-1]))
    state.tiles[name] = np.where(seen, tile, -np.inf).astype(np.float32)
    lane_max(state, s)


def emulated_columns(columns: int, emulated: int, start: float = 0.25) -> Array:
    """Which columns' exponentials the FMA pipe computes: pairs, from the share ``start`` of the row to its last quarter."""
    pairs = np.arange(columns // 2)
    ends = np.array([emulated_until((2 * p + 2) / columns, emulated, start) for p in pairs], np.int64)
    chosen = np.diff(ends, prepend=0) > 0
    return np.repeat(chosen, 2)


def lane_exp2(state: State, s: Statement) -> None:
    """2^(scaled score - maximum); ``emulated`` values of each row by range reduction and a polynomial of degree 3."""
    if unfinished(s):
        return
    c = np.float32(state.scale * LOG2_E)
    tile, m = state.tiles[s.reads[0]], finite(state.tiles[s.reads[1]])
    exponents = np.asarray(tile * c - m[..., None] * c + np.float32(state.offset_log2), np.float32)
    out = np.exp2(exponents, dtype=np.float32)
    chosen = emulated_columns(tile.shape[-1], int(s.attrs.get("emulated", 0)), float(s.attrs.get("emulated_from", 0.25)))
    if chosen.any():
        out[..., chosen] = exp2_emulated(exponents[..., chosen])
    state.tiles[s.writes[0]] = out
