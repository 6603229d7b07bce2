"""FlashAttention-1 forward: K/V blocks outside, Q blocks inside, one CTA per batch x head, warps split K ("split-K").

Dao et al. 2022 (arXiv 2205.14135), algorithm 1, as its first kernel ran it (tile 16 x 256 at head_dim 64; section 3.3 of the FA2
paper describes the split). O, l and m leave for global memory in every inner step and come back in the next outer one; the four
warps own columns of S, so row maxima, row sums and the products with V cross shared memory three times a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..profiles import TYPICAL, TYPICAL_OVERHEAD, kernel_profile
from ..program import Index, Program, Tensor
from ..schedule import Builder
from .fa2 import check_counts, check_forward
from .grid import ceil_div, head_grid, qkv_tensors
from .standard_copies import rows_copy

#: head_dim -> block_kv of the first released kernel (block_q is 16, four warps).
BLOCK_KV = {32: 256, 64: 256, 128: 128}

SCRATCH = ("Otmp", "m", "l")
LAYOUTS = ("packed", "separate")
BUILDS = ("flash-attn-0.1", "xformers")

#: Q blocks run from the last to the first, so that under a causal mask those a K/V block needs come first.
Q_BLOCK = Index(arg="n_q", const=-1, loop="i", coef=-1)

#: Scoreboards of loads, as in the binary: O and the next Q block share one, the next l and m have another.
TILES, ROWS = 5, 2


@dataclass(frozen=True, kw_only=True)
class FA1:
    """Switches: the tile (``block_q`` x ``block_kv``, None: the released kernel's), ``warps`` that split K."""

    block_q: int = 16
    block_kv: int | None = None
    warps: int = 4
    registers: int | None = None
    #: "binary": the compiled kernel's instructions, or a compiler's usual overhead for tiles that were not read; "ideal": the
    #: algorithm's own.
    counts: str = "binary"
    #: Whose compiled kernel: "flash-attn-0.1" (May 2022, the paper's) or "xformers" (2023); where one was not read, the other.
    build: str = "flash-attn-0.1"
    #: "packed": Q, K and V are parts of one array (batch, row, 3, head, dim), all that the first release reads; "separate": each
    #: is an array of its own, and the framework copies them into one first (:mod:`.standard_copies`).
    layout: str = "packed"
    #: Calls that the framework makes for one attention (packing, output, LSE and scratch allocation, launch).
    host_ops: int = 5

    @property
    def name(self) -> str:
        return "fa1"

    def tile(self, attention: Attention) -> tuple[int, int, int]:
        """(block_q, block_kv, padded head_dim). A sequence of at most half a block takes the half block."""
        need = max(attention.head_dim, attention.head_dim_v)
        sizes = [d for d in BLOCK_KV if d >= need]
        if not sizes:
            raise ValueError(f"fa1 has no tile for head_dim {need}; the largest is {max(BLOCK_KV)}: reduce head_dim")
        d = sizes[0]
        default = 128 if attention.seqlen_kv <= 128 else BLOCK_KV[d]
        return self.block_q, self.block_kv or default, d

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check_forward("fa1", attention)
        block_q, block_kv, d = self.tile(attention)
        if block_q % 16 or block_kv % (16 * self.warps):
            raise ValueError(
                f"fa1 tile {block_q}x{block_kv} with {self.warps} warps: block_q must be a multiple of 16 and block_kv of"
                f" 16 x warps = {16 * self.warps}; change block_q, block_kv or warps"
            )
        check_counts("fa1", self.counts, ("binary", "ideal"))
        for field, allowed in (("build", BUILDS), ("layout", LAYOUTS)):
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"fa1 has {field}={getattr(self, field)!r}; it must be one of {', '.join(allowed)}: change {field}"
                )
        tile = {"head_dim": d, "block_q": block_q, "block_kv": block_kv, "warps": self.warps}
        read = kernel_profile("fa1", build=self.build, **tile) or kernel_profile("fa1", **tile)
        profile = read if self.counts == "binary" else None
        b = Builder(name="fa1_fwd", warps=self.warps, registers=self.registers or (profile["registers"] if profile else 255))
        _buffers(b, attention.dtype_bytes, block_q, block_kv, d, self.warps)
        for shift in (0, 1):
            self._passes(b, attention, shift, profile)
        inputs = self._inputs()
        tensors = {name: replace(t, name=inputs.get(name, name)) for name, t in _tensors(attention, block_q, block_kv).items()}
        typical = TYPICAL["pytorch"] if self.counts == "binary" else "ideal"
        copies = (rows_copy(attention, f"pack_{n.lower()}", n, f"{n}p", dims=2, counts=self.counts) for n in inputs)
        attend = b.build(
            tensors=tuple(t for name, t in tensors.items() if name not in SCRATCH or name in b.tensors),
            tiles=head_grid(attention, block_q, block_kv),
            profile=f"{profile['kind']}: {profile['source']}" if profile else typical,
        )
        return (*copies, attend)

    def _inputs(self) -> dict[str, str]:
        """Where the kernel reads Q, K and V that had to be packed first."""
        return {name: f"{name}p@block" for name in ("Q", "K", "V")} if self.layout == "separate" else {}

    def _passes(self, b: Builder, attention: Attention, shift: int, profile: Mapping[str, Any] | None) -> None:
        """The first K/V block (``shift`` 0), or all later ones, each against every Q block."""
        block_q, block_kv, d = self.tile(attention)
        stalls = profile["stall_cycles"] if profile else {}
        only = ceil_div(attention.seqlen_kv, block_kv) == 1
        kind = "per_block" if shift else "only_block" if only else "first_block"
        with b.loop("j", Index(arg="n_kv", const=-1) if shift else Index(const=1)):
            with b.phase(counts=profile["outer_block"] if profile else None, stall_cycles=stalls.get("outer_block")):
                _load_kv(b, shift, self._inputs())
            with b.loop(
                "i",
                Index(arg="n_q"),
                counts=profile[kind] if profile else None,
                overhead=None if profile or self.counts == "ideal" else TYPICAL_OVERHEAD,
                stall_cycles=stalls.get(kind),
            ):
                if attention.causal and shift:
                    with b.when(_sees(attention, shift, block_q, block_kv)):
                        self._step(b, attention, shift, block_q, block_kv, d)
                else:
                    self._step(b, attention, shift, block_q, block_kv, d)

    def _step(self, b: Builder, attention: Attention, shift: int, block_q: int, block_kv: int, d: int) -> None:
        """One Q block against the resident K/V block."""
        w = self.warps
        if shift:
            b.op("move", writes="l", reads="l_next")
            b.op("move", writes="m", reads="m_next")
        else:
            b.op("zero", writes="O", shape=(block_q, d))
            b.op("zero", writes="l", shape=(block_q,))
            b.op("zero", writes="m", shape=(block_q,), value=-np.inf)
        b.op("mma", writes="S", reads=("Qs", "Kf"), transpose_b=True, split="cols")
        if shift:
            b.op("load", writes="O", reads="Otmp", index=Q_BLOCK, scoreboard=TILES)
        self._ahead(b, attention, shift, block_q, block_kv, {"Qnext": self._inputs().get("Q", "Q")}, TILES)
        ragged = attention.seqlen_kv % block_kv != 0
        if attention.causal or ragged:
            b.op("mask", writes="S", index=Index(loop="j", const=shift), q_index=Q_BLOCK)
        b.op("row_max", writes="m_part", reads="S", split="cols", parts=w)
        if shift:
            self._ahead(b, attention, shift, block_q, block_kv, {"l_next": "l", "m_next": "m"}, ROWS)
        b.op("cross_warp", writes="m_new", reads="m_part", combine="max", like="S", split="cols")
        with b.interleaved():
            b.op("exp2", writes="S", reads=("S", "m_new"), split="cols")
            b.op("row_sum", writes="l_part", reads="S", split="cols", parts=w)
            b.op("convert", writes="P", reads="S")
        if shift:
            b.op("wait_load", scoreboard=ROWS)
        b.op("quad_sum", like="S", split="cols")
        b.op("cross_warp", writes="l_new", reads="l_part", combine="sum", like="S", split="cols", barrier=False)
        b.op("mma", writes="O_part", reads=("P", "Vf"), split="k", parts=w)
        b.op("wait_load", scoreboard=TILES)
        b.op("to_smem", writes="Qs", reads="Qnext")
        b.op("cross_warp_tile", writes="O_new", reads="O_part")
        b.op("merge", writes=("O", "l", "m"), reads=("O_new", "l_new", "m_new"))
        self._write(b, attention, shift, block_q, block_kv)

    def _ahead(
        self, b: Builder, attention: Attention, shift: int, block_q: int, block_kv: int, loads: Mapping[str, str], scoreboard: int
    ) -> None:
        """Loads for the next Q block, where there is one that sees this K/V block."""
        following = replace(Q_BLOCK, const=-2)
        with b.when(Index(arg="n_q", const=-2, loop="i", coef=-1)), contextlib.ExitStack() as inside:
            if attention.causal and shift:
                inside.enter_context(b.when(_sees(attention, shift, block_q, block_kv, ahead=1)))
            for tile, tensor in loads.items():
                b.op("load", writes=tile, reads=tensor, index=following, scoreboard=scoreboard)

    def _write(self, b: Builder, attention: Attention, shift: int, block_q: int, block_kv: int) -> None:
        """O in fp32 with l and m while blocks are to come, O in 16 bits after a row's last block."""
        more = Index(arg="n_kv", const=-2 - shift, outer="j", outer_coef=-1)
        last = Index(arg="n_kv", arg_coef=-1, const=1 + shift, outer="j")
        with b.when(more):
            if attention.causal:  # a row is done when its diagonal lies behind
                continues = _sees(attention, shift + 1, block_q, block_kv)
                with b.when(_negated(continues)):
                    _final(b)
                with b.when(continues):
                    _scratch(b)
            else:
                _scratch(b)
        with b.when(last):
            _final(b)


