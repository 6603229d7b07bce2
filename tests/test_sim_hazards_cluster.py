"""Hazards between the CTAs of a cluster: FA3's multicast of K and V, and FA4's CTA pairs, followed under one happens-before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from faults import changed, counting, find, ordering, without

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Program
from flashsim.model.schedules import get_schedule
from flashsim.sim.hazards import Finding, check, check_programs, runs

#: name: (schedule, GPU, fields, shape): two clusters, and more K/V blocks than stages.
BASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "fa3": ("fa3", "h200", {"block_kv": 64}, {"seqlen_q": 512, "seqlen_kv": 300}),
    "fa3 fp8": ("fa3", "h200", {"block_kv": 64}, {"seqlen_q": 512, "seqlen_kv": 300, "head_dim": 192, "dtype": "fp8"}),
    "fa4": ("fa4", "b200", {"kv_stages": 2}, {"seqlen_q": 1024, "seqlen_kv": 500}),
}


@cache
def lowered(base: str) -> Program:
    name, gpu, fields, shape = BASES[base]
    attention = Attention(**{"batch": 1, "heads_q": 1, "head_dim": 128, **shape})
    (program,) = get_schedule(name, **fields).lower(load_gpu(gpu), attention)
    return program


def found(base: str, program: Program) -> tuple[Finding, ...]:
    return check_programs((program,), load_gpu(BASES[base][1])).findings


# --- clean ---


@pytest.mark.parametrize("base", BASES)
def test_the_ctas_of_a_cluster_are_followed_together(base: str) -> None:
    program = lowered(base)
    assert program.cluster == 2
    verdict = check_programs((program,), load_gpu(BASES[base][1]))
    assert verdict.clean, str(verdict)
    assert not verdict.notes
    assert verdict.tiles == 2 * sum(map(len, runs(program)))


@pytest.mark.parametrize("causal", [False, True])
def test_fa3_shares_loads_only_between_blocks_that_need_the_same(causal: bool) -> None:
    attention = Attention(batch=1, heads_q=1, seqlen_q=512 if causal else 640, head_dim=128, causal=causal)
    with pytest.raises(ValueError, match=r"even number of Q blocks of 128 rows and no mask; set cluster=1"):
        check(get_schedule("fa3", cluster=2), load_gpu("h100"), attention)


# --- faults ---


def statements(p: Program, kind: str, **attrs: Any) -> list[int]:
    return [i for i in ordering(p, [kind]) if all(p.statements[i].attrs.get(name) == value for name, value in attrs.items())]


def each(kind: str, where: dict[str, Any], **attrs: Any) -> Callable[[Program], Program]:
    """All statements of a kind differ."""

    def edit(p: Program) -> Program:
        for number in statements(p, kind, **where):
            p = changed(p, number, **attrs)
        return p

    return edit


def to_its_own(barrier: str, count: int | None = None) -> Callable[[Program], Program]:
    """Arrivals reach only the CTA that makes them, and with ``count`` the barrier counts no others."""

    def edit(p: Program) -> Program:
        p = each("mbarrier_arrive", {"barrier": barrier}, to=None, ctas=None)(p)
        return p if count is None else counting(p, barrier, count)

    return edit


def without_all(kind: str, **attrs: Any) -> Callable[[Program], Program]:
    return lambda p: without(p, *statements(p, kind, **attrs))


def without_last(kind: str, role: str, **attrs: Any) -> Callable[[Program], Program]:
    return lambda p: without(p, find(p, kind, role=role, nth=-1, **attrs))


def one_expect(barrier: str, **attrs: Any) -> Callable[[Program], Program]:
    return each("mbarrier_expect", {"barrier": barrier}, **attrs)


def no_farewell(p: Program) -> Program:
    """The CTAs of a pair free their tensor memory and end without a word to each other."""
    return without(p, *statements(p, "mbarrier_arrive", barrier="freed"), *statements(p, "mbarrier_wait", barrier="freed"))


def alone(p: Program) -> Program:
    """The first CTA's products work on its own tiles only."""
    return each("umma", {"pair": True}, pair=False)(each("zero", {"pair": True}, pair=False)(p))


