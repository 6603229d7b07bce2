"""The copies of an eager framework: what they move, what they issue, and that attention comes out the same."""

from __future__ import annotations

import numpy as np
import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import get_schedule
from flashsim.sim import values
from flashsim.sim.predict import Launch, simulate

A100 = load_gpu("a100-40gb")
PROBLEM = Attention(batch=2, heads_q=4, seqlen_q=1024, head_dim=64, dtype="fp16")
ELEMENTS = 2 * 4 * 1024 * 64


def launches(**fields: object) -> dict[str, Launch]:
    result = simulate(get_schedule("standard", layout="rows", **fields), A100, PROBLEM)
    return {x.program.name: x for x in result.launches}


def test_einsum_copies_q_k_and_v_and_turns_k() -> None:
    assert list(launches()) == [
        "eager_scale_k", "eager_copy_q", "eager_turn_k", "standard_qk", "standard_softmax", "eager_copy_v", "standard_pv",
    ]  # fmt: skip


def test_a_row_by_row_copy_moves_each_byte_once_and_the_turned_one_a_sector_for_each_element() -> None:
    moved = {name: x.traffic for name, x in launches().items()}
    assert moved["eager_copy_q"].by_tensor["Q@rows"][0] == 2 * ELEMENTS
    assert moved["eager_copy_q"].by_tensor["Qc@rows"][1] == 2 * ELEMENTS
    assert moved["eager_turn_k"].by_tensor["Ks@sectors"][0] == 32 * ELEMENTS
    assert moved["eager_turn_k"].by_tensor["Kt@column"][1] == 2 * ELEMENTS


@pytest.mark.parametrize(("name", "alu"), [("eager_scale_k", 16), ("eager_turn_k", 19), ("eager_copy_q", 22.75)])
def test_an_element_costs_the_offsets_of_its_dimensions(name: str, alu: float) -> None:
    issued = launches()[name].counts
    assert issued["int_alu"] == pytest.approx(alu * ELEMENTS / 32, rel=0.02)


def test_softmax_of_up_to_1024_columns_issues_what_the_compiled_kernel_does() -> None:
    rows = 2 * 4 * 1024
    binary, ideal = (launches(counts=counts)["standard_softmax"] for counts in ("binary", "ideal"))
    assert binary.counts["ex2"] + binary.counts["rcp"] + binary.counts["lg2"] == 96 * rows
    assert sum(ideal.counts.values()) < sum(n for name, n in binary.counts.items() if name != "stall") / 5
    assert binary.program.roles[0].registers == 55


def test_an_unknown_layout_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"standard has layout='x'; it must be one of heads, rows: change layout"):
        get_schedule("standard", layout="x").lower(A100, PROBLEM)


@pytest.mark.parametrize(("rows_q", "rows_kv", "head_dim"), [(40, 300, 64), (1, 1, 32), (130, 130, 96), (33, 70, 160)])
@pytest.mark.parametrize("name", ["standard", "fa1"])
def test_copied_operands_give_the_same_attention(name: str, rows_q: int, rows_kv: int, head_dim: int) -> None:
    if name == "fa1" and head_dim > 128:
        pytest.skip("fa1 has no such tile")
    problem = Attention(batch=2, heads_q=2, heads_kv=1, seqlen_q=rows_q, seqlen_kv=rows_kv, head_dim=head_dim, dtype="fp16")
    rng = np.random.default_rng(7)
    shapes = ((2, 2, rows_q, head_dim), (2, 1, rows_kv, head_dim), (2, 1, rows_kv, head_dim))
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    plain, copied = {"standard": ("heads", "rows"), "fa1": ("packed", "separate")}[name]
    outputs = [values.run(get_schedule(name, layout=each), A100, problem, q, k, v, operands="fp32") for each in (plain, copied)]
    np.testing.assert_array_equal(outputs[0]["O"], outputs[1]["O"])
