"""Gluon's attention kernel for Blackwell (triton-lang/triton, python/examples/gluon/01-attention-forward.py), forward.

FA4's pipeline in the hands of Triton's compiler: the same roles, tiles, order of products and places in tensor memory, without
what the FA4 paper added. All exponentials run on the MUFU, the correction warps rescale O in every block, in halves of a row and
without a vote, and P is handed over whole. All tiles run persistent, causal ones in order of rows for a few heads at a time, so
that the longest come last. Its loop goes through K/V blocks forwards; here it goes backwards, as FA4's, at the same cost.
Its binary was not read: where FA4's was, its instruction counts for the same rows stand in, with all exponentials on the MUFU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..attention import Attention
from ..gpu import GPU
from ..program import Program
from .fa2 import check_counts
from .fa4 import FA4, read_profile, write
from .fa4_tiles import FA4Tile, check, tile

ASSUMED = "assumed: FA4's instruction counts ({})"
#: Both head dimensions are padded to one of these.
HEAD_DIMS = (32, 64, 128)
#: Registers of softmax, correction and the other warps: what warp_specialize asks for, and what that leaves of 16 warps of 128.
REGISTERS = (192, 104, 24)
#: Heads whose tiles take turns: all of one after the other, but causal ones eight or, beyond this length, four at a time.
LONG, LONG_HEADS, SHORT_HEADS = 2048, 4, 8


@dataclass(frozen=True, kw_only=True)
class Gluon:
    """``cta_pair``: products of CTA pairs (later versions of the kernel, non-causal; None: no), ``kv_stages`` (None: what fits),
    ``counts``: "typical" takes FA4's instructions, "ideal" the algorithm's own."""

    cta_pair: bool | None = None
    kv_stages: int | None = None
    counts: str = "typical"

    @property
    def name(self) -> str:
        return "gluon"

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        if gpu.tcgen05 is None or gpu.tmem is None:
            raise ValueError(f"gluon keeps S and O in TMEM; {gpu.name} has none: choose triton, or gpu b200")
        need = max(attention.head_dim, attention.head_dim_v)
        if need > HEAD_DIMS[-1]:
            raise ValueError(f"gluon has no tile for head_dim {need}; the largest is {HEAD_DIMS[-1]}: reduce head_dim")
        check_counts("gluon", self.counts, ("typical", "ideal"))
        t = self._tile(gpu, attention, min(size for size in HEAD_DIMS if size >= need))
        profile = read_profile(gpu, t) if self.counts == "typical" else None
        profile = dict(profile) | {"registers": REGISTERS} if profile else None
        program = write(gpu, attention, t, profile, name="gluon_fwd")
        return (replace(program, profile=ASSUMED.format(program.profile)) if profile else program,)

    def _tile(self, gpu: GPU, attention: Attention, head_dim: int) -> FA4Tile:
        like = FA4(exp2_emulation=0.0, rescale_rate=1.0, rescale_threshold=0.0, q_stages=2, cta_pair=bool(self.cta_pair),
                   kv_stages=self.kv_stages)  # fmt: skip
        try:
            check(gpu, attention)
            t = tile(like, gpu, replace(attention, head_dim=head_dim, head_dim_v=head_dim))
        except ValueError as error:
            raise ValueError(re.sub(r"^fa4\b", self.name, str(error))) from None
        heads = 1 if not attention.causal else SHORT_HEADS if attention.seqlen_q <= LONG else LONG_HEADS
        return replace(t, registers=REGISTERS, persistent=True, p_in_parts=False, asked=False, heads_together=heads)
