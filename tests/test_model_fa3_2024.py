"""FA3's 16-bit kernels of July 2024: values, hazards and engines, and what their code does otherwise than the released one's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from flashsim import Attention, get_schedule, load_gpu, simulate
from flashsim.model.instructions import INSTRUCTIONS
from flashsim.model.program import Program
from flashsim.model.reference import forward
from flashsim.sim.hazards import check
from flashsim.sim.values import run

H100 = load_gpu("h100")
FIRST = get_schedule("fa3", build="2024-07")


def lowered(head_dim: int = 128, causal: bool = False, rows: int = 512, **switches: Any) -> Program:
    problem = Attention(batch=1, heads_q=2, seqlen_q=rows, seqlen_kv=1024, head_dim=head_dim, causal=causal, dtype="fp16")
    (program,) = get_schedule("fa3", build="2024-07", **switches).lower(H100, problem)
    return program


def kinds(program: Program, role: str) -> list[tuple[str, Any]]:
    number = [each.name for each in program.roles].index(role)
    return [(s.kind, s.attrs.get("barrier")) for s in program.statements if s.role == number]


@pytest.mark.parametrize(
    ("head_dim", "causal", "switches"),
    [
        (64, True, {}),
        (128, False, {}),
        (128, False, {"persistent": False}),
        (128, False, {"intra_overlap": False}),
        (128, False, {"warp_specialization": False}),
        (256, False, {}),
    ],
)
def test_july_2024_is_free_of_hazards_and_right(head_dim: int, causal: bool, switches: dict[str, Any]) -> None:
    """Clusters and none, keys that do not fill their last block, tiles one after the other in a CTA."""
    schedule, rows = get_schedule("fa3", build="2024-07", **switches), 384 if head_dim == 64 else 256
    keys = rows if causal else 450
    problem = Attention(batch=1, heads_q=2, seqlen_q=rows, seqlen_kv=keys, head_dim=head_dim, causal=causal, dtype="fp16")
    assert check(schedule, H100, problem).findings == ()
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, n, head_dim)).astype(np.float32) for n in (rows, keys, keys))
    out = run(schedule, H100, problem, q, k, v, operands="fp32")
    assert np.abs(out["O"] - forward(q, k, v, causal=causal)[0]).max() <= 1e-5 * np.abs(v).max()


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
def test_both_engines_take_july_2024_for_equally_long(head_dim: int, causal: bool) -> None:
    problem = Attention(batch=1, heads_q=4, seqlen_q=768, head_dim=head_dim, causal=causal, dtype="fp16")
    fast, simpy = (simulate(FIRST, H100, problem, engine=engine).cycles for engine in ("fast", "simpy"))
    assert fast == simpy


@pytest.mark.parametrize(("head_dim", "steps"), [(64, 2), (128, 1)])
def test_as_many_blocks_are_masked_as_a_tile_is_wide_whether_needed_or_not(head_dim: int, steps: int) -> None:
    """Beside the first one; the released kernel masks only those that the diagonal crosses."""
    rows = 576 if head_dim == 64 else 512
    problem = Attention(batch=1, heads_q=1, seqlen_q=rows, head_dim=head_dim, causal=True, dtype="fp16")
    (program,) = FIRST.lower(H100, problem)
    found = program.tiles.column("n_masked").tolist()
    needed = program.tiles.column("n_blocks").tolist()
    assert found == [min(n - 1, steps) for n in needed]
    assert program.tiles.column("q_block").tolist() == sorted(program.tiles.column("q_block").tolist())  # shortest first


def test_o_is_told_to_have_left_in_the_next_tile_by_its_writer_alone() -> None:
    program = lowered()
    writer, other = (kinds(program, f"consumer{w}") for w in (1, 0))
    told = writer.index(("mbarrier_arrive", "o_free"))
    first_product = next(i for i, (kind, _) in enumerate(writer) if kind == "wgmma")
    assert writer.index(("store_wait", None)) < told
    assert first_product < told
    assert told < next(i for i, (kind, _) in enumerate(writer) if kind == "tma_store")
    assert not any(kind == "tma_store" or barrier == "o_free" for kind, barrier in other)
    assert Counter(kind for kind, _ in writer)["tma_store"] == 2
    assert ("mbarrier_wait", "o_free") not in kinds(lowered(persistent=False), "producer")


def test_a_turn_of_three_warpgroups_waits_for_both_others() -> None:
    program = lowered(head_dim=64, rows=576)
    assert {b.count for b in program.barriers if b.name.startswith("turn")} == {12}
    first = [barrier for kind, barrier in kinds(program, "consumer2") if kind == "named_arrive"]
    assert first[:2] == ["turn0", "turn1"]


@pytest.mark.parametrize(
    ("causal", "counters"),
    [
        (False, {"xu": 35_425_376, "fma": 104_869_656, "alu": 73_124_467}),
        (True, {"xu": 17_884_256, "fma": 57_493_156, "alu": 42_467_479}),
    ],
)
def test_its_counts_are_the_counters_of_an_h200(causal: bool, counters: dict[str, int]) -> None:
    """B4 H16 N4096 D128, in `h200_fa3_2024.csv`."""
    problem = Attention(batch=4, heads_q=16, seqlen_q=4096, head_dim=128, causal=causal, dtype="fp16")
    found = dict.fromkeys(counters, 0)
    for name, n in simulate(FIRST, load_gpu("h200"), problem).launches[0].counts.items():
        if INSTRUCTIONS[name].counter in found:
            found[INSTRUCTIONS[name].counter] += n
    assert found == pytest.approx(counters, rel=0.05)
    assert found["xu"] == pytest.approx(counters["xu"], rel=0.005)
