"""Units are held for longer than their instructions' own cycles where products run beside them, and nowhere else."""

from __future__ import annotations

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import get_schedule
from flashsim.sim.held import held
from flashsim.sim.predict import simulate

SHAPE = Attention(batch=2, heads_q=8, seqlen_q=1024, head_dim=128)


def test_softmax_beside_warpgroup_products_holds_the_port_for_longer() -> None:
    result = simulate(get_schedule("fa3"), load_gpu("h100"), SHAPE)
    longer = {name: share / result.units[name] for name, share in held(result).items()}
    assert longer["port"] > 2  # the mix's 14.5 cycles an element for its 8.6, on a port that its own instructions fill by less
    assert longer["alu"] > 1.4  # 4 cycles in place of 2, for the part beside products
    assert 1 < longer["mufu"] < 4 / 3  # at most 10.7 cycles in place of 8
    assert longer["tensor"] == pytest.approx(1, abs=0.02)
    assert longer["l2"] == longer["hbm"] == 1


@pytest.mark.parametrize(("name", "chip"), [("fa2", "h100"), ("standard", "a100-40gb"), ("fa1", "a100-40gb")])
def test_mma_sync_slows_nothing_beside_it(name: str, chip: str) -> None:
    result = simulate(get_schedule(name), load_gpu(chip), SHAPE)
    assert held(result) == pytest.approx(result.units, rel=1e-6)
