"""The loads of FA3 without warp specialisation: consumers bring their own tiles, as in kernels before there were producers.

A barrier of the CTA an iteration says that a stage is free, then the first warpgroup brings the next K and the last the next V,
each of its four warps a quarter of a tile, beside the products just issued. Warpgroups go in step, and nothing runs ahead over a
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
        """A tile's first blocks, as many as there are stages; what P V is behind is loaded by the first iteration."""
        if not self.on:
            return
        self.b.op("named_sync", barrier="loads")  # no warpgroup reads the last tile's Q, K and V any more, nor does O leave
        self._brings("K", LAST_BLOCK)
        q = f"Qs{self.w}"
        self.b.op("mbarrier_expect", barrier="q_full", ring="q", of=(q,))
        self.b.op("tma_load", writes=q, reads="Q", index=rows(self.t, self.w), barrier="q_full", ring="q", copies=1)
        for i in range(1, self.stages):
            self._brings("K", replace(LAST_BLOCK, const=-1 - i))
        for i in range(self.stages - self.behind):
            self._brings("V", replace(LAST_BLOCK, const=-1 - i))

    def go_on(self, j: Index) -> None:
        """Beside the products of block ``j``: the blocks whose stages the iteration before has left, once all agree it has."""
        if self.on:
            self.b.op("named_sync", barrier="loads")
            self._brings("K", replace(j, const=j.const + 1 - self.stages))
            self._brings("V", replace(j, const=j.const + 1 + self.behind - self.stages))

    def _brings(self, name: str, block: Index) -> None:
        if self.w == {"K": 0, "V": self.t.groups - 1}[name]:
            tile, full, ring = f"{name}s", f"{name.lower()}_full", f"{name.lower()}_in"
            copies = max(1, self.t.head_dim // 64)
            with self.b.when(block):
                self.b.op("mbarrier_expect", barrier=full, ring=ring, of=(tile,))
                self.b.op("tma_load", writes=tile, reads=name, index=block, barrier=full, ring=ring, copies=copies)
                self.b.op("advance", ring=ring)
