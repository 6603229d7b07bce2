"""FA3's consumer warpgroups: products, softmax and turns, with overlap of a warpgroup's own products and softmax or in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..program import Index
from ..schedule import Builder
from .fa3_loads import LAST_BLOCK, OwnLoads
from .fa3_producer import rows, shared, start
from .fa3_tiles import COUNTED, FA3Tile, in_order

if TYPE_CHECKING:
    from .fa3 import FA3

#: Exponentials of a block that a compiler puts beside P V where no binary was read: the median of the kernels in fa3.toml.
BESIDE = 0.25
#: The least time between a warp's issues of products, where no binary was read (stall counts in fa3.toml).
ISSUE_GAP = 13
#: Phases in which each instruction waits for the one before it (three stall cycles each): a stage's place, its parity, the wait.
#: Without overlap they come when no product runs, and the other warpgroup's softmax issues in every cycle; with overlap it is
#: slowed by its own products and leaves slots (profiler samples on H200: 180 cycles from P V to Q K^T in order, 20 with overlap).
SERIAL = ("k_wait", "v_wait")


class Consumer:
    """One consumer warpgroup: 64 rows of the tile."""

    def __init__(self, b: Builder, t: FA3Tile, schedule: FA3, w: int, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t, self.w, self.profile = b, t, w, profile
        self.overlap = t.overlap
        self.loads = OwnLoads(b=b, t=t, w=w, stages=schedule.stages, behind=int(self.overlap), on=not t.specialized)
        self.pingpong = t.pingpong
        self.phases = {p["name"]: p for p in profile["phases"]} if profile else {}
        beside = self.phases.get("softmax_beside_pv", {}).get("xu")
        if profile and not self.overlap:
            self.phases = in_order(t, self.phases)
        exponentials = t.block_kv / 2  # of a block, by one thread; its row scales come after P V
        self.beside = BESIDE if beside is None else beside / exponentials
        self.with_max = self.phases["softmax_max"]["xu"] / exponentials if "softmax_max" in self.phases else 0.0

    def write(self) -> None:
        b, w = self.b, self.w
        start(b, self.t, self.profile, "start")
        self._begin_turns()
        b.op("tile")
        b.op("zero", writes=f"O{w}", shape=(self.t.block_q // self.t.groups, self.t.head_dim))
        b.op("zero", writes=f"m{w}", shape=(self.t.block_q // self.t.groups,), value=-np.inf)
        b.op("zero", writes=f"l{w}", shape=(self.t.block_q // self.t.groups,))
        if self.t.rescale_first:
            b.op("zero", writes=f"scale{w}", shape=(self.t.block_q // self.t.groups,), value=1.0)
        with b.when(Index(arg="n_blocks", const=-1)):
            self._first()
            for phase, (trips, last) in {"masked": ("n_masked", "n_blocks"), "full": ("n_full", "n_full")}.items():
                self._before(phase)
                j = Index(arg=last, const=-2 if phase == "masked" else -1, loop="i", coef=-1)
                counts = self.profile.get("masked_block") if self.profile and phase == "masked" else None
                stall_cycles = counts.get("stall_cycles") if counts else None
                with b.loop("i", Index(arg=trips), counts=counts, stall_cycles=stall_cycles):
                    self._block(j, masked=phase == "masked", phased=counts is None)
                    b.op("loop_back")
            self._last()
        self._epilogue()
        if self.t.specialized and self.t.o_told == "end":
            with b.when(Index(arg="n_blocks", const=-1)):
                self._release("o", "o_free")

    # --- pieces ---

    def _begin_turns(self) -> None:
        if self.pingpong and self.w == self.t.groups - 1:
            self.b.op("named_arrive", barrier="turn0")

    def _before(self, phase: str) -> None:
        """What comes before a tile's "masked" and "full" blocks."""

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """What the binary issues in this part of a tile beside its loops."""
        counts = self.profile.get(name) if self.profile else None
        stall_cycles = counts.get("stall_cycles") if counts else None
        with self.b.phase(counts={c: counts[c] for c in COUNTED} if counts else None, stall_cycles=stall_cycles):
            yield

    @contextmanager
    def _phase(self, name: str, steps: int = 0, on: bool = True) -> Iterator[None]:
        """What the binary issues in the phase of this name, or ISSUE_GAP cycles a product."""
        p = self.phases.get(name) if on else None
        counts = {c: p[c] for c in COUNTED} if p else None
        stall_cycles = p["stall_cycles"] if p else steps * ISSUE_GAP or None
        serial, segments = name in SERIAL and not self.overlap, p.get("segments") if p else None
        with self.b.phase(
            counts=counts, stall_cycles=stall_cycles, serial=serial, segments=segments, at_products=name.endswith("_issue")
        ):
            yield

    def _wait(self, ring: str, on: bool = True) -> None:
        if on:
            self.b.op("mbarrier_wait", barrier=f"{ring}_full", ring=ring)
        else:
            self.b.op("branch")

    def _release(self, ring: str, barrier: str = "") -> None:
        """Tell whoever loads that what the ring's stage held is not read any more (Q, without a producer: a barrier does)."""
        if self.t.specialized or ring in ("k", "v"):
            to = {} if ring == "q" or (ring == "v" and self.t.fp8) else shared(self.t)
            self.b.op("mbarrier_arrive", barrier=barrier or f"{ring}_empty", ring=ring, **to)
        self.b.op("advance", ring=ring)

    def _qk(self, on: bool, scale: bool = False) -> None:
        steps = self.t.head_dim * self.t.element // 32
        names: dict[str, Any] = {"writes": f"S{self.w}", "reads": (f"Qs{self.w}", "Ks"), "transpose_b": True}
        with self._phase("qk_issue", steps, on):
            if scale and self.t.rescale_in_qk:  # O is rescaled while the first k-steps run
                self.b.op("wgmma", **names, share=(0.0, 2 / steps))
                self.b.op("scale_rows", writes=f"O{self.w}", reads=f"scale{self.w}")
                self.b.op("wgmma", **names, share=(2 / steps, 1.0))
            else:
                self.b.op("wgmma", **names)
            self.b.op("mma_commit")

    def _pv(self, on: bool) -> None:
        with self._phase("pv_issue", self.t.block_kv * self.t.element // 32, on):
            self.b.op("wgmma", writes=f"O{self.w}", reads=(f"P{self.w}", "Vs"), accumulate=True)
            self.b.op("mma_commit")

    def _turn(self, phased: bool, on: bool = True) -> None:
        if self.pingpong and on:
            with self._phase("ping_pong_sync", on=phased):
                self.b.op("named_sync", barrier=f"turn{self.w}")

    def _next_turn(self, phased: bool, on: bool = True) -> None:
        if self.pingpong and on:
            with self._phase("ping_pong_arrive", on=phased):
                self.b.op("named_arrive", barrier=f"turn{(self.w + 1) % self.t.groups}")

    def _exponentials(self, share: tuple[float, float]) -> None:
        w = self.w
        self.b.op("exp2", writes=f"S{w}", reads=(f"S{w}", f"m{w}"), share=share)
        self.b.op("row_sum", writes=f"l{w}", reads=f"S{w}", share=share)

    def _pack(self) -> None:
        w = self.w
        self.b.op("convert", writes=f"Pregs{w}" if self.t.p_in_smem else f"P{w}", reads=f"S{w}")
        if self.t.p_in_smem:
            self.b.op("stmatrix", writes=f"P{w}", reads=f"Pregs{w}")
            self.b.op("fence_async")

    def _mask(self, j: Index) -> None:
        self.b.op("mask", writes=f"S{self.w}", index=j, q_index=rows(self.t, self.w))

    def _first(self) -> None:
        """The tile's last K/V block: always masked; with overlap it is outside the turns and leaves its P V to the loop."""
        b, w = self.b, self.w
        self.loads.begin()
        with self._counted("first_block"):
            b.op("mbarrier_wait", barrier="q_full", ring="q")
            if not self.overlap:
                self._turn(False)
            self._wait("k")
            self._qk(False)
            if not self.overlap:
                self._next_turn(False, on=not self.t.scores_in_turn)
            b.op("mma_wait", arg=0)
            if not self.overlap:
                self._next_turn(False, on=self.t.scores_in_turn)
            self._release("k")
            self._mask(Index(arg="n_blocks", const=-1))
            b.op("row_max", writes=(f"m{w}", f"m_old{w}"), reads=f"S{w}")
            with b.interleaved():
                self._exponentials((0.0, 1.0))
                self._pack()
        if not self.overlap:
            self._own_pv(False, turn=not self.t.scores_in_turn)
            self._turn(False, on=self.t.scores_in_turn and self.t.pv_in_turn)
        if self.overlap:
            self.loads.go_on(LAST_BLOCK, v=False)

    def _block(self, j: Index, *, masked: bool, phased: bool) -> None:
        """One K/V block: Q K^T of block j, and P V of block j + 1 beside its softmax."""
        if not self.overlap:
            self._block_in_order(j, masked=masked, phased=phased)
            return
        first = not self.pingpong or self.w == 0  # the others' turns come after the first one's waits
        with self._phase("k_wait", on=phased):
            self._wait("k", on=first)
        self._turn(phased)
        self._qk(phased, scale=True)
        with self._phase("v_wait", on=phased):
            self._wait("v", on=first)
        self._pv(phased)
        self._beside_pv(j, masked=masked, phased=phased)

    def _beside_pv(self, j: Index, *, masked: bool, phased: bool, rows: float = 1.0) -> None:
        """The block's softmax while P V of the block before runs, and after it. ``rows``: share of the row maxima beside it."""
        b, w = self.b, self.w
        shares: list[dict[str, Any]] = [{"share": part} if rows < 1.0 else {} for part in ((0.0, rows), (rows, 1.0))]
        self._next_turn(phased)
        with self._phase("qk_done_wait", on=phased):
            b.op("mma_wait", arg=1)
        with self._phase("softmax_beside_pv", on=phased):
            if masked:
                self._mask(j)
            b.op("row_max", writes=(f"m{w}", f"m_old{w}"), reads=f"S{w}", **shares[0])
            self._exponentials((0.0, self.beside))
            self._release("k")
        with self._phase("pv_done_wait", on=phased):
            b.op("mma_wait", arg=0)
        with self._phase("softmax_after_pv", on=phased):
            self._release("v")
            if rows < 1.0:
                b.op("row_max", writes=(f"m{w}", f"m_old{w}"), reads=f"S{w}", **shares[1])
            self._finish((self.beside, 1.0))
        self.loads.go_on(j)

    def _block_in_order(self, j: Index, *, masked: bool, phased: bool) -> None:
        """Without intra-warpgroup overlap: Q K^T, softmax, P V; a warpgroup keeps its turn from P V to the next Q K^T."""
        with self._phase("k_wait", on=phased):
            self._wait("k")
        self._turn(phased and not self.t.pv_in_turn, on=not self.t.pv_in_turn)
        self._qk(phased)
        self._next_turn(phased, on=not self.t.scores_in_turn)
        self.b.op("mma_wait", arg=0)
        parts = ("softmax_max", "softmax") if "softmax_max" in self.phases else ("softmax", "")
        with self._phase(parts[0] if not parts[1] else "", on=phased):
            with self._phase(parts[0] if parts[1] else "", on=phased):
                self._release("k")
                if masked:
                    self._mask(j)
                self.b.op("row_max", writes=(f"m{self.w}", f"m_old{self.w}"), reads=f"S{self.w}")
                if self.with_max:
                    self._exponentials((0.0, self.with_max))
            self._next_turn(phased, on=self.t.scores_in_turn)
            self.loads.go_on(replace(j, const=j.const + 1))  # not before the turn is given on: the other P V needs it
            with self._phase(parts[1], on=phased):
                self._finish((self.with_max, 1.0))
        self._own_pv(phased, turn=self.t.pv_in_turn)

    def _own_pv(self, phased: bool, turn: bool) -> None:
        with self._phase("v_wait", on=phased):
            self._wait("v")
        self._turn(phased, on=turn)
        self._pv(phased)
        self.b.op("mma_wait", arg=0)
        self._release("v")

    def _finish(self, share: tuple[float, float]) -> None:
        """The rest of a block's softmax; O is rescaled here, or (wide heads) while the next Q K^T is issued."""
        b, w = self.b, self.w
        with b.interleaved():
            if self.t.rescale_first:
                b.op("row_scale", writes=(f"l{w}", f"scale{w}"), reads=(f"m{w}", f"m_old{w}"))
            else:
                b.op("rescale", writes=(f"O{w}", f"l{w}"), reads=(f"m{w}", f"m_old{w}"))
            self._exponentials(share)
            self._pack()

    def _last(self) -> None:
        """P V of the tile's first K/V block."""
        b, w = self.b, self.w
        self._release("q")
        if self.overlap:
            if self.t.rescale_first:
                b.op("scale_rows", writes=f"O{w}", reads=f"scale{w}")
            self._wait("v")
            self._pv(False)
        else:
            self._next_turn(False, on=self.t.pv_in_turn)
        b.op("quad_sum", like=f"S{w}")
        if self.overlap:
            b.op("mma_wait", arg=0)
            self._release("v")

    def _epilogue(self) -> None:
        b, w = self.b, self.w
        with self._counted("epilogue"):
            b.op("divide", writes=(f"O{w}", f"LSE{w}"), reads=(f"l{w}", f"m{w}"))
            b.op("convert", writes=f"Oout{w}", reads=f"O{w}")
            with b.when(Index(arg="n_blocks", const=-1)):
                b.op("named_sync", barrier="epilogue")  # no warpgroup reads V any more
                b.op("stmatrix", writes=f"Vs.O{w}", reads=f"Oout{w}")
                b.op("fence_async")
                b.op("named_sync", barrier="epilogue")
                for each in range(self.t.groups) if w == self.t.groups - 1 else ():  # one warpgroup stores for all, and waits
                    last = {"wait": "read"} if each == w else {}
                    b.op("tma_store", writes="O", reads=f"Vs.O{each}", index=rows(self.t, each), **last)
            b.op("store", writes="LSE", reads=f"LSE{w}", index=rows(self.t, w), clipped=True)
        with b.when(Index(arg="n_blocks", arg_coef=-1)):  # no keys: no load to order O's way through V's buffer against
            b.op("store", writes="O", reads=f"Oout{w}", index=rows(self.t, w), clipped=True)
