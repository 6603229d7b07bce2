"""Programs: indices, jumps, counts that agree three ways, sizes that do not grow, and one program printed in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import PAIRS, REFUSED_PAIRS, chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.instructions import COUNTERS, INSTRUCTIONS, counters
from flashsim.model.program import CODE_COLUMNS, Index, Opcode, Program, Statement, Tensor, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.chip import bundle_counts

ALL_SCHEDULES = list(SCHEDULES)
GOLDEN = Path(__file__).parent / "golden" / "test_model_program"
SMALL = st.integers(-3, 3)


def lowered(name: str, gpu: str = "", **shape: Any) -> tuple[Program, ...]:
    fields: dict[str, Any] = {"batch": 1, "heads_q": 2, "seqlen_q": 300, "head_dim": 64, **shape}
    return get_schedule(name).lower(load_gpu(gpu or chip_for(name)), Attention(**fields))


def expanded(program: Program) -> list[dict[str, int]]:
    """Instructions of each tile from ``bundle_counts``."""
    out = []
    for tile in bundle_counts(program).tolist():
        out.append(dict.fromkeys(INSTRUCTIONS, 0))
        for times, bundle in zip(tile, program.bundles, strict=True):
            for name, n in bundle:
                out[-1][name] += n * times
    return out


# --- indices and tensors ---


@given(const=SMALL, a=SMALL, b=SMALL, c=SMALL, arg=SMALL, loop=SMALL, outer=SMALL)
def test_an_index_is_a_sum(const: int, a: int, b: int, c: int, arg: int, loop: int, outer: int) -> None:
    index = Index(const=const, arg="n", arg_coef=a, loop="i", coef=b, outer="j", outer_coef=c)
    assert index.value({"n": arg}, {"i": loop, "j": outer}) == const + a * arg + b * loop + c * outer


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (Index(), "0"),
        (Index(const=-3), "-3"),
        (Index(arg="n"), "n"),
        (Index(arg="n", const=-1, loop="i", coef=-1), "n-i-1"),
        (Index(loop="i", coef=3, const=2), "3*i+2"),
        (Index(arg="n", arg_coef=-1, loop="i", const=1), "-n+i+1"),
        (Index(arg="n", arg_coef=16, loop="i", coef=-16, outer="j", outer_coef=-128, const=-1), "16*n-128*j-16*i-1"),
    ],
)
def test_an_index_prints_as_it_is_written(index: Index, text: str) -> None:
    assert str(index) == text


def test_a_statement_prints_and_does_not_change() -> None:
    s = Statement(kind="load", writes=("Qs",), reads=("Q",), index=Index(arg="q"), attrs={"scoreboard": 2})
    assert str(s) == "load Qs <- Q[q] scoreboard=2"
    with pytest.raises(TypeError):
        s.attrs["scoreboard"] = 3  # type: ignore[index]


def test_blocks_are_clipped_to_their_tensor() -> None:
    t = Tensor(name="S", heads=2, rows=100, cols=70, bytes_per_element=2, block_rows=64, cols_per_block=64)
    assert (t.row_blocks, t.col_blocks, t.blocks) == (2, 2, 4)
    assert t.block_sizes().tolist() == [64 * 64 * 2, 64 * 6 * 2, 36 * 64 * 2, 36 * 6 * 2]
    assert 2 * t.block_sizes().sum() == t.size_bytes


# --- the builder: jumps ---

Nest = list[tuple[str, Any]]  # ("op", name) | ("loop" | "when", (index, body))
NAMES = ("ffma", "fadd", "ex2", "shfl")


@st.composite
def nests(draw: st.DrawFn, depth: int = 0) -> Nest:
    out: Nest = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("op", "loop", "when") if depth < 3 else ("op",)))
        if kind == "op":
            out.append(("op", draw(st.sampled_from(NAMES))))
        else:
            fields: dict[str, Any] = {"const": draw(st.integers(-1, 2)), "arg": "n", "arg_coef": draw(st.integers(-1, 1))}
            out.append((kind, (fields, draw(nests(depth + 1)))))
    return out


def build(nest: Nest, tiles: list[int]) -> Program:
    b = Builder(name="nest", warps=2, registers=32)

    def emit(body: Nest, loops: tuple[str, ...]) -> None:
        for kind, what in body:
            if kind == "op":
                b.op("wait_load", scoreboard=0)
                b.issue(what, 1)
                continue
            fields, inner = what
            if kind == "loop":
                var = f"v{len(b.loops)}"
                with b.loop(var, Index(**fields)):
                    emit(inner, (*loops, var))
            else:  # a guard may also look at the two innermost loops
                names = {"loop": loops[-1]} if loops else {}
                names |= {"outer": loops[-2]} if len(loops) > 1 else {}
                with b.when(Index(**fields, **names, coef=-1)):
                    emit(inner, loops)

    emit(nest, ())
    values = np.array([[n] for n in tiles], np.int64)
    return b.build(tensors=(), tiles=Tiles(names=("n",), values=values))


def by_hand(nest: Nest, n: int) -> Counter[str]:
    """What one warp issues, by running the nest in Python."""
    out: Counter[str] = Counter()

    def go(body: Nest, loops: tuple[int, ...]) -> None:
        for kind, what in body:
            if kind == "op":
                out[what] += 1
                continue
            fields, inner = what
            value = fields["const"] + fields["arg_coef"] * n
            if kind == "loop":
                for i in range(value):
                    go(inner, (*loops, i))
            else:
                value -= loops[-1] if loops else 0
                value += loops[-2] if len(loops) > 1 else 0
                if value >= 0:
                    go(inner, loops)

    go(nest, ())
    return out


@settings(max_examples=200, deadline=None)
@given(nest=nests(), tiles=st.lists(st.integers(-1, 3), min_size=1, max_size=3))
def test_walk_and_code_follow_the_same_path(nest: Nest, tiles: list[int]) -> None:
    """Loops with no trips, guards on loop counters, any nesting: statements, code and a plain Python run agree."""
    program = build(nest, tiles)
    for tile, (n, compiled) in enumerate(zip(tiles, expanded(program), strict=True)):
        expected = by_hand(nest, n)
        walked = sum(1 for s, _, _ in program.walk(tile) if s.kind == "wait_load")
        counted = program.instruction_counts(tile)
        assert walked == expected.total()
        assert {name: times // program.warps for name, times in counted.items() if times} == dict(expected)
        assert compiled == counted


def test_an_unknown_op_is_refused() -> None:
    b = Builder(name="k", warps=1, registers=1)
    with pytest.raises(ValueError, match=r"^k: op 'mmma' is unknown; did you mean [uw]?g?mma\? model/ops.py has all$"):
        b.op("mmma")


def test_a_buffer_that_is_not_there_is_named() -> None:
    b = Builder(name="k", warps=1, registers=1)
    with pytest.raises(ValueError, match=r"^k has no buffer 'S'; it has none$"):
        b.op("row_sum", writes="l", reads="S")
    b.registers_tile("S", rows=16, cols=16)
    b.registers_tile("P", rows=16, cols=16)
    with pytest.raises(ValueError, match=r"^k has no buffer 'SS'; did you mean S\? It has S, P$"):
        b.op("row_sum", writes="l", reads="SS")


def test_a_jump_lands_where_it_should() -> None:
    jump = CODE_COLUMNS.index("jump")
    for name in ALL_SCHEDULES:
        for program in lowered(name, causal=True):
            code = program.code
            for at, row in enumerate(code):
                if row[0] == Opcode.LOOP:
                    assert code[row[jump], 0] == Opcode.END
                    assert code[row[jump], jump] == at
                elif row[0] == Opcode.SKIP_IF_NEGATIVE:
                    assert at < row[jump] < len(code)
            assert code[-1, 0] == Opcode.EXIT


# --- shipped programs ---


@pytest.mark.parametrize(("name", "gpu"), REFUSED_PAIRS)
def test_a_chip_without_the_instructions_is_refused_in_one_sentence(name: str, gpu: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*\b{gpu} has none: choose \w+, or gpu .+$") as error:
        lowered(name, gpu)
    assert "\n" not in str(error.value)


def test_every_schedule_and_every_chip_has_a_partner() -> None:
    assert {name for name, _ in PAIRS} == set(SCHEDULES)
    assert {gpu for _, gpu in PAIRS} == set(GPUS)
    assert len(PAIRS) + len(REFUSED_PAIRS) == len(SCHEDULES) * len(GPUS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_counts_agree_three_ways(name: str, gpu: str, causal: bool) -> None:
    """walk (statements), instruction_counts (Python over code) and bundle_counts (compiled over code)."""
    for program in lowered(name, gpu, seqlen_q=200, seqlen_kv=330, causal=causal):
        for tile, compiled in enumerate(expanded(program)):
            counted = program.instruction_counts(tile)
            assert compiled == counted
            walked = [s for role in range(len(program.roles)) for s, _, _ in program.walk(tile, role)]
            assert tensor_flops(counted) == sum(product_flops(program, s) for s in walked if s.kind in PRODUCTS)
            executed = sum(n for name, n in counted.items() if INSTRUCTIONS[name].counter != "none")
            assert counters(counted)["total"] == executed
            assert set(counted) - {n for n in counted if INSTRUCTIONS[n].counter in COUNTERS} in ({"stall"}, {"stall", "refetch"})


PRODUCTS = {"mma", "wgmma", "umma"}
K_STEP = 16  # of 16-bit operands, in every kind of product


def tensor_flops(counted: Mapping[str, int]) -> int:
    """mma.sync is m16n8k16; of a wgmma one warp instruction is 16 rows, of a tcgen05.mma the SM's rows."""
    flops = counted["hmma"] * 2 * 16 * 8 * K_STEP
    for name, n in counted.items():
        kind = INSTRUCTIONS[name]
        flops += n * 2 * (kind.rows or 16) * kind.columns * K_STEP
    return flops