def odd(p: Program) -> Program:
    return replace(p, tiles=replace(p.tiles, values=p.tiles.values[:-1]))


HALF = 64 * 128  # bytes of half a K tile of FA3's base

#: name: (base, how to break it, kind of the first finding, its culprit: parts of its fields)
FAULTS: dict[str, tuple[str, Callable[[Program], Program], str, dict[str, Any]]] = {
    # FA3: multicast
    "K released to the own CTA only": ("fa3", to_its_own("k_empty"), "deadlock",
        {"role": "producer", "barrier": "k_empty[0] of CTA", "sentence": "8 of 16 arrivals"}),
    "K released to the own CTA only, and counted so": ("fa3", to_its_own("k_empty", 8), "write before release",
        {"role": "producer", "op": "tma_load Ks", "buffer": "Ks", "barrier": "k_empty", "sentence": "of CTA"}),
    "V released to the own CTA only, and counted so": ("fa3", to_its_own("v_empty", 8), "write before release",
        {"role": "producer", "op": "tma_load Vs", "buffer": "Vs", "barrier": "v_empty"}),
    "O's place given back to the own CTA only, and counted so": ("fa3", to_its_own("o_free", 8), "write before release",
        {"role": "producer", "op": "tma_load Vs", "buffer": "Vs", "barrier": "o_free"}),
    "V transposed, released to the own CTA only, and counted so": ("fa3 fp8", to_its_own("vt_empty", 4), "write before release",
        {"role": "producer", "op": "tma_load Vts", "buffer": "Vts", "barrier": "vt_empty"}),
    "half of a cluster's arrivals": ("fa3", lambda p: counting(p, "k_empty", 8), "write before release",
        {"role": "producer", "buffer": "Ks", "barrier": "k_empty"}),
    "no cluster barrier at the start": ("fa3", without_all("cluster_sync"), "early remote access",
        {"sentence": "no cluster_sync comes before"}),
    "a role that skips the cluster barrier": ("fa3", lambda p: without(p, find(p, "cluster_sync", role="consumer1")), "deadlock",
        {"barrier": "cluster_sync"}),
    "a CTA that leaves at once": ("fa3", without_last("mbarrier_wait", "producer", barrier="o_free"), "late remote access",
        {"role": "consumer", "op": "to=all", "sentence": "may have ended when consumer"}),
    "a CTA that leaves before V's stages are free": ("fa3 fp8", without_last("mbarrier_wait", "producer", barrier="vt_empty"),
        "late remote access", {"role": "transpose", "op": "vt_empty"}),
    "bytes of the own half only": ("fa3", one_expect("k_full", bytes=HALF), "bytes",
        {"role": "producer", "barrier": "k_full", "op": "tma_load Ks"}),
    "bytes of a block and a half": ("fa3", one_expect("v_full", bytes=3 * HALF), "bytes", {"barrier": "v_full[0] of CTA"}),
    "no wait for the other CTA's consumers": ("fa3", without_all("mbarrier_wait", barrier="k_empty"), "arrival count",
        {"role": "producer", "barrier": "k_full", "op": "mbarrier_expect", "sentence": "too many"}),
    "an odd number of tiles": ("fa3", odd, "budget", {"sentence": "clusters of 2 CTAs and has 3 tiles"}),
    # FA4: pairs
    "S announced to the own CTA only": ("fa4", each("mbarrier_arrive", {"barrier": "s_full0"}, to=None), "deadlock",
        {"role": "softmax0", "barrier": "s_full0 of CTA 1", "phase": 0}),
    "stages given back to the own CTA only": ("fa4", each("mbarrier_arrive", {"barrier": "kv_empty"}, to=None), "deadlock",
        {"role": "load", "barrier": "kv_empty[0] of CTA 1", "phase": 0}),
    "P announced to the own CTA": ("fa4", each("mbarrier_arrive", {"barrier": "p_full0"}, to=None, ctas=None), "deadlock",
        {"role": "mma", "barrier": "p_full0 of CTA 0", "sentence": "4 of 8 arrivals"}),
    "P of one CTA is enough": ("fa4", lambda p: counting(p, "p_full0", 4), "read before data",
        {"role": "mma", "buffer": "S0.P", "barrier": "p_full0"}),
    "O of one CTA is enough": ("fa4", lambda p: counting(p, "o_rescaled1", 4), "write before release",
        {"role": "mma", "buffer": "O1", "barrier": "o_rescaled1"}),
    "Q of one CTA is expected": ("fa4", one_expect("q_full0", each=None), "bytes",
        {"role": "load", "barrier": "q_full0 of CTA 0", "op": "tma_load Qs0"}),
    "K and V of one CTA are expected": ("fa4", one_expect("kv_full", ctas=1), "bytes",
        {"role": "load", "barrier": "kv_full", "op": "tma_load KV"}),
    "both CTAs expect": ("fa4", one_expect("q_full1", leader=None), "arrival count", {"barrier": "q_full1 of CTA 1"}),
    "K and V counted in the CTA that loads": ("fa4", each("tma_load", {"barrier": "kv_full"}, to=None), "bytes",
        {"role": "mma", "barrier": "kv_full[0] of CTA 0", "sentence": "16384 B to come"}),
    "no cluster barrier at a pair's start": ("fa4", without_all("cluster_sync"), "early remote access",
        {"sentence": "no cluster_sync comes before"}),
    "a pair that allocates one by one": ("fa4", each("tmem_alloc", {}, pair=False), "read before data",
        {"role": "mma", "buffer": "tensor memory", "sentence": "of CTA 1"}),
    "products on the own tiles only": ("fa4", alone, "read without data", {"role": "softmax0", "buffer": "S0"}),
    "a CTA of a pair leaves before its last stage is free": ("fa4", without_last("mbarrier_wait", "load", barrier="kv_empty"),
        "late remote access", {"role": "mma", "op": "kv_empty"}),
    "a pair that parts without a word": ("fa4", no_farewell, "late remote access", {"role": "correction", "op": "o_rescaled"}),
    "tensor memory freed while it is read": ("fa4", without_last("named_sync", "mma", barrier="tmem"), "write before release",
        {"role": "mma", "op": "tmem_free", "buffer": "tensor memory"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_between_ctas_are_caught_with_their_culprit(fault: str) -> None:
    base, breaking, kind, culprit = FAULTS[fault]
    findings = found(base, breaking(lowered(base)))
    assert findings, "nothing was found"
    first = findings[0]
    assert first.kind == kind, str(first)
    for name, part in culprit.items():
        value = getattr(first, name)
        assert (part in value) if isinstance(part, str) else value == part, str(first)


def test_a_race_between_ctas_names_both() -> None:
    base, breaking, *_ = FAULTS["K released to the own CTA only, and counted so"]
    first = found(base, breaking(lowered(base)))[0]
    assert first.at is not None
    assert first.other is not None
    ctas = {site.warps[-1] for site in (first.at, first.other)}
    assert ctas == {"0", "1"}
    assert f"writes Ks stage {first.stage} of CTA {first.other.warps[-1]} while" in first.sentence


def test_a_deadlock_between_ctas_says_who_has_not_arrived() -> None:
    base, breaking, *_ = FAULTS["P announced to the own CTA"]
    sentence = found(base, breaking(lowered(base)))[0].sentence
    assert sentence.startswith("mma of CTA 0 waits for p_full0 of CTA 0 phase 0 (4 of 8 arrivals), where softmax0 of CTA 0 has")
