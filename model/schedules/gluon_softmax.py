"""Gluon's softmax warpgroups, one Q tile each with one thread a row, and its correction warps, which have both tiles' O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..program import Index
from ..schedule import Builder
from .fa4_correction import advance, counted
from .gluon_tiles import BLOCK_KV, LANES, GluonTile

#: Where no binary was read: the share of a row's exponentials before the correction warps are told.
TOLD = 0.125


def rows(w: int) -> Index:
    """The 128 rows of Q tile ``w``, as a block."""
    return Index(arg=f"q{w}")


class Softmax:
    """The warpgroup of Q tile ``w``. ``masks``: the tiles have blocks that need one; they come last."""

    def __init__(self, b: Builder, t: GluonTile, w: int, profile: Mapping[str, Any] | None, *, masks: bool) -> None:
        self.b, self.t, self.w, self.profile, self.masks = b, t, w, profile, masks
        self.phases: Mapping[str, Mapping[str, Any]] = {}

    def write(self) -> None:
        b, w = self.b, self.w
        b.op("tile")
        for name, value in (("m", -np.inf), ("l", 0.0)):
            b.op("zero", writes=f"{name}{w}", shape=(LANES,), value=value)
        with b.loop("i", Index(arg="n_full")):
            self._block("full", Index(loop="i"))
        if self.masks:
            with b.loop("i", Index(arg="n_masked")):
                self._block("masked", Index(arg="n_full", loop="i"))
        self._last()

    def _block(self, kind: str, j: Index) -> None:
        """One K/V block: scores in, maximum, factor out to the correction warps, exponentials, P out, row sum."""
        b, w = self.b, self.w
        self.phases = {p["name"]: p for p in self.profile.get(kind, ())} if self.profile else {}
        told, turned = self._shares()
        with counted(b, self.phases, "s_wait"):
            self._sync()
            b.op("mbarrier_wait", barrier=f"s_full{w}", ring=f"s{w}")
            advance(b, f"s{w}")
        with counted(b, self.phases, "load_max"):
            self._maximum(kind, j)
        with counted(b, self.phases, "factor"):
            b.op("lane_factor", writes=(f"l{w}", f"factor{w}"), reads=(f"m{w}", f"m_old{w}"))
            self._exponentials(0.0, told)
            b.op("tmem_store", writes=f"S{w}.stat", reads=f"factor{w}")
            self._sync(2)
            b.op("mbarrier_arrive", barrier=f"stats_full{w}", ring=f"stats{w}")
        if self.t.turns:
            with counted(b, self.phases, "turn"):
                self._exponentials(told, turned)
                self._turn(wait=True)
        with counted(b, self.phases, "exp"):
            self._store(turned)
        with counted(b, self.phases, "stats_wait"):
            self._taken()
        with counted(b, self.phases, "row_sum"):
            if self.t.turns:
                self._sync()
                self._turn(wait=False)
            b.op("lane_sum", writes=f"l{w}", reads=f"scores{w}")

    def _last(self) -> None:
        """When the tile's last product is done, the row's sum and maximum take S's place."""
        b, w = self.b, self.w
        self._sync()
        b.op("mbarrier_wait", barrier=f"s_full{w}", ring=f"s{w}")
        advance(b, f"s{w}")
        b.op("tmem_store", writes=f"S{w}.max", reads=f"m{w}")
        self._sync()
        b.op("tmem_store", writes=f"S{w}.stat", reads=f"l{w}")
        self._sync(2)
        b.op("mbarrier_arrive", barrier=f"stats_full{w}", ring=f"stats{w}")
        self._taken()
        self._sync()
        b.op("mbarrier_arrive", barrier=f"p_full{w}", ring=f"p{w}")
        advance(b, f"p{w}")

    # --- pieces ---

    def _sync(self, times: int = 1) -> None:
        for _ in range(times):
            self.b.op("named_sync", barrier=f"softmax{self.w}")

    def _taken(self) -> None:
        """The correction warps have read what they were told of last."""
        b, w = self.b, self.w
        advance(b, f"stats{w}")
        self._sync()
        b.op("mbarrier_wait", barrier=f"stats_empty{w}", ring=f"stats{w}", previous=True)

    def _turn(self, *, wait: bool) -> None:
        """Tile 0's warps take a turn first, then tile 1's."""
        b, leads = self.b, self.w == 0
        if wait:
            self._sync()
            b.op("mbarrier_wait", barrier="turn_empty" if leads else "turn_full", ring="turn", previous=leads)
        else:
            b.op("mbarrier_arrive", barrier="turn_full" if leads else "turn_empty", ring="turn")
            advance(b, "turn")

    def _maximum(self, kind: str, j: Index) -> None:
        b, w = self.b, self.w
        names: dict[str, Any] = {"writes": (f"m{w}", f"m_old{w}", f"scores{w}"), "reads": f"S{w}", "threshold_log2": 0.0}
        if kind == "full":
            b.op("lane_max", **names)
        else:
            b.op("lane_masked_max", **names, index=j, q_index=rows(w))

    def _exponentials(self, first: float, last: float) -> None:
        w = self.w
        self.b.op("lane_exp2", writes=f"scores{w}", reads=(f"scores{w}", f"m{w}"), share=(first, last))

    def _store(self, done: float) -> None:
        """The exponentials after the share ``done``, and P in pieces; it is handed over whole."""
        b, w, pieces = self.b, self.w, self.t.pieces
        for piece in range(pieces):
            first, last = piece / pieces, (piece + 1) / pieces
            if last > done:
                self._exponentials(max(first, done), last)
            if piece:
                self._sync()
            b.op("lane_pack", writes=f"P{w}", reads=f"scores{w}", share=(first, last))
            b.op("tmem_store", writes=f"S{w}.P", reads=f"P{w}", share=(first, last))
        self._sync(2)
        b.op("mbarrier_arrive", barrier=f"p_full{w}", ring=f"p{w}")
        advance(b, f"p{w}")

    def _shares(self) -> tuple[float, float]:
        """Shares of a row's exponentials before the correction warps are told and before its turn is waited for."""
        if "factor" not in self.phases:
            return TOLD, TOLD
        told = (self.phases["factor"]["xu"] - 1) / BLOCK_KV
        turn = self.phases["turn"]["xu"] / BLOCK_KV if self.t.turns else 0.0
        return told, min(1.0, told + turn)


