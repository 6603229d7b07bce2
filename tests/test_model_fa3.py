"""FA3's products and switches: what is refused without a producer, and that its tiles are loaded once whoever loads them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from random_inputs import normal

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Program, Tiles
from flashsim.model.reference import forward
from flashsim.model.schedule import Builder
from flashsim.model.schedules import get_schedule
from flashsim.sim.chip import bundle_counts
from flashsim.sim.hazards import check
from flashsim.sim.values import run

H100 = load_gpu("h100")
PROBLEM: dict[str, Any] = {"batch": 1, "heads_q": 2, "seqlen_q": 512, "seqlen_kv": 1000, "head_dim": 128}


def lowered(**fields: Any) -> Program:
    (program,) = get_schedule("fa3", **fields).lower(H100, Attention(**PROBLEM))
    return program


@pytest.mark.parametrize(
    ("fields", "shape", "sentence"),
    [
        ({"stages": 1}, {}, "fa3 without warp specialization has stages=1; a warpgroup loads one block while it multiplies"),
        ({}, {"dtype": "fp8"}, "fa3 in fp8 has V transposed by its producer's warpgroup: keep warp_specialization"),
        ({"cluster": 2}, {}, "fa3 has cluster=2, and consumers that load for themselves load for their own CTA"),
    ],
)
def test_what_needs_a_producer_is_refused_without_one(fields: dict[str, Any], shape: dict[str, Any], sentence: str) -> None:
    schedule = get_schedule("fa3", warp_specialization=False, **fields)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        schedule.lower(H100, Attention(**{**PROBLEM, **shape}))


@pytest.mark.parametrize("overlap", [True, False])
def test_each_tile_is_loaded_once_whoever_loads_it(overlap: bool) -> None:
    """Blocks by tensor over all roles of a CTA; a warp of four that load together brings a quarter of the bytes."""
    loads, shares = [], []
    for on in (True, False):
        program = lowered(warp_specialization=on, intra_overlap=overlap, block_kv=64, cluster=1)
        found = [
            (s.reads[0], s.writes[0], s.index.value(args, loops))
            for role in range(len(program.roles))
            for s, args, loops in program.walk(1, role)
            if s.kind == "tma_load" and s.index is not None
        ]
        assert len(set(found)) == len(found)
        loads.append(sorted(found))
        sizes = {row[4] for row in program.code if program.statements[row[8]].kind == "tma_load" and row[4] > 0}
        shares.append(max(sizes))
    assert loads[0] == loads[1]
    assert shares[0] == 4 * shares[1] == 64 * 128 * 2


def test_without_a_producer_a_cta_keeps_all_its_registers_and_its_consumers_give_stages_back_to_each_other() -> None:
    program = lowered(warp_specialization=False)
    assert [role.name for role in program.roles] == ["consumer0", "consumer1"]
    assert {role.registers for role in program.roles} == {255}
    assert [b.name for b in program.barriers if b.name.endswith("empty")] == ["k_empty", "v_empty"]
    for role in range(2):  # the first warpgroup alone waits for them and loads, one lane of a warp
        waits = [s for s, _, _ in program.walk(0, role) if s.kind == "mbarrier_wait" and s.attrs.get("previous")]
        assert bool(waits) == (role == 0)
        assert all(s.attrs["elected"] for s in waits)


def product(rows: int, warps: int, cols: int = 64) -> Program:
    """One role multiplies a tile of ``rows`` rows."""
    b = Builder(name="product", registers=128)
    b.smem("A", rows=rows, cols=64, bytes_per_element=2)
    b.smem("B", rows=cols, cols=64, bytes_per_element=2)
    b.registers_tile("C", rows=rows, cols=cols)
    with b.role("compute", warps=warps, registers=128):
        b.op("wgmma", writes="C", reads=("A", "B"), transpose_b=True)
    return b.build(tensors=(), tiles=Tiles(names=("n",), values=np.ones((1, 1), np.int64)))


def test_warpgroups_of_a_role_share_a_tiles_rows() -> None:
    """64 columns of K are four k-steps; a warp issues them once for each 64 rows of its warpgroup."""
    for rows, warps, steps in ((64, 4, 4), (128, 4, 8), (128, 8, 4), (192, 12, 4)):
        program = product(rows, warps)
        counts = zip(program.bundles, bundle_counts(program)[0], strict=True)
        issued = sum(int(n) * dict(bundle).get("wgmma_n64_ss", 0) for bundle, n in counts)
        assert issued == steps * warps, (rows, warps)


@pytest.mark.parametrize(
    ("rows", "warps", "cols", "words"),
    [
        (96, 4, 64, "C has 96 rows for 4 warps; a warpgroup is four warps and its wgmma has 64 rows, so it takes a mult"),
        (64, 8, 64, "C has 64 rows for 8 warps; .* so it takes a multiple of 128"),
        (64, 4, 300, "C has 300 columns; wgmma's N is a multiple of 8 up to 256: change cols"),
    ],
)
def test_a_tile_that_no_product_covers_is_refused(rows: int, warps: int, cols: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        product(rows, warps, cols)


def test_a_tile_that_does_not_fit_a_warpgroups_registers_is_refused() -> None:
    words = "fa3 tile 192x176 holds 196 registers a thread of S, P and O at head_dim 128, and 3 consumer warpgroups have 160 each"
    with pytest.raises(ValueError, match=words):
        lowered(block_q=192)


@pytest.mark.parametrize(
    ("build", "shape", "sentence"),
    [
        ("2023", {}, "fa3 has no build '2023'; it has released and 2024-07 (as published first): set one"),
        ("2024-07", {"head_dim": 256, "causal": True}, "causal=True: set build=released"),
        ("2024-07", {"dtype": "fp8", "causal": True}, "causal=True: set build=released"),
        ("2024-07", {"dtype": "fp8", "head_dim": 64}, "head_dim 64, causal=False: set build=released"),
    ],
)
def test_builds_that_were_not_read_are_refused(build: str, shape: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        get_schedule("fa3", build=build).lower(H100, Attention(**{**PROBLEM, **shape}))


@pytest.mark.parametrize(
    ("head_dim", "turns"), [(128, ["wgmma S0", "turn0", "wgmma O0"]), (256, ["turn0", "wgmma S0", "wgmma O0"])]
)
def test_turns_of_july_2024_last_until_the_scores_are_known(head_dim: int, turns: list[str]) -> None:
    """In a block of the unmasked loop: where a turn begins, and that the next one begins after S is there."""
    problem = Attention(batch=1, heads_q=2, seqlen_q=512, seqlen_kv=2048, head_dim=head_dim, dtype="fp8")
    (program,) = get_schedule("fa3", build="2024-07").lower(H100, problem)
    consumer = next(i for i, role in enumerate(program.roles) if role.name == "consumer0")
    own = [s for s in program.statements if s.role == consumer]
    last = max(i for i, s in enumerate(own) if s.kind == "loop")
    block = own[last : next(i for i in range(last, len(own)) if own[i].kind == "end")]
    words = {"wgmma": lambda s: f"wgmma {s.writes[0]}", "named_sync": lambda s: s.attrs["barrier"]}
    assert [words[s.kind](s) for s in block if s.kind in words] == turns
    kinds = [s.kind for s in block]
    assert kinds.index("wgmma") < kinds.index("mma_wait") < kinds.index("row_max") < kinds.index("named_arrive")


def test_of_warpgroups_in_turns_only_the_first_waits_for_each_block() -> None:
    for pingpong, others in ((True, 0), (False, 4)):  # K and V of a masked and of an unmasked block
        program = lowered(pingpong=pingpong)
        names = [role.name for role in program.roles]
        waits = dict.fromkeys(names, 0)
        depth = 0
        for s in program.statements:
            depth += (s.kind == "loop") - (s.kind == "end")
            waits[names[s.role]] += bool(depth) and s.kind == "mbarrier_wait"
        assert (waits["consumer0"], waits["consumer1"]) == (4, others)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("persistent", [True, False])
def test_fp8_of_july_2024_is_free_of_hazards_and_right(head_dim: int, persistent: bool) -> None:
    """An even number of Q blocks (a cluster) over blocks of keys that the last one does not fill; operands are not rounded."""
    schedule = get_schedule("fa3", build="2024-07", persistent=persistent)
    problem = Attention(batch=1, heads_q=1, seqlen_q=256, seqlen_kv=700, head_dim=head_dim, dtype="fp8")
    assert check(schedule, H100, problem).findings == ()
    q, k, v = normal((1, 1, 256, head_dim), (1, 1, 700, head_dim), (1, 1, 700, head_dim))
    out = run(schedule, H100, problem, q, k, v, operands="fp32")
    assert np.abs(out["O"] - forward(q, k, v)[0]).max() <= 1e-5 * np.abs(v).max()
