"""No ordering op of a shipped schedule can go unseen: each is taken away in turn, which is a hazard, or proven to be redundant.

The list of redundant ones is exact. An ``advance`` of a ring that only one role has orders nothing: it says which block is read,
and the wrong block shows in the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from faults import find, ordering, without

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPU, load_gpu
from flashsim.model.program import Program
from flashsim.model.reference import forward
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.hazard_ops import ORDERING
from flashsim.sim.hazards import check_programs, spare
from flashsim.sim.values import run as run_values

Spare = dict[tuple[str, str], tuple[int, str]]
SHAPE: dict[str, Any] = {"batch": 1, "heads_q": 1, "seqlen_q": 640, "head_dim": 128}
#: Under this mask tiles have 0 to 3 blocks of 128 keys, one or two of them masked: every statement of FA2 and FA3 runs.
ALL_PATHS = {"causal": True, "seqlen_q": 512, "seqlen_kv": 304}
LONGER = {"causal": True, "seqlen_q": 768, "seqlen_kv": 560}  # so that each stage is filled again in the loop
#: Blocks of 64 keys that go round a ring several times.
ROUND = {"causal": True, "seqlen_q": 256, "seqlen_kv": 800}
#: No mask, two Q blocks a head: CTAs in pairs.
PAIR = {"seqlen_q": 256, "seqlen_kv": 300}

NUMBERS = "the wrong block is read"
GROUP = "what it closes ends with the group that"


def one_stage(**rings: dict[str, int]) -> Spare:
    """Role -> ring of one stage, which it advances so often and never waits with."""
    return {
        (role, f"advance ring={ring}"): (n, f"ring {ring} has one stage and {role} never waits with it")
        for role, counts in rings.items()
        for ring, n in counts.items()
    }


def turns(k: int, v: int, q: int = 0) -> Spare:
    """Waits of consumer 1 that its turn implies: consumer 0 has waited for the same."""
    counts = {"k": k, "v": v, "q": q}
    return {
        ("consumer1", f"mbarrier_wait barrier={ring}_full ring={ring}"): (n, "named_sync barrier=turn1")
        for ring, n in counts.items()
        if n
    }


#: Without a mask only the last K/V block is masked, so a consumer's loop over further masked blocks is never entered. It has ten
#: ordering ops: waits for K and V, a commit and a wait for each product, releases of K and V, a step of either ring. With
#: ping-pong both consumers take a turn and pass it on there, too, and consumer 1 leaves its waits for K and V to its turn.
UNMASKED, IN_TURNS = 2 * 10, 2 * 2 - 2

O_RING = one_stage(consumer0={"o": 1}, consumer1={"o": 1})


def fa4(*tiles: int, blocks: int) -> Spare:
    """``blocks``: kinds of K/V blocks that a softmax warpgroup has code for."""
    correction = {f"{ring}{w}": 4 for ring in ("p", "stats_done") for w in tiles}
    products = {f"{ring}{w}": n for ring, n in (("s", 2), ("o", 1)) for w in tiles}
    return one_stage(**{f"softmax{w}": {f"p{w}": blocks} for w in tiles}, correction=correction, mma=products)


def gluon(*, syncs: int) -> Spare:
    """``syncs``: barriers of a softmax warpgroup's own. In the kernel one thread arrives for all warps behind such a barrier;
    here every warp arrives, so that the barriers take their time and order nothing."""
    own = {"correction": 25, "softmax0": syncs, "softmax1": syncs}
    barriers = {(role, f"named_sync barrier={role}"): (n, f"no access of {role} owes its order to it") for role, n in own.items()}
    rings = {f"softmax{w}": {f"p{w}": 3} for w in range(2)}
    return one_stage(**rings, mma={"s0": 3, "s1": 3}) | barriers


@dataclass(frozen=True, kw_only=True)
class Case:
    """``dead``: ops of loops that this problem never enters. ``least``: findings, or the test has lost its subject. ``carried``:
    tiles of a CTA each are followed as if CTAs went on from tile to tile, so that what a tile leaves behind is used."""

    schedule: str
    gpu: str = "h200"
    fields: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=lambda: ALL_PATHS)
    spare: Spare = field(default_factory=dict)
    dead: int = 0
    least: int = 11
    carried: bool = False

    @property
    def attention(self) -> Attention:
        return Attention(**{**SHAPE, **self.shape})

    def programs(self) -> tuple[Program, ...]:
        programs = get_schedule(self.schedule, **self.fields).lower(load_gpu(self.gpu), self.attention)
        return tuple(replace(p, persistent=True) for p in programs) if self.carried else programs


SMALL = {"block_kv": 64}
#: Two stages, and blocks that rescale O as well as blocks that do not.
FA4_RING = {"kv_stages": 2, "rescale_rate": 0.5}
DEEPSEEK = {"head_dim": 192, "head_dim_v": 128}
CASES: dict[str, Case] = {
    "fa3": Case(schedule="fa3", spare=O_RING),
    "fa3 in 8 bits": Case(
        schedule="fa3", fields={"block_kv": 128}, shape={**ALL_PATHS, "dtype": "fp8"}, spare=O_RING
    ),
    "fa3 without ping-pong": Case(schedule="fa3", fields={"pingpong": False}, spare=O_RING),
    "fa3 without overlap": Case(schedule="fa3", fields={"intra_overlap": False}, spare={**O_RING, **turns(3, 3, 1)}),
    "fa3 without a producer": Case(
        schedule="fa3", fields={"warp_specialization": False, "block_kv": 64}, shape=LONGER
    ),
    "fa3 with P in shared memory": Case(
        schedule="fa3", fields={"block_q": 128, "pingpong": False}, shape={**ALL_PATHS, "head_dim": 96}, spare=O_RING
    ),
    "fa3 with wide heads": Case(
        schedule="fa3", shape={**ALL_PATHS, "head_dim": 256, "seqlen_q": 400, "seqlen_kv": 260}, spare=O_RING
    ),
    "fa3 in a cluster": Case(schedule="fa3", fields=SMALL, shape=PAIR, spare=O_RING, dead=UNMASKED + IN_TURNS),
    "fa3 in a cluster in 8 bits": Case(
        schedule="fa3", fields=SMALL, shape={**PAIR, "head_dim": 192, "dtype": "fp8"}, spare=O_RING,
        dead=UNMASKED + IN_TURNS,
    ),
    "fa3 in a cluster with wide heads": Case(schedule="fa3", shape={**PAIR, "head_dim": 256}, spare=O_RING, dead=UNMASKED),
    "fa2": Case(schedule="fa2"),
    "standard": Case(schedule="standard", gpu="a100-40gb", shape={"seqlen_q": 256, "seqlen_kv": 200, "head_dim": 64}),
    "fa1": Case(
        schedule="fa1", gpu="a100-40gb", shape={"seqlen_q": 128, "seqlen_kv": 300, "head_dim": 64, "causal": True},
        least=6,  # of seven barriers; the other, at a later K/V block's start: the last exchange's comes after all reads
        spare={("compute", "barrier"): (1, "")},
    ),
    "triton with mma.sync": Case(
        schedule="triton", gpu="a100-40gb", fields=SMALL, shape=ROUND, spare={("compute", "commit"): (1, GROUP)}
    ),
    "triton with wgmma": Case(
        schedule="triton", fields={**SMALL, "num_warps": 4, "num_stages": 3}, shape=ROUND,
        spare={
            ("compute", "commit"): (1, GROUP), ("compute", "mma_commit"): (1, GROUP),
            **{("compute", f"advance ring={ring}"): (2, NUMBERS) for ring in ("k", "v")},
        },
    ),
    "triton with tcgen05": Case(
        schedule="triton", gpu="b200", fields=SMALL, shape=ROUND, spare=one_stage(mma={"s": 1, "o": 1})
    ),
    "triton with warp roles": Case(
        schedule="triton", gpu="b200", fields={**SMALL, "warp_specialize": True}, shape=ROUND,
        spare={
            **one_stage(softmax={"p": 2}, correction={"p": 1}, mma={"o": 1}),
            ("mma", "mbarrier_wait barrier=s_empty ring=s previous=True"): (1, "by mma: mbarrier_wait barrier=p_full ring=p"),
        },
    ),
    "fa4 in pairs": Case(
        schedule="fa4", gpu="b200", fields=FA4_RING, shape={"seqlen_q": 512, "seqlen_kv": 500}, spare=fa4(0, 1, blocks=2)
    ),
    "fa4 in pairs of one Q tile": Case(
        schedule="fa4", gpu="b200", fields={**FA4_RING, "q_stages": 1}, shape={"seqlen_q": 256, "seqlen_kv": 500},
        spare=fa4(0, blocks=2),
    ),
    "fa4 without pairs": Case(
        schedule="fa4", gpu="b200", fields={**FA4_RING, "cta_pair": False}, shape={"seqlen_q": 256, "seqlen_kv": 500},
        spare=fa4(0, 1, blocks=2),
    ),
    "fa4 with O in Q's place": Case(
        schedule="fa4", gpu="b200", fields={**FA4_RING, "cta_pair": False}, shape={"seqlen_q": 512, "seqlen_kv": 500, **DEEPSEEK},
        spare=fa4(0, 1, blocks=2) | one_stage(epilogue={"o_stored": 1}),
    ),
    "fa4 in pairs with O in Q's place": Case(
        schedule="fa4", gpu="b200", fields=FA4_RING, shape={"seqlen_q": 512, "seqlen_kv": 500, **DEEPSEEK},
        spare=fa4(0, 1, blocks=2) | one_stage(epilogue={"o_stored": 1}),
    ),
    "fa4 in pairs in 8 bits": Case(
        schedule="fa4", gpu="b200", fields=FA4_RING, shape={"seqlen_q": 512, "seqlen_kv": 500, "dtype": "fp8"},
        spare=fa4(0, 1, blocks=2),
    ),
    "fa4 with a mask": Case(
        schedule="fa4", gpu="b200", fields=FA4_RING, shape={"causal": True, "seqlen_q": 512, "seqlen_kv": 700},
        spare=fa4(0, 1, blocks=3), carried=True,
    ),
    "gluon": Case(
        schedule="gluon", gpu="b200", fields={"kv_stages": 2}, shape={"causal": True, "seqlen_q": 512, "seqlen_kv": 700},
        spare=gluon(syncs=20),
    ),
    "gluon in turns": Case(
        schedule="gluon", gpu="b200", fields={"kv_stages": 2},
        shape={"causal": True, "seqlen_q": 512, "seqlen_kv": 700, "head_dim": 64}, spare=gluon(syncs=28),
    ),
}  # fmt: skip

#: Those that take most of the time and repeat what others show.
LONG = (
    "fa4 in pairs", "fa4 without pairs", "fa4 with a mask", "fa4 in pairs in 8 bits", "fa4 in pairs with O in Q's place",
    "gluon in turns",
)  # fmt: skip


def text(program: Program, number: int) -> tuple[str, str]:
    """The role and the op of a statement; whether a pair's first CTA does it alone is left out."""
    op = program.statements[number]
    return program.roles[op.role].name, " ".join(str(op).replace(" leader=True", "").split())