class Correction:
    """Rescales O of both tiles between their products, every block, by the factors that the softmax warps leave in S's place."""

    def __init__(self, b: Builder, t: GluonTile, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t = b, t
        self.phases = {p["name"]: p for p in profile["correction"]} if profile else {}

    def write(self) -> None:
        b = self.b
        b.op("tile")
        for w in range(2):  # of the first block there is nothing to correct
            self._told(w)
            self._take(w)
        with b.loop("i", Index(arg="n_blocks", const=-1)):
            for w in range(2):
                self._rescale(w)
        for w in range(2):
            self._final(w)

    def _sync(self, times: int = 1) -> None:
        for _ in range(times):
            self.b.op("named_sync", barrier="correction")

    def _told(self, w: int) -> None:
        self.b.op("mbarrier_wait", barrier=f"stats_full{w}", ring=f"stats{w}")

    def _take(self, w: int) -> None:
        self._sync()
        self.b.op("mbarrier_arrive", barrier=f"stats_empty{w}", ring=f"stats{w}")
        advance(self.b, f"stats{w}")

    def _rescale(self, w: int) -> None:
        b = self.b
        with counted(b, self.phases, "o_wait"):
            self._sync()
            b.op("mbarrier_wait", barrier=f"o_full{w}", ring=f"o{w}")
        with counted(b, self.phases, "stats_wait"):
            self._told(w)
        with counted(b, self.phases, "factor"):
            b.op("tmem_load", writes=f"scale{w}", reads=f"S{w}.stat")
            self._take(w)
        with counted(b, self.phases, "rescale"):
            b.op("vote_scale", writes=f"O{w}", reads=f"scale{w}", taken=True, asked=False)
            self._sync(3)
            self._given(w)

    def _given(self, w: int) -> None:
        self.b.op("mbarrier_arrive", barrier=f"o_rescaled{w}", ring=f"o{w}")
        advance(self.b, f"o{w}")

    def _final(self, w: int) -> None:
        """O / l to shared memory, LSE to global; then O's place is free for the next tile."""
        b = self.b
        self._sync()
        self._told(w)
        b.op("tmem_load", writes=f"max{w}", reads=f"S{w}.max")
        b.op("tmem_load", writes=f"sum{w}", reads=f"S{w}.stat")
        self._take(w)
        self._sync()
        b.op("mbarrier_wait", barrier=f"out_empty{w}", ring=f"out{w}", previous=True)
        b.op("mbarrier_wait", barrier=f"o_full{w}", ring=f"o{w}")
        b.op("tmem_load", writes=f"out{w}", reads=f"O{w}")
        b.op("lane_divide", writes=(f"out{w}", f"LSE{w}"), reads=(f"sum{w}", f"max{w}"))
        b.op("lane_pack", writes=f"packed{w}", reads=f"out{w}")
        b.op("to_smem", writes=f"Os{w}", reads=f"packed{w}")
        b.op("fence_async")
        self._sync(2)
        b.op("mbarrier_arrive", barrier=f"out_full{w}", ring=f"out{w}")
        self._sync()
        self._given(w)
        advance(b, f"out{w}")
        b.op("store", writes="LSE", reads=f"LSE{w}", index=rows(w), clipped=True)
