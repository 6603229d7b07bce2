"""Closed-form IO against loops that move every tile, its limits, and the FA1 paper's measured shape."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
from flashsim.model.attention import Attention
from flashsim.model.traffic import Traffic, fa1_bytes, fa2_bytes, io_lower_bound, standard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCK = st.integers(1, 24)
FORMS = [fa1_bytes, fa2_bytes]


class Meter:
    """Bytes by tensor, added one row range at a time."""

    def __init__(self) -> None:
        self.moved: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def read(self, name: str, *sizes: int) -> None:
        self._move(name, 0, *sizes)

    def write(self, name: str, *sizes: int) -> None:
        self._move(name, 1, *sizes)

    def _move(self, name: str, way: int, *sizes: int) -> None:
        amount = 1
        for size in sizes:
            amount *= size
        self.moved[name][way] += amount

    def agrees_with(self, traffic: Traffic) -> None:
        assert {k: tuple(v) for k, v in self.moved.items() if any(v)} == dict(traffic.by_tensor)
        assert traffic.read_bytes == sum(v[0] for v in self.moved.values())
        assert traffic.write_bytes == sum(v[1] for v in self.moved.values())
        assert traffic.total_bytes == traffic.read_bytes + traffic.write_bytes


@st.composite
def problems(draw: st.DrawFn) -> Attention:
    heads_kv = draw(st.integers(1, 2))
    return Attention(
        batch=draw(st.integers(1, 2)),
        heads_q=heads_kv * draw(st.integers(1, 3)),
        heads_kv=heads_kv,
        seqlen_q=draw(st.integers(1, 30)),
        seqlen_kv=draw(st.integers(1, 30)),
        head_dim=draw(st.integers(1, 5)),
        head_dim_v=draw(st.integers(1, 5)),
        causal=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bf16", "fp8", "fp32"])),
        pass_=draw(st.sampled_from(["fwd", "bwd", "fwd+bwd"])),
    )


def blocks(rows: int, size: int) -> list[range]:
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def visible(a: Attention, rows: range, keys: range) -> bool:
    """Whether any query of ``rows`` sees any of ``keys``, pair by pair."""
    return any(not a.causal or j <= i + a.seqlen_kv - a.seqlen_q for i in rows for j in keys)


def key_gradients(a: Attention, m: Meter) -> None:
    shared = a.heads_q > a.heads_kv
    for _ in range(a.batch * a.heads_q * shared):
        for name, cols in (("dKpart", a.head_dim), ("dVpart", a.head_dim_v)):
            m.write(name, a.seqlen_kv, cols, a.dtype_bytes)
            m.read(name, a.seqlen_kv, cols, a.dtype_bytes)
    for _ in range(a.batch * a.heads_kv):
        m.write("dK", a.seqlen_kv, a.head_dim, a.dtype_bytes)
        m.write("dV", a.seqlen_kv, a.head_dim_v, a.dtype_bytes)


def fa1_loop(a: Attention, m: Meter, block_q: int, block_kv: int, *, back: bool, reuse: bool) -> None:
    """FA1 algorithms 1 and 4 for every head: a Q block's last outer step is the last that shows it a key."""
    d, dv, e = a.head_dim, a.head_dim_v, a.dtype_bytes
    q_blocks, kv_blocks = blocks(a.seqlen_q, block_q), blocks(a.seqlen_kv, block_kv)
    for head in range(a.batch * a.heads_q):
        for j, keys in enumerate(kv_blocks):
            if not reuse or head % (a.heads_q // a.heads_kv) == 0:
                m.read("K", len(keys), d, e)
                m.read("V", len(keys), dv, e)
            for rows in q_blocks:
                if j > 0 and not visible(a, rows, keys):
                    continue
                last = not any(visible(a, rows, later) for later in kv_blocks[j + 1 :])
                n = len(rows)
                m.read("Q", n, d, e)
                if back:
                    m.read("O", n, dv, e)
                    m.read("dO", n, dv, e)
                    m.read("LSE", n, 4)
                scratch = {"dQtmp": d} if back else {"Otmp": dv, "m": 1, "l": 1}
                for name, cols in scratch.items():
                    if j > 0:
                        m.read(name, n, cols, 4)
                    if not last:
                        m.write(name, n, cols, 4)
                if last and back:
                    m.write("dQ", n, d, e)
                elif last:
                    m.write("O", n, dv, e)
                    m.write("LSE", n, 4)
    if back:
        key_gradients(a, m)


def fa2_forward_loop(a: Attention, m: Meter, block_q: int, block_kv: int) -> None:
    for _ in range(a.batch * a.heads_q):
        for rows in blocks(a.seqlen_q, block_q):
            seen = [keys for keys in blocks(a.seqlen_kv, block_kv) if visible(a, rows, keys)]
            if seen:
                m.read("Q", len(rows), a.head_dim, a.dtype_bytes)
            for keys in seen:
                m.read("K", len(keys), a.head_dim, a.dtype_bytes)
                m.read("V", len(keys), a.head_dim_v, a.dtype_bytes)
            m.write("O", len(rows), a.head_dim_v, a.dtype_bytes)
            m.write("LSE", len(rows), 4)


def fa2_backward_loop(a: Attention, m: Meter, block_q: int, block_kv: int) -> None:
    d, dv, e = a.head_dim, a.head_dim_v, a.dtype_bytes
    for _ in range(a.batch * a.heads_q):
        for rows in blocks(a.seqlen_q, block_q):  # preprocess, and the conversion of dQ afterwards
            n = len(rows)
            m.read("O", n, dv, e)
            m.read("dO", n, dv, e)
            m.write("D", n, 4)
            m.write("dQsum", n, d, 4)
            m.read("dQsum", n, d, 4)
            m.write("dQ", n, d, e)
        for keys in blocks(a.seqlen_kv, block_kv):
            m.read("K", len(keys), d, e)
            m.read("V", len(keys), dv, e)
            for rows in blocks(a.seqlen_q, block_q):
                if visible(a, rows, keys):
                    m.read("Q", len(rows), d, e)
                    m.read("dO", len(rows), dv, e)
                    m.read("LSE", len(rows), 4)
                    m.read("D", len(rows), 4)
                    m.write("dQsum", len(rows), d, 4)
    key_gradients(a, m)


def standard_loop(a: Attention, m: Meter, *, back: bool, mask: bool, dropout: bool) -> None:
    """Kernel by kernel: (reads, writes). dV and dK are left to ``key_gradients``; a dropout mask is bytes."""
    s = a.seqlen_q * a.seqlen_kv
    size = {
        "Q": a.seqlen_q * a.head_dim, "K": a.seqlen_kv * a.head_dim, "V": a.seqlen_kv * a.head_dim_v,
        "O": a.seqlen_q * a.head_dim_v, "S": s, "P": s, "dropout": s,
    }  # fmt: skip
    kernels = [("Q K", "S"), ("S", "S"), ("S", "P"), ("P", "P dropout"), ("P V", "O")]
    wanted = [True, mask, True, dropout, True]
    if back:
        kernels = [
            ("P dO", ""), ("dO V", "dP"), ("dP dropout", "dP"), ("P dP", "dS"), ("dS", "dS"),
            ("dS K", "dQ"), ("dS Q", ""),
        ]  # fmt: skip
        wanted = [True, True, dropout, True, mask, True, True]
    for _ in range(a.batch * a.heads_q):
        for (reads, writes), runs in zip(kernels, wanted, strict=True):
            for names, move in ((reads, m.read), (writes, m.write)):
                for name in names.split() if runs else ():
                    drop = name == "dropout"
                    move(name, size[name if drop else name.removeprefix("d")], 1 if drop else a.dtype_bytes)
    if back:
        key_gradients(a, m)


@given(problems(), BLOCK, BLOCK, st.booleans())
@settings(max_examples=250, deadline=None)
def test_fa1_is_the_loop_of_its_algorithms(a: Attention, block_q: int, block_kv: int, reuse: bool) -> None:
    m = Meter()
    for name in a.pass_.split("+"):
        fa1_loop(a, m, block_q, block_kv, back=name == "bwd", reuse=reuse)
    m.agrees_with(fa1_bytes(a, block_q=block_q, block_kv=block_kv, reuse=reuse))


@given(problems(), BLOCK, BLOCK)
@settings(max_examples=250, deadline=None)
def test_fa2_is_the_loop_of_its_algorithms(a: Attention, block_q: int, block_kv: int) -> None:
    m = Meter()
    for name in a.pass_.split("+"):
        (fa2_backward_loop if name == "bwd" else fa2_forward_loop)(a, m, block_q, block_kv)
    m.agrees_with(fa2_bytes(a, block_q=block_q, block_kv=block_kv))


@given(problems(), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_standard_is_the_sum_of_its_kernels(a: Attention, mask: bool, dropout: bool) -> None:
    m = Meter()
    for name in a.pass_.split("+"):
        standard_loop(a, m, back=name == "bwd", mask=mask, dropout=dropout)
    m.agrees_with(standard_bytes(a, mask_pass=mask, dropout_pass=dropout))


@given(problems(), BLOCK, BLOCK)
@settings(max_examples=150, deadline=None)
def test_reuse_brings_fa2_down_to_the_compulsory_bytes(a: Attention, block_q: int, block_kv: int) -> None:
    """But for Q blocks that see no key; backward adds D, a second dO, dQ's fp32 sums and heads' partials."""
    traffic = fa2_bytes(a, block_q=block_q, block_kv=block_kv, reuse=True)
    rows, e = a.batch * a.heads_q * a.seqlen_q, a.dtype_bytes
    keys = range(a.seqlen_kv)
    blind = sum(len(r) for r in blocks(a.seqlen_q, block_q) if not visible(a, r, keys)) * a.batch * a.heads_q
    read, written = a.compulsory_read_bytes, a.compulsory_write_bytes
    if "fwd" in a.pass_:
        read -= blind * a.head_dim * e
    if "bwd" in a.pass_:
        fetched = a.head_dim * e + a.head_dim_v * e + 4 + 4 + a.head_dim * 4  # Q, dO, LSE, D and dQ's sums of a row
        read += rows * (a.head_dim_v * e + 4 + 2 * a.head_dim * 4) - blind * fetched
        written += rows * (4 + 2 * a.head_dim * 4) - blind * a.head_dim * 4
    partials = [sum(traffic.by_tensor.get(name, (0, 0))[way] for name in ("dKpart", "dVpart")) for way in (0, 1)]
    assert (traffic.read_bytes - partials[0], traffic.write_bytes - partials[1]) == (read, written)


@given(problems(), BLOCK)
@settings(max_examples=150, deadline=None)
def test_fa1_with_all_keys_in_one_block_moves_the_compulsory_bytes(a: Attention, block_q: int) -> None:
    traffic = fa1_bytes(a, block_q=block_q, block_kv=a.seqlen_kv, reuse=True)
    partials = sum(sum(traffic.by_tensor.get(name, (0, 0))) for name in ("dKpart", "dVpart"))
    assert traffic.total_bytes - partials == a.compulsory_read_bytes + a.compulsory_write_bytes


@given(problems(), BLOCK, BLOCK, BLOCK)
@settings(max_examples=150, deadline=None)
def test_fa1_bytes_never_rise_with_block_kv(a: Attention, block_q: int, one: int, other: int) -> None:
    small, large = sorted((one, other))
    fewer = fa1_bytes(a, block_q=block_q, block_kv=large).total_bytes
    assert fewer <= fa1_bytes(a, block_q=block_q, block_kv=small).total_bytes


@given(problems(), BLOCK, BLOCK)
@settings(max_examples=100, deadline=None)
def test_passes_add_up(a: Attention, block_q: int, block_kv: int) -> None:
    fwd, bwd, both = (Attention(**{**vars(a), "pass_": p}) for p in ("fwd", "bwd", "fwd+bwd"))
    for form in FORMS:
        total = [form(x, block_q=block_q, block_kv=block_kv).total_bytes for x in (fwd, bwd, both)]
        assert total[0] + total[1] == total[2]


def test_gpt2_medium_against_the_fa1_paper() -> None:
    """FA1 paper, figure 2 left: 40.3 GB standard and 4.4 GB FlashAttention measured, fwd+bwd. Nothing is fitted.

    Standard lies between its forms without and with mask and dropout kernels. FA1's 256-key blocks request 6.5 GB,
    more than measured; the compulsory bytes are less.
    """
    a = Attention(batch=64, heads_q=16, seqlen_q=1024, head_dim=64, dtype="fp16", pass_="fwd+bwd")
    gb = {
        (mask, drop): round(standard_bytes(a, mask_pass=mask, dropout_pass=drop).total_bytes / 1e9, 2)
        for mask in (False, True)
        for drop in (False, True)
    }
    assert gb == {(False, False): 25.23, (True, False): 33.82, (False, True): 35.97, (True, True): 44.56}
    requested = fa1_bytes(a, block_q=16, block_kv=256).total_bytes / 1e9
    assert requested == pytest.approx(6.51, abs=0.005)
    assert (a.compulsory_read_bytes + a.compulsory_write_bytes) / 1e9 < 4.4 < requested


def test_io_lower_bound_falls_with_memory_and_refuses_what_it_does_not_cover() -> None:
    assert io_lower_bound(1024, 64, 64 * 64) == 1024**2
    assert io_lower_bound(1024, 64, 8192) == io_lower_bound(1024, 64, 4096) / 2
    for m in (63, 64 * 1024 + 1):
        sentence = f"m is {m} elements; the bound holds from d = 64 to n d = 65536: change m"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            io_lower_bound(1024, 64, m)
    with pytest.raises(ValueError, match=r"^n is 0; it must be at least 1: change n$"):
        io_lower_bound(0, 64, 64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["block_q", "block_kv"])
def test_blocks_below_one_are_refused(form: Any, name: str) -> None:
    a = Attention(batch=1, heads_q=1, seqlen_q=4, head_dim=2)
    with pytest.raises(ValueError, match=f"^{name} is 0; it must be at least 1: change {name}$"):
        form(a, **{"block_q": 2, "block_kv": 2, name: 0})


def test_traffic_that_does_not_add_up_is_refused() -> None:
    sentence = "read_bytes, write_bytes are (1, 2) and by_tensor adds up to (1, 3); they must be equal: change either"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Traffic(read_bytes=1, write_bytes=2, by_tensor={"O": (1, 3)})
