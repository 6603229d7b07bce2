"""FA4's correction warps and its epilogue warp: O is rescaled between products, divided by the row sums, and stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..program import Index
from ..schedule import Builder
from .fa4_tiles import FA4Tile, both, rows

COUNTERS = ("fma", "alu", "xu", "lsu", "other")


def advance(b: Builder, *rings: str) -> None:
    for ring in rings:
        b.op("advance", ring=ring)


@contextmanager
def counted(b: Builder, phases: Mapping[str, Mapping[str, Any]], name: str) -> Iterator[None]:
    """What the binary issues in the phase of this name."""
    p = phases.get(name)
    with b.phase(counts={c: p[c] for c in COUNTERS} if p else None, stall_cycles=p["stall_cycles"] if p else None):
        yield


class Correction:
    """Rescales O of both tiles between their products, by the factors that the softmax warps leave in shared memory.

    That a factor is there means that the block's S is done, and so is the P V before it. A tile's factor is given back while the
    other one's is at work.
    """

    def __init__(self, b: Builder, t: FA4Tile, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t = b, t
        self.phases = {p["name"]: p for p in profile["correction"]} if profile else {}

    def write(self) -> None:
        b, t = self.b, self.t
        for w in range(t.q_stages):
            self._rescaled(w)
        b.op("tile")
        for w in range(t.q_stages):  # of the first block there is nothing to correct
            self._wait(w)
            if w == 0:
                self._give_back(w)
            advance(b, f"stats{w}")
        with b.loop("i", Index(arg="n_jumps")):  # maxima grow early, so the blocks that rescale come first
            self._block(taken=True)
        with b.loop("i", Index(arg="n_plain")):
            self._block(taken=False)
        if t.q_stages == 2:
            self._give_back(1)
        for w in range(t.q_stages):
            self._final(w)

    def _wait(self, w: int) -> None:
        self.b.op("mbarrier_wait", barrier=f"stats_full{w}", ring=f"stats{w}")

    def _give_back(self, w: int) -> None:
        self.b.op("mbarrier_arrive", barrier=f"stats_empty{w}", ring=f"stats_done{w}")
        advance(self.b, f"stats_done{w}")

    def _rescaled(self, w: int) -> None:
        self.b.op("mbarrier_arrive", barrier=f"o_rescaled{w}", ring=f"p{w}", **both(self.t))
        advance(self.b, f"p{w}")

    def _block(self, *, taken: bool) -> None:
        b, t = self.b, self.t
        for w in range(t.q_stages):
            with counted(b, self.phases, "" if taken else "vote"):
                self._wait(w)
                b.op("from_smem", writes=f"scale{w}", reads=f"Stat{w}")
                b.op("vote_scale", writes=f"O{w}", reads=f"scale{w}", taken=taken)
            with counted(b, self.phases, "release"):
                self._rescaled(w)
                self._give_back(t.q_stages - 1 - w)
                advance(b, f"stats{w}")

    def _final(self, w: int) -> None:
        """O / l to shared memory, LSE to global; then O's place is free for the next tile."""
        b = self.b
        self._wait(w)
        b.op("from_smem", writes=f"sum{w}", reads=f"Stat{w}")
        b.op("from_smem", writes=f"max{w}", reads=f"Max{w}")
        self._give_back(w)
        advance(b, f"stats{w}")
        b.op("mbarrier_wait", barrier=f"o_full{w}", ring=f"o{w}")
        b.op("mbarrier_wait", barrier=f"out_empty{w}", ring=f"out{w}", previous=True)
        b.op("tmem_load", writes=f"out{w}", reads=f"O{w}")
        b.op("lane_divide", writes=(f"out{w}", f"LSE{w}"), reads=(f"sum{w}", f"max{w}"))
        b.op("lane_pack", writes=f"packed{w}", reads=f"out{w}")
        b.op("to_smem", writes=self.t.o_buffer(w), reads=f"packed{w}")
        b.op("fence_async")
        self._rescaled(w)
        b.op("mbarrier_arrive", barrier=f"out_full{w}", ring=f"out{w}")
        advance(b, f"o{w}", f"out{w}")
        b.op("store", writes="LSE", reads=f"LSE{w}", index=rows(w), clipped=True)


def write_epilogue(b: Builder, t: FA4Tile) -> None:
    b.op("tile")
    for w in range(t.q_stages):
        b.op("mbarrier_wait", barrier=f"out_full{w}", ring=f"out{w}")
        b.op("tma_store", writes="O", reads=t.o_buffer(w), index=rows(w), wait="read")
        b.op("mbarrier_arrive", barrier=f"out_empty{w}", ring=f"out{w}")
        advance(b, f"out{w}")
    if t.shared and t.persistent:
        b.op("mbarrier_arrive", barrier="o_stored", ring="o_stored")
        advance(b, "o_stored")
