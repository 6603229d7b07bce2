"""FA3's consumers of July 2024, the time of its paper (flash-attention 5018ac6a, hopper/).

Against the released ones: turns hold for a tile's first block too, and a warpgroup's own turn waits for all others; O is rescaled
before P V instead of after it; under a mask as many blocks as a tile is wide are masked, needed or not; one warp stores O for
all, and that its place (V's buffer) is free is told in the next tile, after that one's first Q K^T. CTAs of one tile never tell.
Here a first tile's loads wait for that as well, which the kernel lets pass.
"""

from __future__ import annotations

from ..program import Index
from .fa3_consumer import Consumer
from .fa3_loads import LAST_BLOCK
from .fa3_producer import rows, shared
from .fa3_tiles import peeled

#: Where a binary rescales O, in the order of the code: before a turn, in it, and once Q K^T is issued.
RESCALES = ("rescale", "rescale_in_turn", "rescale_after_qk")


class FirstConsumer(Consumer):
    """One consumer warpgroup of 64 rows. FP8's loop is in order, the others overlap."""

    @property
    def writer(self) -> bool:
        """Whether this warpgroup has the warp that stores O."""
        return self.w == self.t.groups - 1

    def _begin_turns(self) -> None:
        for earlier in range(self.w if self.pingpong else 0):
            self.b.op("named_arrive", barrier=f"turn{earlier}")

    def _next_turn(self, phased: bool, on: bool = True) -> None:
        if self.pingpong and on:
            with self._phase("ping_pong_arrive", on=phased):
                for i in range(1, self.t.groups):
                    self.b.op("named_arrive", barrier=f"turn{(self.w + i) % self.t.groups}")

    def _first(self) -> None:
        """The tile's last K/V block: masked, in a turn of its own; in order it has its P V too."""
        b, w, t = self.b, self.w, self.t
        if self.writer and not t.specialized:
            b.op("store_wait")
        self.loads.begin()
        early = 0.0 if not (t.fp8 and self.profile) else self.profile["first_turn"]["xu"] / (t.block_kv / 2)
        with self._counted("first_turn" if t.fp8 else "first_block"):
            b.op("mbarrier_wait", barrier="q_full", ring="q")
            self._wait("k")
            self._turn(False)
            self._qk(False)
            self._next_turn(False, on=not t.fp8)
            self._tell_stored()
            b.op("mma_wait", arg=0)
            self._release("k")
            self._mask(Index(arg="n_blocks", const=-1))
            b.op("row_max", writes=(f"m{w}", f"m_old{w}"), reads=f"S{w}")
            if t.fp8:
                self._exponentials((0.0, early))
            else:
                self._powers((0.0, 1.0))
        if t.fp8:
            self._next_turn(False)
            with self._counted("first_block"):
                self._powers((early, 1.0))
                self._own_pv(False, turn=False)
        elif not self.overlap:
            self._own_pv(False, turn=False)
        if self.overlap:
            self.loads.go_on(LAST_BLOCK, v=False)

    def _powers(self, share: tuple[float, float]) -> None:
        with self.b.interleaved():
            self._exponentials(share)
            self._pack()

    def _before(self, phase: str) -> None:
        """In order the loop begins in a turn."""
        self._turn(False, on=phase == "full" and not self.overlap and self.t.pv_in_turn)

    def _peeled(self, j: Index) -> None:
        """FP8's second block of a tile: P V outside of the turns."""
        b, w = self.b, self.w
        own = peeled(self.t) if self.profile else {}
        looped, self.phases = self.phases, own
        early = own["softmax_max"]["xu"] / (self.t.block_kv / 2) if own else 0.0
        with self._phase("k_wait"):
            self._wait("k")
        self._turn(True)
        self._qk(True)
        b.op("mma_wait", arg=0)
        with self._phase("softmax_max"):
            b.op("row_max", writes=(f"m{w}", f"m_old{w}"), reads=f"S{w}")
            self._exponentials((0.0, early))
        self._next_turn(True)
        with self._phase("softmax"):
            self._release("k")
            self._finish((early, 1.0))
        self._own_pv(True, turn=False)
        self.phases = looped

    def _block(self, j: Index, *, masked: bool, phased: bool) -> None:
        if not self.overlap:
            if masked and self.t.fp8:
                self._peeled(j)
            else:
                self._block_in_order(j, masked=masked, phased=phased)
            return
        with self._phase("k_wait", on=phased):
            self._wait("k")
        scaled = self._rescale(0, 0.0, phased, masked)
        self._turn(phased)
        scaled = self._rescale(1, scaled, phased, masked)
        self._qk(phased, scale=not masked)
        with self._phase("v_wait", on=phased):
            self._wait("v")
        self._rescale(2, scaled, phased, masked)
        self._pv(phased)
        self._beside_pv(j, masked=masked, phased=phased, rows=self.rows_beside)

    @property
    def rows_beside(self) -> float:
        """Share of the row maxima that the compiler puts beside P V."""
        if "softmax_beside_pv" not in self.phases:
            return 1.0
        beside, after = (
            self.phases[name].get("of_which", {}).get("fmnmx", 0) for name in ("softmax_beside_pv", "softmax_after_pv")
        )
        return float(beside / (beside + after))

    def _rescale(self, place: int, done: float, phased: bool, masked: bool) -> float:
        """O times the last block's factor, as much of it as the binary does here (all of it before the turn where none was
        read); how much is done then. The first of a tile's masked blocks has no factor; wide heads rescale among Q K^T."""
        name = RESCALES[place]
        if self.t.rescale_in_qk:
            return 1.0
        if not any(each in self.phases for each in RESCALES):
            until = 1.0
        elif name in self.phases:
            until = min(1.0, done + self.phases[name].get("of_which", {}).get("fmul", 0) / (self.t.head_dim / 2))
        else:
            return done
        if until > done:
            with self._phase(name, on=phased):
                if masked:
                    with self.b.when(Index(loop="i", const=-1)):
                        self._scale_rows(done, until)
                else:
                    self._scale_rows(done, until)
        return until

    def _scale_rows(self, first: float, last: float) -> None:
        self.b.op("scale_rows", writes=f"O{self.w}", reads=f"scale{self.w}", share=(first, last))

    def _last(self) -> None:
        with self._counted("last" if self.overlap else ""):
            super()._last()

    def _tell_stored(self) -> None:
        """The last tile's O has left V's buffer."""
        if self.writer and self.t.o_told == "next":
            self.b.op("store_wait")
            self.b.op("mbarrier_arrive", barrier="o_free", ring="o", **shared(self.t))
            self.b.op("advance", ring="o")

    def _epilogue(self) -> None:
        b, w, t = self.b, self.w, self.t
        with self._counted("epilogue"):
            b.op("divide", writes=(f"O{w}", f"LSE{w}"), reads=(f"l{w}", f"m{w}"))
            b.op("convert", writes=f"Oout{w}", reads=f"O{w}")
            with b.when(Index(arg="n_blocks", const=-1)):
                b.op("named_sync", barrier="epilogue")  # no warpgroup reads V any more
                b.op("stmatrix", writes=f"Vs.O{w}", reads=f"Oout{w}", halves=t.fp8)
                b.op("fence_async")
                if not self.writer:
                    b.op("named_arrive", barrier="stored")
            b.op("store", writes="LSE", reads=f"LSE{w}", index=rows(t, w), clipped=True)
            if self.writer:
                with b.when(Index(arg="n_blocks", const=-1)):
                    b.op("named_sync", barrier="stored")
                    for each in range(t.groups):
                        b.op("tma_store", writes="O", reads=f"Vs.O{each}", index=rows(t, each))
        with b.when(Index(arg="n_blocks", arg_coef=-1)):
            b.op("store", writes="O", reads=f"Oout{w}", index=rows(t, w), clipped=True)
        if self.writer:
            with b.ending():
                b.op("store_wait")
