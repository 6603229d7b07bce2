"""The closed forms of IO against loops that count block by block, a simulated cache, and what FA1 prints."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from counted_traffic import counted_fa1, counted_fa2, counted_standard, head_visits, ledger, nonzero, ranges
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsim.model.attention import DTYPE_BYTES, PASSES, Attention
from flashsim.model.traffic import (
    MASKS,
    Traffic,
    fa1_bytes,
    fa2_bytes,
    io_lower_bound_elements,
    paper_block_sizes,
    standard_bytes,
)

GB = 1e9
SIZES = st.integers(1, 30)
PROBLEMS = st.builds(
    lambda heads_kv, group, **rest: Attention(batch=2, heads_q=heads_kv * group, heads_kv=heads_kv, **rest),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=SIZES,
    seqlen_kv=SIZES,
    head_dim=st.integers(1, 9),
    head_dim_v=st.integers(1, 9),
    causal=st.booleans(),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    pass_=st.sampled_from(PASSES),
)
BLOCKS = st.integers(1, 33)
#: FA1's example (figure 2): GPT-2 medium on an A100, batch 64, forward and backward.
GPT2 = Attention(batch=64, heads_q=16, seqlen_q=1024, head_dim=64, dtype="fp16", pass_="fwd+bwd")
A100_SMS, A100_L2_BYTES = 108, 40 * 2**20


@settings(max_examples=150, deadline=None)
@given(PROBLEMS, BLOCKS, BLOCKS, st.booleans())
def test_fa1_is_what_its_loops_move(a: Attention, block_q: int, block_kv: int, precompute_d: bool) -> None:
    closed = fa1_bytes(a, block_q=block_q, block_kv=block_kv, precompute_d=precompute_d)
    assert ledger(closed) == nonzero(counted_fa1(a, block_q, block_kv, precompute_d))


@settings(max_examples=150, deadline=None)
@given(PROBLEMS, BLOCKS, BLOCKS)
def test_fa2_is_what_its_loops_move(a: Attention, block_q: int, block_kv: int) -> None:
    assert ledger(fa2_bytes(a, block_q=block_q, block_kv=block_kv)) == nonzero(counted_fa2(a, block_q, block_kv))


@settings(max_examples=150, deadline=None)
@given(PROBLEMS, BLOCKS, st.sampled_from(MASKS), st.booleans())
def test_standard_is_what_its_kernels_move(a: Attention, tile: int, mask: str, dropout: bool) -> None:
    a = replace(a, causal=a.causal and mask != "none")
    closed = standard_bytes(a, tile=tile, mask=mask, dropout=dropout)
    assert ledger(closed) == nonzero(counted_standard(a, tile, mask, dropout))


def test_standard_masks_where_the_problem_is_causal() -> None:
    causal = replace(GPT2, causal=True)
    assert standard_bytes(causal) == standard_bytes(causal, mask="add")
    assert standard_bytes(GPT2) == standard_bytes(GPT2, mask="none")
    assert standard_bytes(causal).total_bytes == standard_bytes(GPT2, mask="add").total_bytes  # nothing is skipped


def test_a_forward_counted_by_hand() -> None:
    """One head, 4 x 4, d = 2, K/V blocks of 2: Q twice, K and V once, O out in fp32, back, out in fp16."""
    a = Attention(batch=1, heads_q=1, seqlen_q=4, head_dim=2, dtype="fp16")
    t = fa1_bytes(a, block_q=4, block_kv=2)
    assert t.reads == {"K": 16, "V": 16, "Q": 32, "O_partial": 32, "m": 16, "l": 16}
    assert t.writes == {"O_partial": 32, "m": 16, "l": 16, "O": 16, "LSE": 16}
    assert (t.read_bytes, t.write_bytes, t.total_bytes) == (128, 96, 224)


@given(PROBLEMS)
def test_one_block_moves_only_what_it_must(a: Attention) -> None:
    """A block that holds the whole sequence: FA1 and FA2 forward read and write each tensor once a query head."""
    a = replace(a, pass_="fwd", heads_kv=a.heads_q)
    for t in (f(a, block_q=30, block_kv=30) for f in (fa1_bytes, fa2_bytes)):
        assert t.write_bytes == a.compulsory_write_bytes
        blind = a.causal and a.seqlen_q > a.seqlen_kv
        assert t.read_bytes == a.compulsory_read_bytes or blind


@settings(max_examples=80, deadline=None)
@given(PROBLEMS, BLOCKS, BLOCKS)
def test_both_passes_move_the_sum_of_each(a: Attention, block_q: int, block_kv: int) -> None:
    for count in (
        lambda x: fa1_bytes(x, block_q=block_q, block_kv=block_kv),
        lambda x: fa2_bytes(x, block_q=block_q, block_kv=block_kv),
        lambda x: standard_bytes(x, dropout=True),
    ):
        fwd, bwd, both = (count(replace(a, pass_=p)) for p in PASSES)
        assert both.streams == fwd.streams + bwd.streams


class Cache:
    """A write-back LRU of ``size`` bytes before HBM, block by block; a write takes its line without a fetch."""

    def __init__(self, size: float) -> None:
        self.size, self.lines, self.read, self.written = size, OrderedDict[Any, tuple[int, bool]](), 0, 0

    def touch(self, line: Any, size: int, write: bool = False) -> None:
        dirty = self.lines.pop(line, (0, False))[1] if line in self.lines else None
        self.read += size if dirty is None and not write else 0
        self.lines[line] = (size, write or bool(dirty))
        while sum(s for s, _ in self.lines.values()) > self.size:
            self.evict()

    def evict(self) -> None:
        _, (size, dirty) = self.lines.popitem(last=False)
        self.written += size if dirty else 0

    def flush(self) -> tuple[int, int]:
        while self.lines:
            self.evict()
        return self.read, self.written


def walk_fa1(a: Attention, block: int, cache: Cache) -> None:
    for head in range(a.batch * a.heads_q):
        pairs = list(head_visits(a, block, block))
        for rows, keys in pairs:
            r, k, d, e = len(rows), len(keys), a.head_dim, a.dtype_bytes
            if rows.start == 0:
                cache.touch(("K", head, keys), k * d * e)
                cache.touch(("V", head, keys), k * d * e)
            cache.touch(("Q", head, rows), r * d * e)
            scratch = [("O_partial", r * d * 4), ("m", r * 4), ("l", r * 4)]
            last = keys.stop == a.seqlen_kv
            for name, size in scratch if keys.start else []:
                cache.touch((name, head, rows), size)
            for name, size in [("O", r * d * e), ("LSE", r * 4)] if last else scratch:
                cache.touch((name, head, rows), size, write=True)


def walk_fa2(a: Attention, block: int, cache: Cache) -> None:
    for head in range(a.batch * a.heads_q):
        for rows in ranges(a.seqlen_q, block):
            cache.touch(("Q", head, rows), len(rows) * a.head_dim * a.dtype_bytes)
            for keys in ranges(a.seqlen_kv, block):
                for name in "KV":
                    cache.touch((name, head // a.group, keys), len(keys) * a.head_dim * a.dtype_bytes)
            cache.touch(("O", head, rows), len(rows) * a.head_dim * a.dtype_bytes, write=True)
            cache.touch(("LSE", head, rows), len(rows) * 4, write=True)


@pytest.mark.parametrize(("walk", "count"), [(walk_fa1, fa1_bytes), (walk_fa2, fa2_bytes)])
@pytest.mark.parametrize("seqlen", [64, 61])
def test_hbm_bytes_are_those_of_a_real_cache(
    walk: Callable[[Attention, int, Cache], None], count: Callable[..., Traffic], seqlen: int
) -> None:
    """Heads in turn behind an LRU: with room for a head's reuse a byte crosses once; with half of it, none stays."""
    a = Attention(batch=1, heads_q=3, seqlen_q=seqlen, head_dim=16, dtype="fp16")
    t = count(a, block_q=8, block_kv=8)
    reuse = max(s.reuse_bytes for s in t.streams)
    for room, l2_bytes in ((2 * reuse, reuse), (reuse / 2, reuse - 1), (0, 0)):
        cache = Cache(room)
        walk(a, 8, cache)
        hbm = t.at_hbm(l2_bytes=l2_bytes, live_heads=1)
        assert (hbm.read_bytes, hbm.write_bytes) == cache.flush()


