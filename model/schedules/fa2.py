"""FlashAttention-2 forward: one CTA a Q block, warps split Q, K and V single-buffered through cp.async, mma.sync.

Dao 2023 (arXiv 2307.08691), algorithm 1 and section 3. Q-block parallelism fills the chip when batch x heads is small; warps own
rows, so no warp waits for another's partial sums; O stays unscaled until the end (one divide per row), LSE alone is saved. Each
of the three is a switch: without it the kernel does what FA1's did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..attention import Attention
from ..gpu import GPU
from ..placement import Parts
from ..profiles import TYPICAL, USUAL, LoopCounts, Start, Usual, loop_counts
from ..program import Index, Program, Tiles
from ..schedule import Builder
from ..tiling import Footprint, occupancy
from .fa2_tiles import MOST_REGISTERS, Demand, FA2Tile, demand, grid, l1_holds, tile
from .grid import ceil_div, head_grid, qkv_tensors

NAME = "fa2_fwd"
#: Compiled kernels, and whose usual loop stands in where one was not read.
BUILDS = {"pytorch": "pytorch", "flash-attn": "flash-attn", "flash-attn-2.0": "flash-attn"}
SPLITS = ("q", "k")


@dataclass(frozen=True, kw_only=True)
class FA2:
    """Switches: the tile (``block_q`` x ``block_kv``, None: the released table), ``warps``, ``split`` (warps own rows: "q", or
    keys, as FA1's: "k"), ``sequence_parallel`` (a CTA a Q block; without it one a batch x head), ``deferred_divide`` (O is
    divided by its row sums once, at the end; without it in every block), and whose instruction counts to use.

    ``counts="binary"`` takes the compiled kernel's counts, or a compiler's usual overhead for loops that were not read;
    ``"ideal"`` takes the algorithm's own.
    """

    block_q: int | None = None
    block_kv: int | None = None
    warps: int | None = None
    split: str = "q"
    sequence_parallel: bool = True
    deferred_divide: bool = True
    registers: int | None = None
    counts: str = "binary"
    #: Whose compiled kernel: "pytorch" (in PyTorch 2.11, without fast math), "flash-attn" (the package, with it) or
    #: "flash-attn-2.0" (its first release, by the compiler of the time).
    build: str = "pytorch"

    @property
    def name(self) -> str:
        return "fa2"

    def tile(self, gpu: GPU, attention: Attention) -> FA2Tile:
        return tile(self, gpu.architecture, attention)

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        check_forward("fa2", attention)
        check_counts("fa2", self.counts, ("binary", "ideal"))
        for field, value, allowed in (("build", self.build, BUILDS), ("split", self.split, SPLITS)):
            if value not in allowed:
                raise ValueError(f"fa2 has {field}={value!r}; it must be one of {', '.join(allowed)}: change {field}")
        t = self.tile(gpu, attention)
        profile, needs = _binary(self, gpu.architecture, t)
        registers = self.registers or (profile.registers if profile else demand(t).registers)
        frame = profile.frame_bytes if profile else needs.frame_bytes
        b = Builder(name=NAME, warps=t.warps, registers=registers)
        _buffers(b, t, attention.dtype_bytes)
        cta = Footprint(name=NAME, warps=t.warps, registers=registers, smem_bytes=b.smem_bytes)
        far = frame > 0 and not l1_holds(gpu, cta, frame)
        program = _kernel(replace(self, registers=None), gpu.architecture, attention, far)
        program = replace(program, roles=tuple(replace(role, registers=registers) for role in program.roles))
        first = int(gpu.sm.count) * occupancy(gpu, program).ctas_per_sm
        return (replace(program, tiles=_with_waves(program.tiles, first=first)),)


@lru_cache(maxsize=8)  # neighbours of a sweep
def _kernel(schedule: FA2, architecture: str, attention: Attention, far: bool) -> Program:
    """What the warps run, which their number of registers does not change. ``far``: what is spilled comes back from L2."""
    t = tile(schedule, architecture, attention)
    profile, needs = _binary(schedule, architecture, t)
    b = Builder(name=NAME, warps=t.warps, registers=MOST_REGISTERS)
    _buffers(b, t, attention.dtype_bytes)
    step = _Step(b, t, schedule, profile, needs, far=far)
    if profile and profile.start:
        start(b, profile.start)
    tiles = _with_waves((grid if schedule.sequence_parallel else head_grid)(attention, t.block_q, t.block_kv))
    if schedule.sequence_parallel:
        _q_block(step, attention, masked=int(tiles.column("n_masked").max()))
    else:
        _head(step, attention)
    return b.build(
        tensors=tuple(qkv_tensors(attention, t.block_q, t.block_kv, attention.dtype_bytes).values()),
        tiles=tiles,
        profile=profile.label if profile else TYPICAL[BUILDS[schedule.build]] if schedule.counts == "binary" else "ideal",
        local_bytes=t.warps * (profile.local_bytes if profile else 32 * needs.frame_bytes),
    )


def _binary(schedule: FA2, architecture: str, t: FA2Tile) -> tuple[LoopCounts | None, Demand]:
    """Counts of the compiled loop, where this is the loop that was compiled, and what a compiler would have to spill."""
    if schedule.counts != "binary":
        return None, Demand()
    if t.split_k or not schedule.deferred_divide:
        return None, demand(t)
    return loop_counts("fa2", architecture, t.head_dim, t.block_q, t.block_kv, t.warps, schedule.build), demand(t)


def _with_waves(tiles: Tiles, first: int = 0) -> Tiles:
    """Tiles with the argument ``later``: 0 for those of the ``first`` CTAs, which start together, 1 for the others."""
    later = (np.arange(len(tiles)) >= first).astype(np.int64)
    known = "later" in tiles.names
    kept = tiles.values[:, :-1] if known else tiles.values
    return Tiles(names=tiles.names if known else (*tiles.names, "later"), values=np.column_stack((kept, later)))


def start(b: Builder, counts: Start) -> None:
    """What a CTA does before its first load. The SM has read the kernel's arguments already where a CTA takes another's place."""
    parts = counts.argument_lines + 1
    for i in range(parts):
        if i:
            with b.when(Index(arg="later", arg_coef=-1)):
                b.op("start_code", instructions=0, stall_cycles=0, argument_lines=1)
        n, stall = ((i + 1) * all_ // parts - i * all_ // parts for all_ in (counts.instructions, counts.stall_cycles))
        b.op("start_code", instructions=n, stall_cycles=stall)


def _buffers(b: Builder, t: FA2Tile, e: int) -> None:
    b.smem("Qs", rows=t.block_q, cols=t.head_dim, bytes_per_element=e)
    b.smem("Ks", rows=t.block_kv, cols=t.head_dim, bytes_per_element=e)
    b.smem("Vs", rows=t.block_kv, cols=t.head_dim, bytes_per_element=e)
    b.registers_tile("S", rows=t.block_q, cols=t.block_kv)
    b.registers_tile("P", rows=t.block_q, cols=t.block_kv, bytes_per_element=e)
    b.registers_tile("Oacc", rows=t.block_q, cols=t.head_dim)
    if t.split_k:  # the warps' partial sums, one warp's at a time
        b.smem("exchange", rows=t.block_q * t.warps, cols=t.head_dim, bytes_per_element=4)
        b.registers_tile("O_part", rows=t.block_q, cols=t.head_dim)
    b.registers_tile("Oout", rows=t.block_q, cols=t.head_dim, bytes_per_element=e)
    b.registers_tile("LSEout", rows=t.block_q, cols=1)


def epilogue(b: Builder, *, block: Index | None = None, like: str | None = "S", divided: bool = False) -> None:
    """The deferred divide, then O through shared memory for whole-row stores, and LSE.

    ``block``: the Q block that is stored. ``like``: the tile whose row sums are still spread over the threads that share a row,
    None where they are whole. ``divided``: O has been divided already.
    """
    at = block or Index(arg="q_block")
    if like:
        b.op("quad_sum", like=like)
    if divided:
        b.op("log_sum", writes="LSEout", reads=("l", "m"))
    else:
        b.op("divide", writes=("Oacc", "LSEout"), reads=("l", "m"))
    b.op("convert", writes="Oout", reads="Oacc")
    b.op("to_smem", writes="Oout.smem", reads="Oout")
    b.op("barrier")
    b.op("from_smem", writes="Oout", reads="Oout")
    b.op("store", writes="O", reads="Oout", index=at)
    b.op("store", writes="LSE", reads="LSEout", index=at)


def check_forward(name: str, attention: Attention) -> None:
    """Refuse what a 16-bit forward schedule cannot run, in a sentence."""
    if attention.pass_ != "fwd":
        raise ValueError(f"{name} has a forward schedule only, got pass {attention.pass_!r}: choose --pass fwd")
    if attention.dtype not in ("bf16", "fp16"):
        raise ValueError(f"{name} runs bf16 or fp16, got dtype {attention.dtype!r}: change dtype")


def check_counts(name: str, counts: str, allowed: tuple[str, ...]) -> None:
    if counts not in allowed:
        raise ValueError(f"{name} has counts={counts!r}; it must be one of {', '.join(allowed)}")


class _Step:
    """The pieces of a CTA's work: a Q block begins, meets K/V blocks, ends. ``far``: what is spilled comes back from L2."""

    def __init__(
        self, b: Builder, t: FA2Tile, schedule: FA2, profile: LoopCounts | None, needs: Demand, *, far: bool
    ) -> None:
        self.b, self.t, self.deferred, self.far, self.profile = b, t, schedule.deferred_divide, far, profile
        self.spills = (0, 0) if profile else (needs.under_scores, needs.under_softmax)  # a binary's parts hold what it spills
        self.parts: Parts | Usual | None = USUAL[BUILDS[schedule.build]] if schedule.counts == "binary" else None
        if profile:
            self.parts = self._spilling(profile.parts)

    def begin(self, q: Index, *, first: Index, seen: Index) -> None:
        """The Q block, and (where ``seen`` >= 0) the first of its K blocks, on their way."""
        b, rows = self.b, self.t.block_q
        b.op("zero", writes="Oacc", shape=(rows, self.t.head_dim))
        b.op("zero", writes="m", shape=(rows,), value=-np.inf)
        b.op("zero", writes="l", shape=(rows,))
        started = self.profile is not None and self.profile.start is not None  # it holds all before the first commit
        if not started:
            with self._counted("setup"):
                b.op("setup")
        with nullcontext() if started else self._counted("loads"):
            b.op("load_async", writes="Qs", reads="Q", index=q)
            with b.when(seen):
                b.op("load_async", writes="Ks", reads="K", index=first)
            b.op("commit")

    @contextmanager
    def loop(self, trips: Index) -> Iterator[None]:
        """K/V blocks, with what the compiled loop issues, and where."""
        with self.b.loop("i", trips), self.b.placed(self.parts):
            yield

    def apart(self, number: int, *, causal: bool) -> AbstractContextManager[None]:
        """The ``number``-th of the K/V blocks that stand before the loop, with what the binary issues there."""
        own = self.profile
        if own and own.masked and causal:
            return self.b.placed(self._spilling(own.masked[min(number, len(own.masked) - 1)]), masks=True)
        return self.b.placed(self._spilling(own.first) if own and own.first and number == 0 else self.parts)

    def block(
        self, j: Index, *, following: Index, needed: tuple[Index, ...], masks: tuple[Index | None, ...], q: Index,
        first: bool = False,
    ) -> None:  # fmt: skip
        """One K/V block: V loads under Q K^T, the next K (where all of ``needed`` are >= 0) under softmax and P V.

        ``masks``: where each is >= 0 (None: everywhere) the block is masked. ``first``: O and l are still zero.
        """
        b = self.b
        split: dict[str, Any] = {"split": "cols"} if self.t.split_k else {}
        b.op("wait_group", arg=0)
        b.op("barrier")
        b.op("load_async", writes="Vs", reads="V", index=j)
        b.op("commit")
        self._spill(0)
        b.op("mma", writes="S", reads=("Qs", "Ks"), transpose_b=True, **split)
        self._refill(0)
        for where in masks:
            with b.when(where) if where else nullcontext():
                rows: dict[str, Any] = {} if q.arg else {"q_index": q}
                b.op("mask", writes="S", index=j, **rows)
        b.op("wait_group", arg=0)
        b.op("barrier")
        with ExitStack() as stack:
            for where in needed:
                stack.enter_context(b.when(where))
            b.op("load_async", writes="Ks", reads="K", index=following)
            b.op("commit")
        self._softmax(first=first)
        self._values()

    def end(self, q: Index) -> None:
        whole = self.t.split_k or not self.deferred
        with self._counted("epilogue"):
            epilogue(self.b, block=q, like=None if whole else "S", divided=not self.deferred)

    @contextmanager
    def _counted(self, part: str) -> Iterator[None]:
        """A stretch outside the loop, with what the binary issues there."""
        counts = dict(getattr(self.profile, part)) if self.profile else None
        with self.b.phase(counts=counts, stall_cycles=counts.pop("stall") if counts else None):
            yield

    # --- pieces of a block ---

    def _spilling(self, parts: Sequence[Mapping[str, float]]) -> Parts:
        """A binary's parts, with what is spilled loaded from where it is."""
        return [{"ldl_far" if self.far and c == "ldl" else c: n for c, n in p.items()} for p in parts]

    def _softmax(self, *, first: bool) -> None:
        b, t = self.b, self.t
        split: dict[str, Any] = {"split": "cols"} if t.split_k else {}
        if t.split_k:
            b.op("row_max", writes="m_part", reads="S", parts=t.warps, **split)
            b.op("cross_warp", writes=("m", "m_old"), reads="m_part", combine="max", like="S", **split)
        else:
            b.op("row_max", writes=("m", "m_old"), reads="S")
        undo: dict[str, Any] = {} if self.deferred else {"divided": True}
        with b.interleaved():
            if not first:
                b.op("rescale", writes=("Oacc", "l"), reads=("m", "m_old"), **undo)
            self._spill(1)
            b.op("exp2", writes="S", reads=("S", "m"), **split)
            if t.split_k:
                b.op("row_sum", writes="l_part", reads="S", parts=t.warps, **split)
            else:
                b.op("row_sum", writes="l", reads="S")
            b.op("convert", writes="P", reads="S")
        if t.split_k or not self.deferred:
            b.op("quad_sum", like="S", **split)
        if t.split_k:
            b.op("cross_warp", writes=("l", "l_old"), reads="l_part", combine="sum", like="S", barrier=False, **split)

    def _values(self) -> None:
        b, t = self.b, self.t
        self._refill(1)
        if t.split_k:
            b.op("mma", writes="O_part", reads=("P", "Vs"), split="k", parts=t.warps)
            b.op("cross_warp_tile", writes="Oacc", reads="O_part", accumulate=True)
        else:
            b.op("mma", writes="Oacc", reads=("P", "Vs"), accumulate=True)
        if not self.deferred:
            b.op("divide_rows", writes="Oacc", reads="l")

    def _spill(self, point: int) -> None:
        if self.spills[point]:
            self.b.op("spill", reads="Oacc", registers=self.spills[point])

    def _refill(self, point: int) -> None:
        if self.spills[point]:
            attrs: dict[str, Any] = {"registers": self.spills[point], **({"far": True} if self.far else {})}
            self.b.op("refill", writes="Oacc", **attrs)