def _sees(attention: Attention, shift: int, block_q: int, block_kv: int, ahead: int = 0) -> Index:
    """>= 0 where the Q block ``ahead`` steps on sees a key of K/V block j + shift: its last row reaches the block's first key."""
    offset = attention.seqlen_kv - attention.seqlen_q - 1 - shift * block_kv - ahead * block_q
    return Index(const=offset, arg="n_q", arg_coef=block_q, loop="i", coef=-block_q, outer="j", outer_coef=-block_kv)


def _negated(index: Index) -> Index:
    """>= 0 exactly where ``index`` is negative."""
    return replace(index, const=-index.const - 1, arg_coef=-index.arg_coef, coef=-index.coef, outer_coef=-index.outer_coef)


def _final(b: Builder) -> None:
    b.op("log_sum", writes="lse", reads=("l", "m"))
    b.op("convert", writes="Oout", reads="O")
    b.op("store", writes="O", reads="Oout", index=Q_BLOCK)
    b.op("store", writes="LSE", reads="lse", index=Q_BLOCK)


def _scratch(b: Builder) -> None:
    b.op("store", writes="Otmp", reads="O", index=Q_BLOCK)
    b.op("store", writes="l", reads="l", index=Q_BLOCK)
    b.op("store", writes="m", reads="m", index=Q_BLOCK)


