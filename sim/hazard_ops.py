"""What each op does to a CTA's memory: one row an op kind, read by :mod:`.hazards`.

A row says which part of each operand the op touches, who touches it (the warp itself, or something the warp starts and that
ends later), through which proxy, and which step of ordering it takes. A new op is one row; the row of an op that ends later
names the agent, and the agent names what waits for it:

=============  =======================================  ==============================================
agent          what it is                               what tells a warp that it is done
=============  =======================================  ==============================================
``warp``       the warp itself, in program order        the warp's next arrival at a barrier
``mma``        products in flight (wgmma, tcgen05)      ``mma_wait`` over their group, or an arrival with ``products``
``cp_async``   cp.async of the warp                     ``wait_group`` over their group, then a barrier
``bulk``       TMA stores of the warp                   ``wait="read"`` on the store, or ``store_wait``
``mbarrier``   a TMA load                               the mbarrier phase that counts its bytes
=============  =======================================  ==============================================

Sources: PTX ISA 8.x, sections on async proxy, mbarrier, wgmma, cp.async.bulk and tcgen05; CUTLASS's pipelines for idioms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

# How much of a tile one warp touches. Two warps of a role never meet in ROWS, nor in SHARE by the same kind of op.
ROWS = "rows"  # the rows that the warp owns: registers, accumulators, operand A
SHARE = "share"  # a part of its own, cut by the op (not by rows)
WHOLE = "whole"  # all of it: operand B, bulk copies
OUTSIDE = "outside"  # global memory, not the CTA's

WARP, MMA, CP_ASYNC, BULK, MBARRIER = "warp", "mma", "cp_async", "bulk", "mbarrier"
#: Agents whose accesses happen in the order in which their warp issued them.
IN_ORDER = (WARP, MMA)

GENERIC, ASYNC = "generic", "async"


@dataclass(frozen=True, kw_only=True)
class Effect:
    """One row. ``reads`` and ``writes``: part of each operand, the last for all that follow. ``step``: a method of the
    checker's machine. ``from_smem``: an operand that is named by its registers stands for their copy in shared memory.
    ``share``: whose columns a statement's ``share`` is a share of: all "tiles", or operand "a" (a product's k-steps)."""

    reads: tuple[str, ...] = (ROWS,)
    writes: tuple[str, ...] = (ROWS,)
    agent: str = WARP
    proxy: str = GENERIC
    step: str = ""
    from_smem: bool = False
    share: str = ""


#: By the warp itself, in order, each warp on its own rows: softmax, conversion, masks.
VECTOR = Effect()

_IN_ORDER = (
    "wait_load", "move", "column", "zero", "mask", "row_max", "exp2", "row_sum", "quad_sum", "rescale", "row_scale", "scale_rows",
    "convert",
    "divide", "divide_rows", "merge", "log_sum", "spill", "refill", "lane_max", "lane_masked_max", "lane_factor", "lane_exp2",
    "lane_sum", "lane_pack", "lane_divide", "vote_scale", "tmem_load",
)  # fmt: skip

_PRODUCT = Effect(reads=(ROWS, WHOLE), agent=MMA, proxy=ASYNC, share="a")

_ROWS: dict[str, Effect] = {
    # moves
    "load": Effect(reads=(OUTSIDE,), writes=(SHARE,)),
    "store": Effect(writes=(OUTSIDE,)),
    "load_async": Effect(reads=(OUTSIDE,), writes=(SHARE,), agent=CP_ASYNC),
    "tma_load": Effect(reads=(OUTSIDE,), writes=(SHARE,), agent=MBARRIER, proxy=ASYNC, step="deliver"),
    "tma_store": Effect(reads=(WHOLE,), writes=(OUTSIDE,), agent=BULK, proxy=ASYNC, step="posted", from_smem=True),
    "to_smem": Effect(writes=(SHARE,)),
    "from_smem": Effect(reads=(SHARE,), from_smem=True),
    "fragments": Effect(reads=(SHARE,)),
    "stmatrix": Effect(writes=(ROWS,)),
    "tmem_store": Effect(share="tiles"),
    "tmem_alloc": Effect(step="allocate"),
    "tmem_free": Effect(),
    "transpose": Effect(reads=(SHARE,), writes=(SHARE,)),
    "cross_warp": Effect(step="exchange"),
    "cross_warp_tile": Effect(step="exchange"),
    # products
    "mma": Effect(reads=(ROWS, WHOLE)),
    "wgmma": _PRODUCT,
    "umma": replace(_PRODUCT, reads=(WHOLE,), writes=(WHOLE,)),
    # order
    "commit": Effect(step="close", agent=CP_ASYNC),
    "wait_group": Effect(step="drain", agent=CP_ASYNC),
    "mma_commit": Effect(step="close", agent=MMA),
    "mma_wait": Effect(step="drain", agent=MMA),
    "store_wait": Effect(step="drain", agent=BULK),
    "barrier": Effect(step="sync"),
    "named_sync": Effect(step="sync"),
    "named_arrive": Effect(step="announce"),
    "mbarrier_expect": Effect(step="expect"),
    "mbarrier_arrive": Effect(step="arrive"),
    "mbarrier_wait": Effect(step="wait"),
    "fence_async": Effect(step="fence"),
    "advance": Effect(step="advance"),
    "tile": Effect(),
    "branch": Effect(),
    "start_code": Effect(),
    "loop_back": Effect(),
    "setup": Effect(),
    "setmaxnreg": Effect(),
    "cluster_sync": Effect(step="sync"),
}

#: Every kind that a Program's statements may have, but for the structure (loop, when).
EFFECTS: Mapping[str, Effect] = MappingProxyType(_ROWS | dict.fromkeys(_IN_ORDER, VECTOR))

STRUCTURE = ("loop", "end", "when", "end_when", "ending")
#: Ops that only order.
ORDERING = tuple(
    kind
    for kind, row in EFFECTS.items()
    if row.step and kind not in ("tma_load", "tma_store", "cross_warp", "cross_warp_tile", "tmem_alloc")
)


def effect(kind: str, *, split: str = "rows", space: str = "register") -> Effect:
    """The row of ``kind``; a product whose warps share columns or the reduction reads all of operand A, and an accumulator in
    tensor memory (``space`` of what is written) is cleared by the first product, which does not add.

    Raises ValueError for a kind without a row.
    """
    if kind not in EFFECTS:
        raise ValueError(f"check does not know what op {kind!r} does to memory; add a row to EFFECTS (sim/hazard_ops.py)")
    row = EFFECTS[kind]
    if kind == "zero" and space == "tmem":
        return replace(_PRODUCT, writes=(WHOLE,))
    return replace(row, reads=(WHOLE, WHOLE)) if kind == "mma" and split != "rows" else row