def _q_block(step: _Step, attention: Attention, masked: int) -> None:
    """A CTA's one Q block, against its K/V blocks from the last to the first. ``masked``: how many of them need a mask, at most.

    The code of the first ones stands apart, a copy for each of as many as can need a mask, and at least one (the source's
    ``n_masking_steps``, unrolled); the others are a loop.
    """
    q, last, t = Index(arg="q_block"), Index(arg="n_blocks", const=-1), step.t
    whole = attention.seqlen_q % t.block_q == attention.seqlen_kv % t.block_kv == 0
    apart = max(masked, ceil_div(t.block_q, t.block_kv) + (not whole) if attention.causal else 1)
    if attention.causal and step.profile:
        apart = max(apart, len(step.profile.masked))
    masks = (None,) if masked else ()
    step.begin(q, first=last, seen=last)
    for before in range(apart):
        this = replace(last, const=-1 - before)
        following = replace(this, const=this.const - 1)
        with step.b.when(this), step.apart(before, causal=attention.causal):
            step.block(this, following=following, needed=(following,), masks=masks, q=q, first=before == 0)
    with step.loop(replace(last, const=-apart)):
        following = Index(arg="n_blocks", const=-apart - 2, loop="i", coef=-1)
        step.block(replace(following, const=-apart - 1), following=following, needed=(following,), masks=(), q=q)
    step.end(q)


