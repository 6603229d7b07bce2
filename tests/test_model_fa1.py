"""FA1: which binary its instructions come from, where it loads and waits, and what packing adds."""

from __future__ import annotations

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Program
from flashsim.model.schedules import get_schedule
from flashsim.sim.predict import simulate

A100 = load_gpu("a100-40gb")
PROBLEM = Attention(batch=16, heads_q=8, seqlen_q=1024, head_dim=64, dtype="fp16")


def lowered(problem: Attention = PROBLEM, **fields: object) -> tuple[Program, ...]:
    return get_schedule("fa1", **fields).lower(A100, problem)


@pytest.mark.parametrize(("head_dim", "build", "source"), [
    (64, "flash-attn-0.1", "flash-attention 0.1"),
    (32, "flash-attn-0.1", "flash-attention 0.1"),
    (64, "xformers", "xformers 0.0.20"),
    (128, "flash-attn-0.1", "xformers 0.0.20"),  # the first release has no kernel for it
])  # fmt: skip
def test_instructions_are_those_of_the_build(head_dim: int, build: str, source: str) -> None:
    (program,) = lowered(Attention(batch=1, heads_q=2, seqlen_q=1024, head_dim=head_dim), build=build)
    assert program.profile.startswith(f"sass: {source}")


@pytest.mark.parametrize("field", ["build", "layout"])
def test_an_unknown_switch_is_refused_in_a_sentence(field: str) -> None:
    with pytest.raises(ValueError, match=rf"fa1 has {field}='x'; it must be one of [\w.-]+, \w+: change {field}"):
        lowered(**{field: "x"})


def test_a_later_step_loads_after_its_scores_and_waits_where_the_binary_does() -> None:
    """O and the next Q between S and the softmax, kept waiting for until O's exchange; l and m of the next step before the
    row maxima meet, waited for before P V: that is all the time their latency can hide in."""
    (program,) = lowered()
    loops = [i for i, s in enumerate(program.statements) if s.kind == "loop" and s.attrs["var"] == "i"]
    body = program.statements[loops[1] :]
    steps = [(s.kind, s.reads[0] if s.kind == "load" else str(s.attrs.get("scoreboard", ""))) for s in body]
    order = [
        ("load", "Otmp"), ("load", "Q"), ("row_max", ""), ("load", "l"), ("load", "m"), ("cross_warp", ""), ("exp2", ""),
        ("wait_load", "2"), ("wait_load", "5"), ("to_smem", ""), ("cross_warp_tile", ""), ("merge", ""),
    ]  # fmt: skip
    at = [steps.index(step) for step in order]
    assert at == sorted(at)
    products = [i for i, s in enumerate(body) if s.kind == "mma"]
    assert products[0] < at[0]
    assert at[7] < products[1] < at[8]


def test_latency_of_hbm_shows_in_every_later_step_and_in_no_first_one() -> None:
    """One CTA, far HBM: the wait for the next step's l and m is longer by what HBM is farther."""

    def cycles(seqlen_kv: int, latency_ns: float) -> float:
        problem = Attention(batch=1, heads_q=1, seqlen_q=1024, seqlen_kv=seqlen_kv, head_dim=64, dtype="fp16")
        far = A100.replace_number("hbm.latency_ns", latency_ns).replace_number("l2.resident_bytes", 1)
        return simulate(get_schedule("fa1"), far, problem, clock=1000).cycles

    steps = 64
    more = cycles(512, 3000) - cycles(512, 2000)
    first = cycles(256, 3000) - cycles(256, 2000)
    assert more - first > 0.9 * steps * 1000  # 1000 ns at 1 GHz, one wait after the other


def test_packing_is_three_copies_before_the_kernel() -> None:
    packed, separate = (simulate(get_schedule("fa1", layout=layout), A100, PROBLEM) for layout in ("packed", "separate"))
    assert [x.program.name for x in separate.launches] == ["eager_pack_q", "eager_pack_k", "eager_pack_v", "fa1_fwd"]
    copied = 2 * 3 * 16 * 8 * 1024 * 64 * 2
    assert separate.bytes["l2_sm"] - packed.bytes["l2_sm"] == copied
    assert separate.cycles > packed.cycles