def reached(program: Program) -> set[int]:
    roles = range(len(program.roles))
    walked = {id(s) for tile in range(len(program.tiles)) for role in roles for s, _, _ in program.walk(tile, role)}
    return walked | {id(s) for role in roles for s in program.ending(role)}


class Given:
    """A schedule whose Program is given."""

    name = "given"

    def __init__(self, program: Program) -> None:
        self.program = program

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        return (self.program,)


def right(program: Program, case: Case) -> bool:
    """Whether a Program computes attention."""
    a, rng = case.attention, np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 1, n, a.head_dim)) for n in (a.seqlen_q, a.seqlen_kv, a.seqlen_kv))
    out = run_values(Given(program), load_gpu(case.gpu), a, q, k, v, operands="fp32")["O"]
    return bool(np.abs(out - forward(q, k, v, causal=a.causal)[0]).max() < 1e-4)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in CASES])
def test_no_ordering_op_goes_unseen(name: str) -> None:
    case = CASES[name]
    gpu, survived, dead, caught = load_gpu(case.gpu), dict[tuple[str, str], list[int]](), 0, 0
    for program in case.programs():
        assert check_programs((program,), gpu).clean
        alive = reached(program)
        for number in ordering(program, ORDERING):
            if id(program.statements[number]) not in alive:
                dead += 1
            elif check_programs((without(program, number),), gpu, enough=1).findings:
                caught += 1
            else:
                survived.setdefault(text(program, number), []).append(number)
    assert {key: len(numbers) for key, numbers in survived.items()} == {key: n for key, (n, _) in case.spare.items()}
    assert dead == case.dead
    assert caught >= case.least
    for key, numbers in survived.items():
        reason = case.spare[key][1]
        if reason == NUMBERS:
            assert right(program, case)
            assert not any(right(without(program, number), case) for number in numbers)
        else:
            assert reason in spare(program, gpu, numbers[0]).replace(" of CTA 0", "").replace(" of CTA 1", "")