@settings(max_examples=80, deadline=None)
@given(PROBLEMS, BLOCKS, BLOCKS, st.integers(1, 8))
def test_a_larger_l2_never_moves_more(a: Attention, block_q: int, block_kv: int, live: int) -> None:
    for t in (
        standard_bytes(a, tile=block_q),
        fa1_bytes(a, block_q=block_q, block_kv=block_kv),
        fa2_bytes(a, block_q=block_q, block_kv=block_kv),
    ):
        moved = [t.at_hbm(l2_bytes=size, live_heads=live).total_bytes for size in (0, 100, 1000, 10_000, 1e12)]
        assert moved == sorted(moved, reverse=True)
        fewer = t.at_hbm(l2_bytes=1000, live_heads=1).total_bytes
        assert fewer <= t.at_hbm(l2_bytes=1000, live_heads=live).total_bytes <= t.at_hbm(l2_bytes=1000).total_bytes
        settled = t.at_hbm(l2_bytes=1000)
        assert settled.at_hbm(l2_bytes=0) == settled


@given(PROBLEMS, BLOCKS, BLOCKS)
def test_fa2_forward_behind_a_large_l2_is_compulsory(a: Attention, block_q: int, block_kv: int) -> None:
    a = replace(a, pass_="fwd", causal=False)
    hbm = fa2_bytes(a, block_q=block_q, block_kv=block_kv).at_hbm(l2_bytes=1e12)
    assert (hbm.read_bytes, hbm.write_bytes) == (a.compulsory_read_bytes, a.compulsory_write_bytes)


