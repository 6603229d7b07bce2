"""Gluon's attention kernel for Blackwell (triton-lang/triton, python/examples/gluon/01-attention-forward.py), forward.

FA4's pipeline in the hands of Triton's compiler: the same roles, tiles, order of products and places in tensor memory, without
what the FA4 paper added. All exponentials run on the MUFU, the correction warps rescale O in every block, in halves of a row and
without a vote, and P is handed over whole. All tiles run persistent, causal ones in order of rows for a few heads at a time, so
that the longest come last. Its loop goes through K/V blocks forwards; here it goes backwards, as FA4's, at the same cost.
Its binary was not read: where FA4's was, its instruction counts for the same rows stand in, with all exponentials on the MUFU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..attention import Attention
from ..gpu import GPU
from ..program import Program
from .fa2 import check_counts
from .fa4 import FA4, read_profile, write
from .fa4_tiles import check, tile

ASSUMED = "assumed: FA4's instruction counts ({})"
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
        try:
            check(gpu, attention)
            like = FA4(exp2_emulation=0.0, rescale_rate=1.0, rescale_threshold=0.0, cta_pair=bool(self.cta_pair), q_stages=2,
                       kv_stages=self.kv_stages)  # fmt: skip
            t = tile(like, gpu, attention)
        except ValueError as error:
            raise ValueError(str(error).replace("fa4", self.name, 1)) from None
        if attention.head_dim != attention.head_dim_v:
            raise ValueError(
                f"gluon runs equal head dimensions, got head_dim {attention.head_dim} and head_dim_v {attention.head_dim_v}:"
                " change head_dim_v"
            )
        check_counts("gluon", self.counts, ("typical", "ideal"))
        profile = read_profile(gpu, t) if self.counts == "typical" else None
        heads = 1 if not attention.causal else SHORT_HEADS if attention.seqlen_q <= LONG else LONG_HEADS
        own = replace(t, registers=REGISTERS, persistent=True, p_in_parts=False, asked=False, heads_together=heads)
        program = write(gpu, attention, own, dict(profile) | {"registers": REGISTERS} if profile else None, name="gluon_fwd")
        return (replace(program, profile=ASSUMED.format(program.profile)) if profile else program,)