def test_every_schedule_is_mutated() -> None:
    """cuDNN is taken to run the others' kernels, whose roles order alike on each architecture."""
    assert {case.schedule for case in CASES.values()} == set(SCHEDULES) - {"cudnn"}
    for gpu, like in (("a100-40gb", "fa2"), ("h100", "fa3"), ("b200", "fa4")):
        for causal in (False, True):
            attention = Attention(**{**SHAPE, "causal": causal})
            (borrowed,) = get_schedule("cudnn").lower(load_gpu(gpu), attention)
            (own,) = get_schedule(like).lower(load_gpu(gpu), attention)
            ordered = [{text(program, number) for number in ordering(program, ORDERING)} for program in (borrowed, own)]
            assert ordered[0] == ordered[1]


@pytest.mark.parametrize("name", ["standard", "fa1", "fa2"])
def test_schedules_of_mma_sync_order_alike_on_every_architecture(name: str) -> None:
    ordered = []
    for gpu in ("a100-40gb", "h100", "b200"):
        programs = get_schedule(name).lower(load_gpu(gpu), Attention(**{**SHAPE, "causal": True}))
        ordered.append([str(p.statements[i]) for p in programs for i in ordering(p, ORDERING)])
    assert ordered[0] == ordered[1] == ordered[2]


def test_an_op_that_is_needed_is_not_spare() -> None:
    (program,) = CASES["fa2"].programs()
    assert spare(program, load_gpu("h200"), find(program, "barrier")) == ""