def test_hbm_counts_what_atomics_fetch() -> None:
    """An atomic add to a line that left L2 costs HBM a read and a write, but the SM asked for one transfer."""
    a = Attention(batch=1, heads_q=1, seqlen_q=64, head_dim=8, pass_="bwd")
    t = fa2_bytes(a, block_q=16, block_kv=16)
    added = 4 * 64 * 8 * 4  # four K/V blocks add to every row
    assert t.writes["dQ_sum"] == 64 * 8 * 4 + added
    assert t.reads["dQ_sum"] == 64 * 8 * 4
    spilled = t.at_hbm(l2_bytes=0)
    assert (spilled.reads["dQ_sum"], spilled.writes["dQ_sum"]) == (64 * 8 * 4 + added, 64 * 8 * 4 + added)


def test_figure_2_of_fa1_standard() -> None:
    """40.3 GB measured: softmax, an additive mask and dropout as separate kernels, GEMM tiles re-read from L2."""
    hbm = standard_bytes(GPT2, mask="add", dropout=True).at_hbm(l2_bytes=A100_L2_BYTES, live_heads=8)
    assert hbm.total_bytes / GB == pytest.approx(40.3, rel=0.01)


def test_figure_2_of_fa1_flash() -> None:
    """4.4 GB measured lies between none and all of a head's rows staying in L2 (blocks of 256 keys, an SM a head)."""
    t = fa1_bytes(GPT2, block_q=16, block_kv=256)
    behind = [t.at_hbm(l2_bytes=size).total_bytes / GB for size in (1e12, 0)]
    assert behind[0] < 4.4 < behind[1]
    forward, backward = (max(s.reuse_bytes for s in t.streams if s.kernel == p) * A100_SMS for p in ("fwd", "bwd"))
    assert forward == pytest.approx(A100_L2_BYTES, rel=0.05)  # on the edge: 108 heads come back to as much as L2 holds
    assert backward > 1.3 * A100_L2_BYTES
    fwd, bwd = (fa1_bytes(replace(GPT2, pass_=p), block_q=16, block_kv=256) for p in PASSES[:2])
    mixed = fwd.at_hbm(l2_bytes=1e12).total_bytes + bwd.at_hbm(l2_bytes=0).total_bytes
    assert mixed / GB == pytest.approx(4.4, rel=0.03)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("causal", [False, True])