def _tensors(attention: Attention, block_q: int, block_kv: int) -> dict[str, Tensor]:
    """Q, K, V, O, LSE, and the fp32 scratch that O, l and m wait in between K/V blocks."""
    tensors = qkv_tensors(attention, block_q, block_kv, attention.dtype_bytes)
    for name, cols in zip(SCRATCH, (attention.head_dim_v, 1, 1), strict=True):
        tensors[name] = replace(tensors["O"], name=name, cols=cols, bytes_per_element=4, vector=name != "Otmp")
    return tensors


def _buffers(b: Builder, e: int, block_q: int, block_kv: int, d: int, warps: int) -> None:
    b.smem("Qs", rows=block_q, cols=d, bytes_per_element=e)
    b.smem("KVs", rows=block_kv, cols=d, bytes_per_element=e)  # K, then V: one buffer, since both end in registers
    b.smem("exchange", rows=block_q * warps, cols=d, bytes_per_element=4)
    b.registers_tile("Qnext", rows=block_q, cols=d, bytes_per_element=e)
    b.registers_tile("Kr", rows=block_kv, cols=d, bytes_per_element=e)
    b.registers_tile("Vr", rows=block_kv, cols=d, bytes_per_element=e)
    b.registers_tile("Kf", rows=block_kv, cols=d, bytes_per_element=e)
    b.registers_tile("Vf", rows=block_kv, cols=d, bytes_per_element=e)
    b.registers_tile("S", rows=block_q, cols=block_kv)
    b.registers_tile("P", rows=block_q, cols=block_kv, bytes_per_element=e)
    b.registers_tile("Oout", rows=block_q, cols=d, bytes_per_element=e)
    for name in ("O", "O_part", "O_new"):
        b.registers_tile(name, rows=block_q, cols=d)
    for name in ("l", "m", "l_next", "m_next", "lse"):
        b.registers_tile(name, rows=block_q, cols=1)


def _load_kv(b: Builder, shift: int, inputs: Mapping[str, str]) -> None:
    """A K/V block enters through registers and, V first, through the same shared memory; its fragments then stay in registers.
    The first Q block and its l and m come along."""
    first = Index(arg="n_q", const=-1)
    block = Index(loop="j", const=shift)
    for tile, tensor, index in (("Kr", "K", block), ("Qnext", "Q", first), ("Vr", "V", block)):
        b.op("load", writes=tile, reads=inputs.get(tensor, tensor), index=index, scoreboard=TILES)
    if shift:
        b.op("barrier")
        for tile, tensor in (("l_next", "l"), ("m_next", "m")):
            b.op("load", writes=tile, reads=tensor, index=first, scoreboard=ROWS)
    b.op("wait_load", scoreboard=TILES)
    b.op("to_smem", writes="Qs", reads="Qnext")
    b.op("to_smem", writes="KVs", reads="Vr")
    b.op("barrier")
    b.op("fragments", writes="Vf", reads="KVs")
    b.op("barrier")
    b.op("to_smem", writes="KVs", reads="Kr")
    b.op("barrier")
    b.op("fragments", writes="Kf", reads="KVs")
    if shift:
        b.op("wait_load", scoreboard=ROWS)
