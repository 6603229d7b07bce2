"""The pipeline checker: shipped schedules are clean, faults are caught with the right culprit, and no ordering op can go unseen.

Faults come from :mod:`faults`. A fault need not show in this timing: the engines run most of these programs to their end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import faults
import pytest
from faults import changed, counting, find, moved, registers, repeated, without

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.program import Barrier, Index, Program
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.model.tiling import occupancy
from flashsim.sim import hazard_machine, hazards
from flashsim.sim.fast_engine import run as run_fast
from flashsim.sim.hazard_budgets import budgets
from flashsim.sim.hazard_findings import KINDS
from flashsim.sim.hazards import Finding, check, check_programs, runs
from flashsim.sim.pricing import make_job

H200 = load_gpu("h200")
ALL_GPUS, ALL_SCHEDULES = list(GPUS), list(SCHEDULES)

#: Under this mask tiles have 0 to 3 blocks of 128 keys, one or two of them masked: every statement of FA2 and FA3 runs.
ALL_PATHS = {"causal": True, "seqlen_q": 512, "seqlen_kv": 304}
#: The same with up to 5 blocks, so that a stage is used again while a tile's Q stays.
LONGER = {"causal": True, "seqlen_q": 768, "seqlen_kv": 560}


def problem(**shape: Any) -> Attention:
    return Attention(**{"batch": 1, "heads_q": 1, "seqlen_q": 640, "head_dim": 128, **shape})


def lowered(name: str = "fa3", fields: dict[str, Any] | None = None, **shape: Any) -> Program:
    """The last kernel of a schedule on an H200."""
    return _lowered(name, tuple((fields or {}).items()), tuple(shape.items()))


@cache
def _lowered(name: str, fields: tuple[tuple[str, Any], ...], shape: tuple[tuple[str, Any], ...]) -> Program:
    return get_schedule(name, **dict(fields)).lower(H200, problem(**dict(shape)))[-1]


def found(program: Program) -> tuple[Finding, ...]:
    return check_programs((program,), H200).findings


# --- clean ---

PROBLEMS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "a mask": {"causal": True},
    "tiles without keys": ALL_PATHS,
    "one query, one key": {"seqlen_q": 1, "seqlen_kv": 1},
    "narrow heads": {"head_dim": 64, "batch": 2, "heads_q": 2},
    "wide heads": {"head_dim": 256, "seqlen_q": 500},
    "8 bits": {"dtype": "fp8", "seqlen_kv": 700},
}


@pytest.mark.parametrize("gpu", ALL_GPUS)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_shipped_schedules_are_clean_on_every_gpu_they_fit(name: str, gpu: str) -> None:
    refusals = []
    for shape in PROBLEMS.values():
        try:
            verdict = check(get_schedule(name), load_gpu(gpu), problem(**shape))
        except ValueError as error:
            refusals.append(str(error))
            continue
        assert verdict.clean, str(verdict)
        assert verdict.followed > 0
        assert f"{verdict.followed:,} ops followed" in str(verdict)
    assert len(refusals) < len(PROBLEMS) or all(gpu in text or "wgmma" in text for text in refusals)


#: Fields to draw per schedule. A new schedule adds a row (or is drawn as shipped).
FIELDS: dict[str, dict[str, list[Any]]] = {
    "standard": {"warps": [1, 2, 4, 8], "mask_kernel": [None, True], "layout": ["heads", "rows"]},
    "fa1": {"block_q": [16, 32], "block_kv": [None, 64, 128], "warps": [2, 4]},
    "fa2": {
        "block_q": [None, 64, 128], "block_kv": [None, 16, 32, 64], "warps": [None, 2, 4], "counts": ["binary", "ideal"],
        "split": ["q", "k"], "sequence_parallel": [True, False], "deferred_divide": [True, False],
    },
    "fa3": {
        "block_q": [None, 64, 128, 192], "block_kv": [None, 64, 96, 128, 160], "stages": [1, 2, 3, 4], "cluster": [None, 1, 2],
        "pingpong": [None, True, False], "intra_overlap": [True, False], "persistent": [True, False], "counts": ["ideal"],
        "warp_specialization": [True, False],
    },
    "triton": {
        "block_q": [None, 64, 128], "block_kv": [None, 32, 64, 128], "num_warps": [None, 4, 8], "num_stages": [None, 2, 3, 4],
        "warp_specialize": [False, True],
    },
    "fa4": {"block_kv": [64, 128], "q_stages": [None, 1, 2], "kv_stages": [None, 2, 3], "cta_pair": [None, False, True]},
    "gluon": {"kv_stages": [None, 2], "counts": ["binary", "ideal"]},
}  # fmt: skip
BLACKWELL = ("b200", "gb200", "b300", "gb300")
HOMES = {"fa3": ("h100", "h100-pcie", "h200"), "fa4": BLACKWELL, "gluon": BLACKWELL}
CHUNKS, PER_CHUNK = 8, 65


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_shipped_schedules_are_clean_whatever_the_shape_and_switches(chunk: int) -> None:
    """CHUNKS x PER_CHUNK random cases in all that are not refused; most with rings and roles."""
    rng, done = random.Random(chunk), 0
    names = [*ALL_SCHEDULES, *(name for name in (*HOMES, "triton") for _ in range(2))]
    while done < PER_CHUNK:
        name = rng.choice(names)
        fields = {field: rng.choice(choices) for field, choices in FIELDS.get(name, {}).items()}
        gpu = load_gpu(rng.choice(HOMES.get(name, ALL_GPUS)))
        heads = rng.choice([1, 2])
        attention = Attention(
            batch=rng.choice([1, 2]), heads_q=heads, heads_kv=rng.choice([1, heads]), seqlen_q=rng.randint(1, 500),
            seqlen_kv=rng.randint(1, 600), head_dim=rng.choice([16, 32, 64, 80, 96, 128, 192, 256]), causal=rng.random() < 0.5,
            dtype=rng.choice(["bf16", "fp16", "fp8"] if name in HOMES else ["bf16", "fp16"]),
        )  # fmt: skip
        if name == "fa4" and attention.head_dim == 192:
            attention = replace(attention, head_dim_v=128)
        try:
            programs = get_schedule(name, **fields).lower(gpu, attention)
            for program in programs:
                occupancy(gpu, program)
        except ValueError:
            continue
        if any("larger than the buffer they lie in" in each.sentence for p in programs for each in budgets(p, gpu)):
            continue  # O does not fit in V's place, which only shows when they are laid out
        verdict = check_programs(programs, gpu)
        assert verdict.clean, f"{name} {fields} {attention}\n{verdict}"
        done += 1


def test_tiles_are_chosen_by_their_trip_counts() -> None:
    """Every pattern is followed twice in a row, and from the other end; without persistent CTAs a tile stands alone."""
    tiles = runs(lowered(**ALL_PATHS))
    assert len(tiles) == 2
    counts = lowered(**ALL_PATHS).tiles.column("n_blocks")
    assert {int(counts[t]) for t in tiles[0]} == {int(n) for n in counts} == {0, 1, 2, 3}
    assert all(len(run) == 1 for run in runs(lowered("fa2", **ALL_PATHS)))


def test_a_long_problem_is_followed_in_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hazard_machine, hazards):
        monkeypatch.setattr(module, "LIMIT", 2000)
    verdict = check(get_schedule("fa1"), H200, problem(seqlen_q=8192, head_dim=64))
    assert verdict.clean
    assert "ops from tile 0 on were followed, not all" in str(verdict)


# --- faults ---


def without_wait(role: str, barrier: str, nth: int = 0) -> Callable[[Program], Program]:
    return lambda p: without(p, find(p, "mbarrier_wait", role=role, barrier=barrier, nth=nth))


def without_op(kind: str, role: str = "", nth: int = 0, **attrs: Any) -> Callable[[Program], Program]:
    return lambda p: without(p, find(p, kind, role=role, nth=nth, **attrs))


def attribute(kind: str, role: str, nth: int, where: dict[str, Any], **attrs: Any) -> Callable[[Program], Program]:
    return lambda p: changed(p, find(p, kind, role=role, nth=nth, **where), **attrs)


def swapped_turns(p: Program) -> Program:
    """Consumer 0 hands the turn to itself."""
    for nth in range(2):
        p = changed(p, find(p, "named_arrive", role="consumer0", nth=nth), barrier="turn0")
    return p


def arriving_for_nothing(p: Program) -> Program:
    """The producer waits for O to leave in tiles without keys as well, where consumers do not arrive."""
    wait = find(p, "mbarrier_wait", role="producer", barrier="o_free")
    first = find(p, "when", role="producer")
    return moved(moved(p, wait, first), find(p, "advance", role="producer", ring="o"), first)


def released_early(p: Program) -> Program:
    arrive = find(p, "mbarrier_arrive", role="consumer0", barrier="k_empty", nth=-1)
    return moved(p, arrive, find(p, "mma_wait", role="consumer0", nth=-3))


def packed_early(p: Program) -> Program:
    """P is overwritten before P V is known to be done."""
    return moved(p, find(p, "convert", role="consumer0", nth=-2), find(p, "mma_wait", role="consumer0", nth=-2))


def read_by_another(p: Program) -> Program:
    return faults.reading(p, find(p, "row_max", role="consumer1"), "S0")


def barriers(p: Program) -> Program:
    more = tuple(Barrier(name=f"spare{i}", kind="named", count=4) for i in range(14))
    return replace(p, barriers=p.barriers + more)


PATHS: dict[str, dict[str, Any]] = {
    "fa3": LONGER,
    "fa3 fp8": {**LONGER, "dtype": "fp8"},
    "fa3 96": {**LONGER, "head_dim": 96},
    "fa2": LONGER,
    "standard": {"seqlen_q": 40, "seqlen_kv": 300},
    "fa1": {"seqlen_q": 40, "seqlen_kv": 300},
}

EXPECT = {"barrier": "k_full"}
#: name: (schedule, how to break it, kind of the first finding, its culprit: parts of its fields)
FAULTS: dict[str, tuple[str, Callable[[Program], Program], str, dict[str, Any]]] = {
    "missing wait for K": ("fa3", without_wait("consumer0", "k_full", 2), "read before data",
        {"role": "consumer0", "buffer": "Ks", "barrier": "k_full", "op": "wgmma S0"}),
    "missing wait for V": ("fa3", without_wait("consumer0", "v_full"), "read before data",
        {"role": "consumer0", "buffer": "Vs", "barrier": "v_full", "op": "wgmma O0"}),
    "missing wait for Q": ("fa3", without_wait("consumer1", "q_full"), "read before data",
        {"role": "consumer1", "buffer": "Qs1", "barrier": "q_full"}),
    "missing wait for an empty stage": ("fa3", without_wait("producer", "v_empty"), "write before release",
        {"role": "producer", "buffer": "Vs", "barrier": "v_empty", "op": "tma_load Vs"}),
    "missing wait for Q's release": ("fa3", without_wait("producer", "q_empty"), "write before release",
        {"role": "producer", "buffer": "Qs0", "barrier": "q_empty"}),
    "missing wait for O to leave": ("fa3", without_wait("producer", "o_free"), "write before release",
        {"role": "producer", "buffer": "Vs", "barrier": "o_free"}),
    "missing release of K": ("fa3", without_op("mbarrier_arrive", "consumer0", barrier="k_empty"), "deadlock",
        {"role": "producer", "barrier": "k_empty[0]", "phase": 0}),
    "missing release of V": ("fa3", without_op("mbarrier_arrive", "consumer1", -1, barrier="v_empty"), "deadlock",
        {"role": "producer", "barrier": "v_empty"}),
    "missing release of Q": ("fa3", without_op("mbarrier_arrive", "consumer1", barrier="q_empty"), "deadlock",
        {"role": "producer", "barrier": "q_empty"}),
    "wrong phase, consumer": ("fa3", attribute("mbarrier_wait", "consumer0", 0, {"barrier": "k_full"}, previous=True),
        "read before data", {"role": "consumer0", "buffer": "Ks", "barrier": "k_full"}),
    "wait before first use": ("fa3", attribute("mbarrier_wait", "producer", 0, {"barrier": "k_empty"}, previous=None),
        "deadlock", {"role": "producer", "barrier": "k_empty[0]", "phase": 0}),
    "one arrival too few": ("fa3", lambda p: counting(p, "k_empty", 7), "arrival count", {"barrier": "k_empty"}),
    "half of the arrivals": ("fa3", lambda p: counting(p, "k_empty", 4), "write before release",
        {"role": "producer", "buffer": "Ks", "barrier": "k_empty"}),
    "one arrival too many": ("fa3", lambda p: counting(p, "k_empty", 9), "deadlock", {"role": "producer", "barrier": "k_empty"}),
    "an arrival made twice": ("fa3",
        lambda p: repeated(p, find(p, "mbarrier_arrive", role="consumer0", barrier="v_empty", nth=-1)), "arrival count",
        {"role": "consumer0", "barrier": "v_empty", "sentence": "someone arrives too often"}),
    "too few bytes expected": ("fa3", attribute("mbarrier_expect", "producer", 0, {"barrier": "q_full"}, of=("Qs0",)), "bytes",
        {"role": "producer", "barrier": "q_full", "op": "tma_load Qs1"}),
    "too many bytes expected": ("fa3", attribute("mbarrier_expect", "producer", 0, EXPECT, of=("Ks", "Ks")), "bytes",
        {"barrier": "k_full[0]"}),
    "no bytes expected": ("fa3", without_op("mbarrier_expect", "producer", barrier="v_full"), "bytes", {"barrier": "v_full"}),
    "ring off by one, consumer": ("fa3", without_op("advance", "consumer0", ring="k"), "write before release",
        {"buffer": "Ks", "barrier": "k_empty"}),
    "ring off by one, producer": ("fa3", lambda p: repeated(p, find(p, "advance", role="producer", ring="v")), "deadlock",
        {"barrier": "v_full"}),
    "a wait on another ring's stage": ("fa3", attribute("mbarrier_wait", "consumer0", 1, {"barrier": "v_full"}, ring="k"),
        "read before data", {"role": "consumer0", "buffer": "Vs"}),
    "P read before it is stored": ("fa3 96", without_op("stmatrix", "consumer0"), "read without data",
        {"role": "consumer0", "buffer": "P0"}),
    "P overwritten while it is read": ("fa3", packed_early, "write before release",
        {"role": "consumer0", "buffer": "P0", "op": "convert P0"}),
    "P's proxy fence is missing": ("fa3 96", without_op("fence_async", "consumer1"), "missing proxy fence",
        {"role": "consumer1", "buffer": "P1", "op": "wgmma O1"}),
    "O's proxy fence is missing": ("fa3", without_op("fence_async", "consumer0"), "missing proxy fence",
        {"role": "consumer1", "buffer": "Vs.O0", "op": "tma_store O"}),
    "V transposed without a fence": ("fa3 fp8", without_op("fence_async", "transpose"), "missing proxy fence",
        {"role": "consumer0", "buffer": "Vs", "barrier": "v_full"}),
    "V transposed before it came": ("fa3 fp8", without_wait("transpose", "vt_full"), "read before data",
        {"role": "transpose", "buffer": "Vts", "barrier": "vt_full"}),
    "missing mma_wait before S is read": ("fa3", without_op("mma_wait", "consumer0", 3), "read before data",
        {"role": "consumer0", "buffer": "S0", "op": "row_max"}),
    "mma_wait leaves one group too many": ("fa3", attribute("mma_wait", "consumer0", 4, {}, arg=1), "read before data",
        {"role": "consumer0", "buffer": "O0", "op": "rescale"}),
    "missing mma_commit": ("fa3", without_op("mma_commit", "consumer1"), "read before data",
        {"role": "consumer1", "buffer": "S1"}),
    "released before the product is done": ("fa3", released_early, "write before release",
        {"role": "producer", "buffer": "Ks", "barrier": "k_empty"}),
    "ping-pong barrier swapped": ("fa3", swapped_turns, "deadlock", {"role": "consumer1", "barrier": "turn1"}),
    "ping-pong begins with the wrong one": ("fa3", attribute("named_arrive", "consumer1", 0, {}, barrier="turn1"),
        "named barrier", {"role": "consumer1", "barrier": "turn1"}),
    "ping-pong without its first arrival": ("fa3", without_op("named_arrive", "consumer1"), "deadlock",
        {"role": "consumer0", "barrier": "turn0"}),
    "ping-pong without an arrival": ("fa3", without_op("named_arrive", "consumer0", 1), "deadlock",
        {"role": "consumer1", "barrier": "turn1"}),
    "ping-pong without a wait": ("fa3", without_op("named_sync", "consumer0"), "named barrier", {"barrier": "turn"}),
    "O written while V is read": ("fa3", without_op("named_sync", "consumer0", barrier="epilogue"), "read before data",
        {"barrier": "epilogue"}),
    "O sent before all of it is stored": ("fa3", without_op("named_sync", "consumer1", -1, barrier="epilogue"),
        "read without data", {"role": "consumer1", "buffer": "Vs.O0", "op": "tma_store"}),
    "V's buffer given back while O leaves": ("fa3", attribute("tma_store", "consumer1", 1, {}, wait=None),
        "write before release", {"buffer": "Vs", "op": "tma_load Vs"}),
    "a tile without keys waits for an arrival": ("fa3", arriving_for_nothing, "deadlock",
        {"role": "producer", "barrier": "o_free"}),
    "another warpgroup's registers": ("fa3", read_by_another, "read without data", {"role": "consumer1", "buffer": "S0"}),
    "registers: more than the pool": ("fa3", lambda p: registers(p, producer=40), "budget",
        {"sentence": "40 x 1 + 240 x 2 = 520 of 168 x 3 = 504"}),
    "registers: less than the pool": ("fa3", lambda p: registers(p, consumer=232), "budget",
        {"sentence": "24 x 1 + 232 x 2 = 488 of 168 x 3 = 504"}),
    "registers: no multiple of 8": ("fa3", lambda p: registers(p, producer=28), "budget", {"sentence": "multiples of 8"}),
    "shared memory": ("fa3", lambda p: replace(p, smem_bytes=300_000), "budget", {"sentence": "300000 B of shared memory"}),
    "seventeen named barriers": ("fa3", barriers, "budget", {"sentence": "17 named barriers"}),
    "tensor memory": ("fa3", lambda p: replace(p, tmem_columns=640), "budget", {"sentence": "640 columns"}),
    "cp.async without wait_group": ("fa2", without_op("wait_group"), "read before data", {"buffer": "Qs", "op": "mma S"}),
    "cp.async waits for all but the last": ("fa2", attribute("wait_group", "compute", 1, {}, arg=1), "read before data",
        {"buffer": "Vs", "op": "mma Oacc"}),
    "cp.async without a barrier": ("fa2", without_op("barrier"), "read before data", {"buffer": "Qs", "barrier": "bar0"}),
    "K overwritten without a barrier": ("fa2", without_op("barrier", nth=1), "read before data", {"barrier": "bar0"}),
    "O read back without a barrier": ("fa2", without_op("barrier", nth=-1), "read before data", {"buffer": "Oout.smem"}),
    "chunks two deep, waited for as if three": ("standard", attribute("wait_group", "compute", 1, {}, arg=2),
        "read before data", {"buffer": "Ps1", "op": "mma Oacc"}),
    "fragments before their tile": ("fa1", without_op("barrier"), "read before data", {"buffer": "KVs"}),
}  # fmt: skip


def broken(fault: str) -> Program:
    base, breaking, _, _ = FAULTS[fault]
    return breaking(lowered(base.split()[0], **PATHS[base]))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught_with_their_culprit(fault: str) -> None:
    _, _, kind, culprit = FAULTS[fault]
    findings = found(broken(fault))
    assert findings, "nothing was found"
    first = findings[0]
    assert first.kind == kind, str(first)
    for name, part in culprit.items():
        value = getattr(first, name)
        assert (part in value) if isinstance(part, str) else value == part, str(first)


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 25
    assert {kind for _, _, kind, _ in FAULTS.values()} <= set(KINDS)


@pytest.mark.parametrize("fault", ["missing wait for V", "O's proxy fence is missing", "missing mma_wait before S is read",
                                   "V's buffer given back while O leaves", "missing wait for O to leave"])  # fmt: skip
def test_a_fault_is_found_where_this_timing_survives_it(fault: str) -> None:
    """The engine ends, and no sooner than it could: luck is no proof."""
    program = broken(fault)
    queue, miss = program.tiles.column("q_block") * 0, program.tiles.column("q_block")[: len(program.tensors)] * 0
    queue = queue.cumsum() + range(len(program.tiles))
    job = make_job(program, H200, clock_mhz=1500.0, slots=1, queue=queue, miss_ppm=miss, shares=1, hbm_bytes_per_s=3e12)
    assert run_fast(job).ticks > 0
    assert found(program)


# --- what a verdict says ---


def test_a_verdict_names_op_block_buffer_barrier_and_the_last_events() -> None:
    program = broken("missing wait for V")
    text = str(check_programs((program,), H200))
    for part in (
        "fa3_fwd on h200", "read before data: consumer0", "reads Vs stage", "i=0", "against  producer: tma_load Vs",
        "barrier  v_full[", "before   ",
    ):  # fmt: skip
        assert part in text


def test_a_deadlock_says_who_waits_for_whom() -> None:
    sentence = found(broken("missing release of K"))[0].sentence
    assert sentence.startswith("producer waits for k_empty[0] phase 0 (4 of 8 arrivals), where consumer0 would arrive and waits")
    assert "consumer1 has arrived and waits for" in sentence


def test_orders_are_told_on_request() -> None:
    verdict = check(get_schedule("fa2"), H200, problem(causal=True), orders=True)
    assert any(o.buffer == "Vs" and o.by == "compute: barrier" and "mma Oacc" in o.later for o in verdict.orders)
    assert not check(get_schedule("fa2"), H200, problem(causal=True)).orders


def test_index_of_a_loop_names_the_block() -> None:
    first = found(broken("missing mma_wait before S is read"))[0]
    assert first.at is not None
    assert first.at.loops == (("i", 0),)
    assert first.at.block.endswith("i=0")
    assert isinstance(Index(const=1), Index)


def test_a_k_that_comes_back_to_the_first_of_uneven_stages_meets_the_next_ones() -> None:
    """FA4 at DeepSeek's shape, where one CTA's three stages have room for two K and a V: without the further wait that this
    takes, K is overwritten while products read it."""
    shape: dict[str, Any] = {"seqlen_q": 256, "seqlen_kv": 700, "head_dim": 192, "head_dim_v": 128, "causal": True}
    gpu, attention = load_gpu("b200"), Attention(batch=1, heads_q=1, **shape)
    (program,) = get_schedule("fa4").lower(gpu, attention)
    assert check_programs((program,), gpu).clean
    waits = [
        i
        for i, (s, after) in enumerate(zip(program.statements, program.statements[1:], strict=False))
        if s.kind == after.kind == "mbarrier_wait" and s.attrs["ring"] == "v" and after.attrs["ring"] == "k"
    ]
    assert len(waits) == 1
    found = check_programs((without(program, waits[0]),), gpu, enough=1).findings
    assert [(f.kind, f.buffer) for f in found] == [("write before release", "KV")]
