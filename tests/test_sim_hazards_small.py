"""What the checker follows, one rule a test, in pipelines of a few statements written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.ops import OPS
from flashsim.model.program import Barrier, Buffer, Program, Ring, Role, Statement, Tiles
from flashsim.model.schedules import get_schedule
from flashsim.sim.hazard_ops import EFFECTS, STRUCTURE
from flashsim.sim.hazards import Finding, check_programs

H200 = load_gpu("h200")


def found(program: Program) -> tuple[Finding, ...]:
    return check_programs((program,), H200).findings


def small(
    *, statements: list[Statement], roles: tuple[tuple[str, int], ...] = (("main", 4),), **fields: Any
) -> Program:
    """A Program of one tile from statements alone: what the checker reads."""
    return replace(
        get_schedule("fa2").lower(H200, Attention(batch=1, heads_q=1, seqlen_q=640, head_dim=128))[-1],
        name="small",
        statements=tuple(statements),
        roles=tuple(Role(name=name, warps=warps, registers=64, start=0) for name, warps in roles),
        **{"buffers": (), "barriers": (), "rings": (), "tiles": Tiles(names=("n",), values=np.ones((1, 1), np.int64)), **fields},
    )


def op(kind: str, role: int = 0, writes: str = "", reads: tuple[str, ...] = (), **attrs: Any) -> Statement:
    return Statement(kind=kind, role=role, writes=(writes,) if writes else (), reads=reads, attrs=attrs)


SQUARE: dict[str, Any] = {"rows": 128, "cols": 128}


def products(*changed_ops: Statement, commit: dict[str, Any] | None = None, read: str = "S") -> Program:
    """A warp multiplies into tensor memory, four warps read it: tcgen05's way, with a commit to an mbarrier."""
    tile, bar = {"ring": "r"}, {"ring": "r", "barrier": "done"}
    statements = [
        op("mbarrier_expect", barrier="full", of=("A",), **tile),
        op("tma_load", writes="A", reads=("Q",), barrier="full", **tile),
        op("mbarrier_wait", barrier="full", **tile),
        op("umma", writes="S", reads=("A", "A")),
        op("mbarrier_arrive", **bar, **({"products": True} if commit is None else commit)),
        op("mbarrier_wait", role=1, **bar),
        op("tmem_load", role=1, writes="x", reads=(read,)),
        *changed_ops,
    ]
    buffers = (
        Buffer(name="A", space="smem", bytes_per_element=2, **SQUARE),
        Buffer(name="S", space="tmem", bytes_per_element=4, **SQUARE),
        Buffer(name="S.P", space="tmem", bytes_per_element=2, **SQUARE),
        Buffer(name="S.rest", space="tmem", bytes_per_element=2, **SQUARE),
        Buffer(name="x", space="register", bytes_per_element=4, **SQUARE),
    )
    return small(
        statements=statements, roles=(("mma", 1), ("softmax", 4)), buffers=buffers, rings=(Ring(name="r", stages=1),),
        barriers=tuple(Barrier(name=name, kind="mbarrier", count=1) for name in ("full", "done")),
    )  # fmt: skip


def test_products_of_tensor_memory_are_done_when_their_commit_arrives() -> None:
    assert not found(products())
    (early,) = found(products(commit={}))[:1]
    assert (early.kind, early.role, early.buffer) == ("read before data", "softmax", "S")
    assert "a product in flight" in early.sentence


def test_tiles_that_share_tensor_memory_collide_unless_they_lie_side_by_side() -> None:
    """P is stored over S, which the next product overwrites; a tile beside P is no matter."""
    store, again = op("tmem_store", role=1, writes="S.P", reads=("x",)), op("umma", writes="S", reads=("A", "A"))
    assert not found(products(store))
    overlap = found(products(store, again))
    assert {(f.role, f.op[:4]) for f in overlap if f.kind == "write before write"} & {("softmax", "tmem"), ("mma", "umma")}
    assert not found(products(store, op("tmem_store", role=1, writes="S.rest", reads=("x",))))
    assert found(products(read="S.P"))[0].kind == "read without data"


def test_a_fence_on_either_side_of_the_barrier_orders_the_proxies() -> None:
    """fence.proxy.async lies on the way from the store to the bulk copy: before the barrier, or after it."""
    stores = [op("zero", writes="x", shape=(1,)), op("stmatrix", writes="A", reads=("x",))]
    sync, fence, copy = op("named_sync", barrier="all"), op("fence_async"), op("tma_store", writes="O", reads=("A",), wait="read")
    tiles = tuple(Buffer(name=n, space=s, bytes_per_element=2, **SQUARE) for n, s in (("A", "smem"), ("x", "register")))
    fields: dict[str, Any] = {"buffers": tiles, "barriers": (Barrier(name="all", kind="named", count=4),)}
    assert not found(small(statements=[*stores, fence, sync, copy], **fields))
    assert not found(small(statements=[*stores, sync, fence, copy], **fields))
    assert found(small(statements=[*stores, sync, copy], **fields))[0].kind == "missing proxy fence"
    unread = small(statements=[*stores, fence, sync, replace(copy, attrs={})], **fields)
    assert [f.kind for f in found(unread)] == ["unfinished at exit"]


def test_a_phase_that_runs_ahead_of_its_wait_is_found() -> None:
    """Two arrivals in a row without an answer: who waits for the first may meet the parity of the second."""
    signal = {"barrier": "go", "ring": "r"}
    fast = [op("mbarrier_arrive", **signal), op("advance", ring="r")] * 3
    slow = [op("mbarrier_wait", role=1, **signal), op("advance", role=1, ring="r")] * 3
    fields: dict[str, Any] = {"roles": (("fast", 1), ("slow", 1)), "rings": (Ring(name="r", stages=1),)}
    findings = found(small(statements=[*fast, *slow], barriers=(Barrier(name="go", kind="mbarrier", count=1),), **fields))
    assert {f.kind for f in findings} <= {"phase", "early arrival"}
    assert findings[0].barrier == "go"


def test_a_warp_that_ends_with_its_wait_is_no_deadlock() -> None:
    """Turn by turn: while one role ends, the other still waits for what comes after."""
    bars = tuple(Barrier(name=name, kind="mbarrier", count=1) for name in ("a", "b"))
    statements = [
        op("mbarrier_wait", barrier="b", ring="r"),
        op("mbarrier_wait", role=1, barrier="a", ring="r"),
        op("mbarrier_arrive", role=2, barrier="a", ring="r"),
        op("mbarrier_wait", role=2, barrier="a", ring="r"),
        op("mbarrier_arrive", role=2, barrier="b", ring="r"),
    ]
    roles = tuple((name, 1) for name in ("first", "second", "third"))
    assert not found(small(statements=statements, roles=roles, rings=(Ring(name="r", stages=1),), barriers=bars))


def test_every_op_has_a_row() -> None:
    """A new op says what it does to memory: add a row to EFFECTS."""
    assert set(OPS) - set(EFFECTS) == set(STRUCTURE)
    with pytest.raises(ValueError, match=r"^check does not know what op 'warp_drive' does to memory; add a row to EFFECTS"):
        found(small(statements=[Statement(kind="warp_drive")]))
