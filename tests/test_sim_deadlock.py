"""A CTA whose warps wait for one that never comes is reported, not returned as a finished run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Opcode
from flashsim.model.schedules import get_schedule
from flashsim.sim.predict import ENGINES, simulate


@pytest.mark.parametrize("engine", ENGINES)
def test_a_warp_that_skips_a_barrier_leaves_the_others_waiting(engine: str) -> None:
    result = simulate(get_schedule("fa2"), load_gpu("h200"), Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=64))
    barrier = [int(Opcode.BARRIER), -1, 0, 0, 0, -1, -1, -1, 0]
    leave = [int(Opcode.EXIT), -1, 0, -1, 0, -1, -1, -1, 0]
    code = np.array([barrier, leave], np.int64)
    job = replace(result.launches[0].job, code=code, warp_start=np.array([0, 0, 0, 1], np.int64))
    with pytest.raises(RuntimeError, match=r"deadlock at tick 0: no event is left and .* not ended"):
        ENGINES[engine](job)
