"""A faster unit in Blackwell's pipelines: it pays in long tiles, and costs nothing where there is no order to lose."""

from __future__ import annotations

from typing import Any

import pytest
from engine_jobs import halved, job_of

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import PIPES
from flashsim.model.schedules import get_schedule
from flashsim.sim import fast_engine
from flashsim.sim.engine import FIRST_PIPE, PORT, SMEM, TMEM

#: Tiles of two blocks of 128 keys, one of them masked.
SHAPE: dict[str, Any] = {
    "batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 100, "seqlen_kv": 140, "head_dim": 32, "causal": True,
}  # fmt: skip


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_faster_loads_of_tensor_memory_pay_in_long_tiles(head_dim: int) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=2048, head_dim=head_dim)
    (program,) = get_schedule("gluon").lower(load_gpu("b200"), attention)
    job = job_of(program, "b200", tiles=2)
    assert fast_engine.run(halved(job, FIRST_PIPE + TMEM)).ticks < 0.98 * fast_engine.run(job).ticks


@pytest.mark.parametrize("column", [PORT, *range(FIRST_PIPE, FIRST_PIPE + len(PIPES)), SMEM])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_one_warpgroup_has_no_order_to_lose(column: int, head_dim: int) -> None:
    """Gluon's work on one Q tile at a time: all exponentials on the MUFU, O rescaled in every block."""
    fields = {"q_stages": 1, "exp2_emulation": 0.0, "rescale_rate": 1.0, "rescale_threshold": 0.0}
    attention = Attention(**{**SHAPE, "head_dim": head_dim})
    (program,) = get_schedule("fa4", **fields).lower(load_gpu("b200"), attention)
    job = job_of(program, "b200")
    assert fast_engine.run(halved(job, column)).ticks <= 1.003 * fast_engine.run(job).ticks
