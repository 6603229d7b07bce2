"""The loads of FA3 without warp specialisation: consumers bring their own tiles.

As the paper's own repository does it where it has no producer (its backward pass of July 2024, ``compute_dqkv``): all stages are
filled at a tile's start; at the end of an iteration every warp gives its stages back, and the first warpgroup waits until all
have (the empty mbarriers of a producer) and loads what comes next into them. There one lane of the first warp waits and loads;
here one of each of its four warps does, a quarter of a tile each, as the next product takes all four. Nothing runs ahead over a
tile's end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..program import Index
from ..schedule import Builder
from .fa3_producer import rows
from .fa3_tiles import FA3Tile

WARPS = 4  # of a warpgroup
LAST_BLOCK = Index(arg="n_blocks", const=-1)


@dataclass(frozen=True, kw_only=True)
class OwnLoads:
    """The loads that consumer warpgroup ``w`` makes itself; none (``on`` false) beside a producer.

    ``behind``: blocks by which P V follows Q K^T, 1 with overlap within a warpgroup.
    """

    b: Builder
    t: FA3Tile
    w: int
    stages: int
    behind: int
    on: bool

    def begin(self) -> None:
        """A tile's first blocks, as many as there are stages."""
        if not self.on:
            return
        self.b.op("named_sync", barrier="loads")  # no warpgroup reads the last tile's Q any more, nor does O leave
        self._brings("K", LAST_BLOCK)
        q = f"Qs{self.w}"
        self.b.op("mbarrier_expect", barrier="q_full", ring="q", of=(q,))
        self.b.op("tma_load", writes=q, reads="Q", index=rows(self.t, self.w), barrier="q_full", ring="q", copies=1)
        self._brings("V", LAST_BLOCK)
        for i in range(1, self.stages):
            self._brings("K", replace(LAST_BLOCK, const=-1 - i))
            self._brings("V", replace(LAST_BLOCK, const=-1 - i))

    def go_on(self, j: Index, *, k: bool = True, v: bool = True) -> None:
        """After block ``j``'s iteration: into the stages that its Q K^T and its P V have left."""
        if self.on and k:
            self._brings("K", replace(j, const=j.const - self.stages))
        if self.on and v:
            self._brings("V", replace(j, const=j.const + self.behind - self.stages))

    def _brings(self, name: str, block: Index) -> None:
        if self.w == 0:
            ring, tile = f"{name.lower()}_in", f"{name}s"
            copies = max(1, self.t.head_dim // 64)
            with self.b.when(block):
                self.b.op("mbarrier_wait", barrier=f"{name.lower()}_empty", ring=ring, previous=True, elected=True)
                self.b.op("mbarrier_expect", barrier=f"{name.lower()}_full", ring=ring, of=(tile,))
                self.b.op(
                    "tma_load", writes=tile, reads=name, index=block, barrier=f"{name.lower()}_full", ring=ring, copies=copies
                )
                self.b.op("advance", ring=ring)
