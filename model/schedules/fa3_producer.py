"""FA3's producer: the warp that feeds the rings by TMA, in 8 bits with warps that transpose V, and what a cluster shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..program import Index
from ..schedule import Builder
from .fa3_tiles import FA3Tile


def start(b: Builder, t: FA3Tile, profile: Mapping[str, Any] | None, *parts: str) -> None:
    """What a warp does once, before its first tile: the ``parts`` of it that the binary has. In a cluster no CTA may signal
    another before that one's barriers are initialised."""
    for part in parts:
        if profile and part in profile:
            b.op("start_code", **profile[part])
        if t.cluster > 1 and part == parts[0]:
            b.op("cluster_sync")


def shared(t: FA3Tile) -> dict[str, Any]:
    """Of an arrival that every CTA of a cluster makes in all of them."""
    return {"to": "all", "ctas": t.cluster} if t.cluster > 1 else {}


def _load(b: Builder, t: FA3Tile, name: str, index: Index) -> None:
    ring, buffer, tensor = name.lower(), f"{name}s", name[0]
    multicast = {"multicast": t.cluster} if t.cluster > 1 else {}
    copies = max(1, t.head_dim // 64)
    b.op("mbarrier_wait", barrier=f"{ring}_empty", ring=ring, previous=True, elected=True)
    b.op("mbarrier_expect", barrier=f"{ring}_full", ring=ring, of=(buffer,))
    b.op("tma_load", writes=buffer, reads=tensor, index=index, barrier=f"{ring}_full", ring=ring, copies=copies, **multicast)
    b.op("advance", ring=ring)


def producer(b: Builder, t: FA3Tile, stages: int, profile: Mapping[str, Any] | None) -> None:
    """K of the last block, Q, then K_j with V_(j+1), and V_0: the order in which consumers ask for them."""
    v = "Vt" if t.fp8 else "V"
    start(b, t, profile, "start", "producer_start")
    b.op("tile")
    with b.when(Index(arg="n_blocks", const=-1)):
        _load(b, t, "K", Index(arg="n_blocks", const=-1))
        b.op("mbarrier_wait", barrier="q_empty", ring="q", previous=True)
        b.op("mbarrier_expect", barrier="q_full", ring="q", of=tuple(f"Qs{w}" for w in range(t.groups)))
        for w in range(t.groups):
            b.op("tma_load", writes=f"Qs{w}", reads="Q", index=rows(t, w), barrier="q_full", ring="q", copies=1)
        b.op("advance", ring="q")
        if t.fp8 and t.build:
            _load_and_transpose(b, t)
        else:
            _load_rest(b, t, v)
    if t.cluster > 1:
        _leave(b, t, stages)


def _load_rest(b: Builder, t: FA3Tile, v: str) -> None:
    """K_j with V_(j+1), once the last tile's O has left V's buffer, and V_0."""
    _o_stored(b, t)
    with b.loop("i", Index(arg="n_blocks", const=-1)):
        _load(b, t, "K", Index(arg="n_blocks", const=-2, loop="i", coef=-1))
        _load(b, t, v, Index(arg="n_blocks", const=-1, loop="i", coef=-1))
    _load(b, t, v, Index())


def _load_and_transpose(b: Builder, t: FA3Tile) -> None:
    """FP8 of July 2024: the warp that loads is one of those that transpose V (:func:`transpose`), so that it asks for a block
    only once the one before it is transposed."""
    _load(b, t, "Vt", Index(arg="n_blocks", const=-1))
    with b.loop("i", Index(arg="n_blocks", const=-1)):
        b.op("mbarrier_wait", barrier="v_full", ring="v")
        b.op("advance", ring="v")
        _load(b, t, "K", Index(arg="n_blocks", const=-2, loop="i", coef=-1))
        _load(b, t, "Vt", Index(arg="n_blocks", const=-2, loop="i", coef=-1))
    b.op("mbarrier_wait", barrier="v_full", ring="v")
    b.op("advance", ring="v")


def _o_stored(b: Builder, t: FA3Tile) -> None:
    """Until the last tile's O has left V's buffer; of July 2024 until the consumers say so in this tile (:mod:`.fa3_2024`)."""
    if t.o_told != "never":
        b.op("mbarrier_wait", barrier="o_free", ring="o", previous=t.o_told == "end")
        b.op("advance", ring="o")


def _leave(b: Builder, t: FA3Tile, stages: int) -> None:
    """A CTA stays until all that the other one sends it has come: its consumers give O's place back last, and in 8 bits the
    warps that transpose V its last stage (the released kernel waits for every stage of K and V as well)."""
    with b.ending():
        if t.build is not None:
            for ring in ("k", "vt" if t.fp8 else "v"):
                for _ in range(stages):
                    b.op("mbarrier_wait", barrier=f"{ring}_empty", ring=ring, previous=True)
                    b.op("advance", ring=ring)
            return
        b.op("mbarrier_wait", barrier="o_free", ring="o", previous=True)
        if t.fp8:
            for _ in range(stages - 1):
                b.op("advance", ring="vt")
            b.op("mbarrier_wait", barrier="vt_empty", ring="vt", previous=True)


def transpose(b: Builder, t: FA3Tile, profile: Mapping[str, Any] | None) -> None:
    """FP8: the tensor cores take V only with keys along rows, so the producer's warpgroup transposes each block."""
    start(b, t, profile, "start")
    b.op("tile")
    if t.build:
        with b.when(Index(arg="n_blocks", const=-1)):
            _o_stored(b, t)
    with b.loop("i", Index(arg="n_blocks")):
        b.op("mbarrier_wait", barrier="vt_full", ring="vt")
        b.op("mbarrier_wait", barrier="v_empty", ring="v", previous=True)
        b.op("transpose", writes="Vs", reads="Vts")
        b.op("fence_async")
        b.op("mbarrier_arrive", barrier="v_full", ring="v")
        b.op("advance", ring="v")
        b.op("mbarrier_arrive", barrier="vt_empty", ring="vt", **shared(t))
        b.op("advance", ring="vt")


def rows(t: FA3Tile, w: int) -> Index:
    """Warpgroup ``w``'s rows of the tile, as a block of block_q / groups rows."""
    return Index(arg="q_block", arg_coef=t.groups, const=w)
