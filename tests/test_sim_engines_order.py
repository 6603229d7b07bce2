"""Two warpgroups without an order between them: a faster unit may cost them what order its queue gave them, and that alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_jobs import halved, job_of

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import PIPES
from flashsim.model.program import Opcode, Program
from flashsim.model.schedules import get_schedule
from flashsim.sim import fast_engine
from flashsim.sim.engine import FIRST_PIPE, GAP, GAP_BESIDE, PORT, SMEM, TMEM, Job

#: Tiles of two blocks of 128 keys, one of them masked.
SHAPE: dict[str, Any] = {
    "batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 100, "seqlen_kv": 140, "head_dim": 32, "causal": True,
}  # fmt: skip


def held_back(job: Job, program: Program, role: str, like: Job) -> Job:
    """The same, but a role goes on from each of its loads of tensor memory only when as much time has passed as one takes in
    ``like``."""
    start = next(each.start for each in program.roles if each.name == role)
    end = start + int(np.argmax(job.code[start:, 0] == Opcode.EXIT))
    code, bundles = job.code.copy(), [*job.bundles]
    for row in code[start:end]:
        if row[0] == Opcode.ISSUE and any(name.startswith("ldtm") for name, _ in program.bundles[row[1]]):
            slow = job.bundles[row[1]].copy()
            slow[[GAP, GAP_BESIDE]] += like.bundles[row[1], FIRST_PIPE + TMEM]
            row[1] = len(bundles)
            bundles.append(slow)
    return replace(job, code=code, bundles=np.array(bundles), record_limit=0)


def test_what_faster_loads_lose_is_the_order_of_two_warpgroups() -> None:
    """Halved loads of tensor memory slow Gluon's short tiles; with the second warpgroup held back as the slow loads held it,
    they do not."""
    (program,) = get_schedule("gluon").lower(load_gpu("b200"), Attention(**SHAPE))
    job = job_of(program, "b200")
    faster = halved(job, FIRST_PIPE + TMEM)
    before, lost, ordered = (
        fast_engine.run(each).ticks for each in (job, faster, held_back(faster, program, "softmax1", like=job))
    )
    assert ordered < before < lost


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
