"""FA4's softmax warpgroups: one Q tile each, one thread a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..lowering_tmem import EMULATED_PAIR, emulated_until
from ..program import Index
from ..schedule import Builder
from .fa4_tiles import LANES, FA4Tile, both, rows

#: Where no binary was read: the share of a row's exponentials before the correction warps are told, as in fa4.toml's loops.
TOLD = 0.25
#: Parts of P that are stored, and the one with which its first arrival comes.
PARTS, FIRST_PARTS = 4, 3


class Softmax:
    """The warpgroup of Q tile ``w``."""

    def __init__(self, b: Builder, t: FA4Tile, w: int, profile: Mapping[str, Any] | None) -> None:
        self.b, self.t, self.w, self.profile = b, t, w, profile
        self.phases: dict[str, dict[str, float]] = {}

    def write(self) -> None:
        b, w = self.b, self.w
        b.op("tile")
        for name, value in (("m", -np.inf), ("l", 0.0)):
            b.op("zero", writes=f"{name}{w}", shape=(LANES,), value=value)
        b.op("mbarrier_wait", barrier=f"stats_empty{w}", ring=f"stats{w}", previous=True)
        self._block("first", Index(arg="n_blocks", const=-1))
        if self.t.causal:
            with b.loop("i", Index(arg="n_masked")):
                self._block("masked", Index(arg="n_blocks", const=-2, loop="i", coef=-1))
        with b.loop("i", Index(arg="n_full")):
            self._block("full", Index(arg="n_full", const=-1, loop="i", coef=-1))
        b.op("to_smem", writes=f"Stat{w}", reads=f"l{w}")
        b.op("to_smem", writes=f"Max{w}", reads=f"m{w}")
        b.op("mbarrier_arrive", barrier=f"stats_full{w}", ring=f"stats{w}")
        b.op("advance", ring=f"stats{w}")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """What the binary issues in the phase of this name, where one was read."""
        p = self.phases.get(name)
        counts = {c: n for c, n in p.items() if c != "stall_cycles"} if p else None
        with self.b.phase(counts=counts, stall_cycles=p["stall_cycles"] if p else None):
            yield

    def _block(self, kind: str, j: Index) -> None:
        """One K/V block: scores in, maximum, factor out to the correction warps, exponentials, P out in parts, row sum."""
        b, w = self.b, self.w
        told, most, summed = self._read(kind)
        with self._phase("s_wait"):
            b.op("mbarrier_wait", barrier=f"s_full{w}", ring=f"s{w}")
            b.op("advance", ring=f"s{w}")
        with self._phase("load_max"):
            self._maximum(kind, j)
        if kind != "first":
            with self._phase("exp_first"):
                b.op("lane_factor", writes=(f"l{w}", f"factor{w}"), reads=(f"m{w}", f"m_old{w}"))
                b.op("to_smem", writes=f"Stat{w}", reads=f"factor{w}")
                self._exponentials(0.0, told)
                b.op("mbarrier_arrive", barrier=f"stats_full{w}", ring=f"stats{w}")
        with self._phase("exp_main"):
            if kind == "first":
                b.op("mbarrier_arrive", barrier=f"stats_full{w}", ring=f"stats{w}")
            self._exponentials(0.0 if kind == "first" else told, most)
            self._sum(0.0, summed[0])
            self._store(0.0, FIRST_PARTS / PARTS)
            b.op("mbarrier_arrive", barrier=f"p_full{w}", ring=f"p{w}", **both(self.t))
        with self._phase("exp_last"):
            self._exponentials(most, 1.0)
            self._sum(summed[0], summed[1])
            self._store(FIRST_PARTS / PARTS, 1.0)
            b.op("mbarrier_arrive", barrier=f"p_full_last{w}", ring=f"p{w}", **both(self.t))
            b.op("advance", ring=f"p{w}")
        with self._phase("stats_wait"):
            b.op("advance", ring=f"stats{w}")
            b.op("mbarrier_wait", barrier=f"stats_empty{w}", ring=f"stats{w}", previous=True)
        with self._phase("row_sum"):
            self._sum(summed[1], 1.0)

    # --- pieces ---

    def _maximum(self, kind: str, j: Index) -> None:
        b, w = self.b, self.w
        names: dict[str, Any] = {"writes": (f"m{w}", f"m_old{w}", f"scores{w}"), "reads": f"S{w}"}
        names["threshold_log2"] = self.t.threshold_log2
        if kind == "full":
            b.op("lane_max", **names, max_loaded=self.t.max_loaded)
        else:
            b.op("lane_masked_max", **names, index=j, q_index=rows(w))

    def _exponentials(self, first: float, last: float) -> None:
        w = self.w
        share = (first, last)
        self.b.op("lane_exp2", writes=f"scores{w}", reads=(f"scores{w}", f"m{w}"), share=share, **self._emulation())

    def _emulation(self) -> dict[str, Any]:
        return {"emulated": self.t.emulated, "emulated_from": self.t.emulated_from}

    def _store(self, first: float, last: float) -> None:
        w = self.w
        self.b.op("lane_pack", writes=f"P{w}", reads=f"scores{w}", share=(first, last))
        self.b.op("tmem_store", writes=f"S{w}.P", reads=f"P{w}", share=(first, last))

    def _sum(self, first: float, last: float) -> None:
        if last > first:
            self.b.op("lane_sum", writes=f"l{self.w}", reads=f"scores{self.w}", share=(first, last))

    # --- the binary ---

    def _read(self, kind: str) -> tuple[float, float, tuple[float, float]]:
        """Set the phases of this kind of block; returns the shares of a row's exponentials before the correction warps are told
        and before P's first arrival, and those of the row sum in the stretches after each."""
        self.phases = {}
        if self.profile is None:
            return TOLD, FIRST_PARTS / PARTS, (0.0, 0.0)
        phases = {str(p["name"]): {c: n for c, n in p.items() if c not in ("name", "tensor")} for p in self.profile[kind]}
        compiled = (int(self.profile["emulated"]), float(self.profile.get("emulated_from", 0.25)))
        told = self._share(phases["exp_first"]["xu"] - 1, compiled) if "exp_first" in phases else 0.0
        main = phases["exp_main"]["xu"] + (phases["exp_first"]["xu"] - 1 if "exp_first" in phases else 0)
        most = self._share(main, compiled)
        if "exp_first" not in phases and kind != "first":
            raise ValueError(f"fa4's profile has no phase exp_first in its {kind} block; add it to fa4.toml")
        pairs = self.t.block_kv // 2
        early = phases["exp_main"]["fma"] - pairs - 4 * compiled[0] if kind == "first" else 0
        summed = min(1.0, max(0.0, early / pairs))
        after = min(1.0, summed + phases["exp_last"]["fma"] / pairs) if kind == "first" else summed
        for name, first, last in (("exp_first", 0.0, told), ("exp_main", told, most), ("exp_last", most, 1.0)):
            if name in phases:
                self._emulate(phases[name], first, last, compiled)
        self.phases = phases
        return told, most, (summed, after)

    def _share(self, exponentials: float, emulated: tuple[int, float]) -> float:
        """After which share of the row the MUFU has done this many exponentials."""
        cols = self.t.block_kv
        done = (n / cols for n in range(cols + 1) if n - emulated_until(n / cols, *emulated) >= exponentials)
        return next(done, 1.0)

    def _emulate(self, phase: dict[str, float], first: float, last: float, compiled: tuple[int, float]) -> None:
        """Change a phase's counts from the ``compiled`` emulated exponentials (how many, from where) to this tile's."""
        tile = (self.t.emulated, self.t.emulated_from)
        own = emulated_until(last, *tile) - emulated_until(first, *tile)
        more = own - (emulated_until(last, *compiled) - emulated_until(first, *compiled))
        phase["xu"] -= more
        phase["alu"] += more // 2 * EMULATED_PAIR["fmnmx"]
        phase["fma"] += more // 2 * (sum(EMULATED_PAIR.values()) - EMULATED_PAIR["fmnmx"])
