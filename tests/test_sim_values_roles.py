"""Roles that wait for each other: their order changes no bit, a missing wait shows, and roles that are stuck are named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from random_inputs import Array, normal

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Index, Program, Statement, Tensor, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules import get_schedule
from flashsim.sim.values import FORMATS, Memory, execute, run

ROLES = [{}, {"stages": 3, "pingpong": True}, {"intra_overlap": False, "pingpong": True}, {"block_q": 192, "stages": 4}]
OWN_LOADS: list[dict[str, Any]] = [{"pingpong": False}, {"intra_overlap": False, "stages": 3}]
CASES = [(fields, dtype) for fields in ROLES for dtype in ("bf16", "fp8")]
CASES += [({"warp_specialization": False, **fields}, "bf16") for fields in OWN_LOADS]


@pytest.mark.parametrize(("fields", "dtype"), CASES, ids=str)
def test_the_order_in_which_roles_go_on_changes_no_bit(fields: dict[str, Any], dtype: str) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=200, seqlen_kv=500, head_dim=64, dtype=dtype, causal=True)
    schedule = get_schedule("fa3", block_kv=64, **fields)
    q, k, v = normal((1, 1, 200, 64), (1, 1, 500, 64), (1, 1, 500, 64))
    in_turn = run(schedule, load_gpu("h100"), attention, q, k, v)
    for seed in range(4):
        at_random = run(schedule, load_gpu("h100"), attention, q, k, v, seed=seed)
        assert all(np.array_equal(in_turn[each], at_random[each]) for each in in_turn)


@pytest.mark.parametrize("fields", OWN_LOADS, ids=str)
def test_who_loads_the_tiles_changes_no_bit(fields: dict[str, Any]) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=300, seqlen_kv=500, head_dim=64, causal=True)
    q, k, v = normal((1, 1, 300, 64), (1, 1, 500, 64), (1, 1, 500, 64))
    producer, own = (
        run(get_schedule("fa3", block_kv=64, warp_specialization=on, **fields), load_gpu("h100"), attention, q, k, v)
        for on in (True, False)
    )
    assert all(np.array_equal(producer[each], own[each]) for each in producer)


def without(kind: str, **attrs: Any) -> Callable[[list[Statement]], list[Statement]]:
    """Leaves out the statements of that kind and those attributes."""

    def change(statements: list[Statement]) -> list[Statement]:
        kept = [s for s in statements if s.kind != kind or any(s.attrs.get(key) != value for key, value in attrs.items())]
        assert len(kept) < len(statements)
        return kept

    return change


def early(kind: str, barrier: str) -> Callable[[list[Statement]], list[Statement]]:
    """Moves arrivals at ``barrier`` to where the last product before them has been issued."""

    def change(statements: list[Statement]) -> list[Statement]:
        out: list[Statement] = []
        for s in statements:
            if s.kind == kind and s.attrs["barrier"] == barrier:
                issued = max(i for i, each in enumerate(out) if each.kind == "mma_commit")
                out.insert(issued + 1, s)
            else:
                out.append(s)
        return out

    return change


BROKEN = {
    "does not wait for Q": without("mbarrier_wait", barrier="q_full"),
    "does not wait for K": without("mbarrier_wait", barrier="k_full"),
    "does not wait for V": without("mbarrier_wait", barrier="v_full"),
    "loads K into a full stage": without("mbarrier_wait", barrier="k_empty"),
    "loads V into a full stage": without("mbarrier_wait", barrier="v_empty"),
    "does not wait for Q K^T": without("mma_wait", arg=1),
    "does not wait for P V": without("mma_wait", arg=0),
    "lets K go before it is read": early("mbarrier_arrive", "k_empty"),
    "lets V go before it is read": early("mbarrier_arrive", "v_empty"),
    "does not let K go": without("mbarrier_arrive", barrier="k_empty"),
    "does not let V go": without("mbarrier_arrive", barrier="v_empty"),
    "does not expect bytes": without("mbarrier_expect", barrier="k_full"),
    "reads one stage of K only": without("advance", ring="k"),
    "reads one stage of V only": without("advance", ring="v"),
}


def outcome(program: Program, attention: Attention, arrays: list[Array], seed: int | None) -> Array | str:
    memory = Memory(attention, *arrays, FORMATS["fp32"])
    try:
        execute(program, memory, None if seed is None else random.Random(seed))
    except (KeyError, RuntimeError) as error:
        return str(error)
    return memory.arrays["O"]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_missing_wait_shows(broken: str) -> None:
    """In the numbers, in a NaN, or as roles that wait for ever; the whole schedule shows nothing."""
    attention = Attention(batch=1, heads_q=1, seqlen_q=64, seqlen_kv=256, head_dim=32)
    arrays = normal((1, 1, 64, 32), (1, 1, 256, 32), (1, 1, 256, 32))
    (program,) = get_schedule("fa3", block_q=64, block_kv=32).lower(load_gpu("h100"), attention)
    role = 0 if broken.startswith("loads") or "expect" in broken else 1
    own, others = ([s for s in program.statements if (s.role == role) == mine] for mine in (True, False))
    wrong = replace(program, statements=(*others, *BROKEN[broken](own)))
    whole = outcome(program, attention, arrays, None)
    assert isinstance(whole, np.ndarray)
    outcomes = (outcome(wrong, attention, arrays, seed) for seed in range(20))
    assert any(isinstance(each, str) or not np.array_equal(each, whole) for each in outcomes)


def two_roles(*, arrivals: int, turn: bool = False) -> Program:
    """A producer that fills two stages of X, and a consumer that reads three and never lets one go."""
    b = Builder(name="pair", registers=64)
    b.ring("x", 2)
    b.mbarrier("full", count=arrivals, stages=2)
    b.mbarrier("empty", count=4, stages=2)
    b.named_barrier("turn", warps=8)
    b.smem("Xs", rows=16, cols=16, bytes_per_element=2, stages=2, ring="x")
    with b.role("producer", warps=1, registers=64), b.loop("i", Index(const=3)):
        b.op("mbarrier_wait", barrier="empty", ring="x", previous=True)
        b.op("mbarrier_expect", barrier="full", ring="x", of=("Xs",))
        b.op("tma_load", writes="Xs", reads="Q", index=Index(), barrier="full", ring="x")
        b.op("advance", ring="x")
    with b.role("consumer", warps=4, registers=64):
        if turn:
            b.op("named_sync", barrier="turn")
        with b.loop("i", Index(const=3)):
            b.op("mbarrier_wait", barrier="full", ring="x")
            b.op("advance", ring="x")
    q = Tensor(name="Q", heads=1, rows=16, cols=16, bytes_per_element=2, block_rows=16)
    return b.build(tensors=(q,), tiles=Tiles(names=("head",), values=np.zeros((1, 1), np.int64)))


STUCK = {
    "each waits for the other": (
        two_roles(arrivals=1),
        "producer waits for phase 0 of mbarrier empty[0] (0 of 4 arrivals); "
        "consumer waits for phase 1 of mbarrier full[0] (0 of 1 arrivals)",
    ),
    "too few arrivals": (
        two_roles(arrivals=2),
        "producer waits for phase 0 of mbarrier empty[0] (0 of 4 arrivals); "
        "consumer waits for phase 0 of mbarrier full[0] (1 of 2 arrivals)",
    ),
    "a named barrier": (
        two_roles(arrivals=1, turn=True),
        "producer waits for phase 0 of mbarrier empty[0] (0 of 4 arrivals); "
        "consumer waits for phase 0 of named turn (4 of 8 arrivals)",
    ),
}


@pytest.mark.parametrize("case", STUCK)
def test_roles_that_cannot_go_on_are_named(case: str) -> None:
    program, waits = STUCK[case]
    attention = Attention(batch=1, heads_q=1, seqlen_q=16, head_dim=16)
    expected = f"pair cannot go on in tile 0: {waits}"
    assert outcome(program, attention, normal(*[(1, 1, 16, 16)] * 3), None) == expected