def product_flops(program: Program, s: Statement) -> int:
    """FLOPs of a whole CTA for one statement: its shape, whoever splits what, or the share of it that the statement does."""
    buffers = {b.name: b for b in program.buffers}
    a, out = buffers[s.reads[0]], buffers[s.writes[0]]
    first, last = s.attrs.get("share", (0.0, 1.0))
    steps = a.cols // K_STEP * (last - first)
    assert steps == pytest.approx(round(steps)), "a share of a product is whole k-steps"
    return 2 * out.rows * out.cols * K_STEP * round(steps)


#: Rows and keys that FA3's tiles divide, by head dim: 192 x 128 and 128 x 176.
DIVIDED = {64: 1536, 128: 1408}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_tensor_flops_are_the_problems(name: str, gpu: str, d: int) -> None:
    """Where tiles divide the problem, 4 N^2 d FLOPs a head: of mma.sync, N^2 d / 1024 instructions of 4096 FLOPs."""
    n = DIVIDED[d] if name in ("fa3", "cudnn") and load_gpu(gpu).wgmma else 512
    a = Attention(batch=1, heads_q=2, seqlen_q=n, head_dim=d)
    programs = get_schedule(name).lower(load_gpu(gpu), a)
    counted: Counter[str] = Counter()
    for p in programs:
        for times, bundle in zip(bundle_counts(p).sum(axis=0), p.bundles, strict=True):
            counted.update({name: n * int(times) for name, n in bundle})
    assert tensor_flops(counted) == a.flops()
    assert counted["hmma"] in (0, a.flops() // 4096)


def test_exponentials_of_fa2_are_one_a_score_and_one_a_row_and_block() -> None:
    a = Attention(batch=1, heads_q=1, seqlen_q=512, head_dim=128)
    (program,) = get_schedule("fa2", counts="ideal").lower(load_gpu("h200"), a)
    total = sum(program.instruction_counts(t)["ex2"] for t in range(len(program.tiles)))
    rescales = (512 // 128) * (512 // 64 - 1) * 4 * 4  # tiles, K/V blocks but the first, warps; a thread owns 4 rows
    assert total == 512 * 512 // 32 + rescales


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_size_does_not_grow_with_the_sequence(name: str, causal: bool) -> None:
    """Four times the length, the same code; the row kernels of standard attention keep a whole row in registers."""
    short, long = (lowered(name, seqlen_q=n, causal=causal) for n in (1024, 4096))
    for before, after in zip(short, long, strict=True):
        assert len(before.statements) == len(after.statements)
        if not before.name.startswith(("standard_mask", "standard_softmax")):
            columns = [CODE_COLUMNS.index(c) for c in ("opcode", "bundle", "count", "arg", "jump", "barrier", "ring")]
            assert np.array_equal(before.code[:, columns], after.code[:, columns])
            assert before.bundles == after.bundles


@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_a_program_is_well_formed(name: str, gpu: str) -> None:
    for program in lowered(name, gpu, causal=True):
        assert program.code.shape[1] == len(CODE_COLUMNS)
        buffers, tensors = {b.name for b in program.buffers}, {t.name for t in program.tensors}
        for s in program.statements:
            if s.kind.startswith(("load", "tma_load")):
                assert set(s.reads) <= tensors
                assert set(s.writes) <= buffers
            if s.kind in ("store", "tma_store"):
                assert set(s.writes) <= tensors
        assert (program.code[:, CODE_COLUMNS.index("count")] >= 0).all()
        exits = np.flatnonzero(program.code[:, CODE_COLUMNS.index("opcode")] == Opcode.EXIT)
        assert [role.start for role in program.roles] == [0, *(exits[:-1] + 1)]
        assert exits[-1] == len(program.code) - 1


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_lowering_twice_gives_the_same_text(name: str) -> None:
    assert [str(p) for p in lowered(name)] == [str(p) for p in lowered(name)]


def test_fa2_on_an_h200_in_full() -> None:
    """A change of this text is a change of the kernel: look at it, then store it anew."""
    (program,) = lowered("fa2", batch=4, heads_q=16, seqlen_q=4096, head_dim=128)
    assert str(program) + "\n" == (GOLDEN / "fa2_h200.txt").read_text()
