"""What a prediction takes for granted, in sentences that go with its result."""

from __future__ import annotations

from .attention import Attention
from .gpu import GPU
from .schedule import Schedule

#: Query rows up to which libraries take another kernel than that of a prefill: half a tile.
FEW_QUERIES = 64
#: Bytes that cp.async and TMA move at least; a row of a tensor is a multiple of it.
COPY_BYTES = 16


def assumptions(schedule: Schedule, gpu: GPU, attention: Attention | None = None) -> tuple[str, ...]:
    """What a prediction takes for granted, in sentences: of the schedule what nobody has read or measured (its member
    ``assumption`` says it), of the problem, where there is one, what a library would do otherwise."""
    out = [schedule.assumption(gpu)] if hasattr(schedule, "assumption") else []
    if attention is None:
        return tuple(out)
    if attention.seqlen_q <= FEW_QUERIES and attention.seqlen_kv > attention.seqlen_q:
        out.append(
            f"for so few query rows ({attention.seqlen_q}) libraries split keys over CTAs and pack the query heads of a K/V head"
            f" into one tile; neither is modelled: this is {schedule.name}'s prefill kernel, not their decode"
        )
    odd = [d for d in (attention.head_dim, attention.head_dim_v) if d * attention.dtype_bytes % COPY_BYTES]
    if odd:
        step = COPY_BYTES // attention.dtype_bytes
        out.append(
            f"rows of {odd[0]} columns are no multiple of {COPY_BYTES} bytes, which copies move: libraries pad them to"
            f" {-(-odd[0] // step) * step}, and that is what a measurement is of"
        )
    return tuple(out)