def test_fa1_moves_less_with_larger_blocks(pass_: str, causal: bool) -> None:
    """Figure 2, middle: bytes fall as the block grows, about as 1 / block while blocks are small."""
    a = replace(GPT2, pass_=pass_, causal=causal)
    moved = [fa1_bytes(a, block_q=16, block_kv=size).total_bytes for size in (16, 32, 64, 128, 256, 512, 1024)]
    assert all(larger < smaller for smaller, larger in pairwise(moved))
    assert moved[1] == pytest.approx(moved[0] / 2, rel=0.05)


def test_fa1_follows_its_theorem() -> None:
    """With the paper's block sizes, elements over N^2 d^2 / M stay within constants while N, d and M vary."""
    ratios = []
    for n in (2048, 8192, 32768):
        for d in (32, 64, 128):
            for m in (8 * 1024, 32 * 1024, 96 * 1024):
                block_q, block_kv = paper_block_sizes(m, d)
                a = Attention(batch=1, heads_q=1, seqlen_q=n, head_dim=d, dtype="fp32")
                elements = fa1_bytes(a, block_q=block_q, block_kv=block_kv).total_bytes / 4
                if m < n * d / 8:
                    ratios.append(elements / io_lower_bound_elements(n, d, m))
    assert len(ratios) > 15
    assert min(ratios) > 8  # an outer step moves Q, O in and O out: 3 N d, and N / (M / 4 d) of them: 12 N^2 d^2 / M
    assert max(ratios) < 16


def test_standard_follows_n_squared() -> None:
    """S and P dominate: four passes over N^2 elements forward, whatever d, and no memory size helps."""
    for n in (4096, 16384):
        for d in (64, 128):
            a = Attention(batch=1, heads_q=1, seqlen_q=n, head_dim=d)
            hbm = standard_bytes(a).at_hbm(l2_bytes=1e12).total_bytes / 2
            assert hbm == 4 * n * n + 4 * n * d


def test_paper_block_sizes() -> None:
    assert paper_block_sizes(48 * 1024, 64) == (64, 192)
    assert paper_block_sizes(1000, 64) == (4, 4)
    assert io_lower_bound_elements(1024, 64, 4096) == 1024 * 1024


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: fa1_bytes(GPT2, block_q=0, block_kv=64), "block_q is 0; it must be at least 1: change block_q"),
        (lambda: fa2_bytes(GPT2, block_q=64, block_kv=-1), "block_kv is -1; it must be at least 1: change block_kv"),
        (lambda: standard_bytes(GPT2, tile=0), "tile is 0; it must be at least 1: change tile"),
        (lambda: standard_bytes(GPT2, mask="rows"), "mask is 'rows'; it must be one of none, add, fill: change mask"),
        (
            lambda: standard_bytes(replace(GPT2, causal=True), mask="none"),
            "mask is 'none' and the problem is causal; it must be add or fill: change mask or causal",
        ),
        (lambda: standard_bytes(GPT2).at_hbm(l2_bytes=-1), "l2_bytes is -1; it must be zero or more: change l2_bytes"),
        (
            lambda: standard_bytes(GPT2).at_hbm(l2_bytes=1, live_heads=0),
            "live_heads is 0; it must be at least 1: change live_heads",
        ),
        (lambda: paper_block_sizes(0, 64), "sram_elements is 0; it must be at least 1: change sram_elements"),
        (
            lambda: io_lower_bound_elements(16, 64, 32),
            "m is 32; the bound holds from d = 64 to n * d = 1024 elements: change m",
        ),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        call()