def _head(step: _Step, attention: Attention) -> None:
    """A CTA's batch x head: its Q blocks one after the other, each against the K/V blocks it sees from the first to the last."""
    b, t, q = step.b, step.t, Index(loop="q")
    offset = attention.seqlen_kv - attention.seqlen_q
    #: >= 0 where the Q block's last row sees the first key of K/V block 0, of block i, of block i + 1.
    first = Index(const=offset + t.block_q - 1, loop="q", coef=t.block_q)
    this = replace(first, loop="i", coef=-t.block_kv, outer="q", outer_coef=t.block_q)
    after = replace(this, const=this.const - t.block_kv)
    #: >= 0 where block i's last key lies beyond what the Q block's first row sees.
    diagonal = Index(const=t.block_kv - 2 - offset, loop="i", coef=t.block_kv, outer="q", outer_coef=-t.block_q)
    more = Index(arg="n_kv", const=-2, loop="i", coef=-1)
    masks = [diagonal] if attention.causal else []
    if attention.seqlen_kv % t.block_kv:
        masks.append(Index(arg="n_kv", arg_coef=-1, const=1, loop="i"))
    with b.loop("q", Index(arg="n_q")):
        b.op("wait_group", arg=0)  # a Q block that no key met has not been waited for
        b.op("barrier")  # and every warp has read the one before
        step.begin(q, first=Index(), seen=first if attention.causal else Index())
        with step.loop(Index(arg="n_kv")), b.when(this) if attention.causal else nullcontext():
            needed = (more, after) if attention.causal else (more,)
            step.block(Index(loop="i"), following=Index(const=1, loop="i"), needed=needed, masks=tuple(masks), q=q)
        step.end(q)
