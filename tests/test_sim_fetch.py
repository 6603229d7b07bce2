"""Instruction fetch: code that an SM's cache holds costs nothing, other code comes no faster than it was measured to."""

from __future__ import annotations

import csv
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from engine_jobs import both, job_of

from flashsim import Attention, get_schedule, load_gpu, simulate
from flashsim.model.code_stretches import INSTRUCTION_BYTES, STRETCH_BYTES, stretches
from flashsim.model.instructions import INSTRUCTIONS
from flashsim.model.program import Index, Opcode, Program, Tiles
from flashsim.model.rows import BUNDLE, COUNT, OPCODE
from flashsim.model.schedule import Builder
from flashsim.sim.engine import STALL_FETCH, STALLS, TICKS_PER_CYCLE, Job

PASSES = 8
ROW = 14  # instructions of a bundle, as packed code has them


def lines(kib: int, *, warps: int, bodies: int = 1, passes: int = PASSES) -> Program:
    """``passes`` of a line of independent FFMAs of ``kib`` KiB; with two bodies half of the warps pass one, half the other."""
    b = Builder(name="line", registers=32)
    for body in range(bodies):
        with b.role(f"body{body}", warps=warps // bodies, registers=32), b.loop("i", Index(arg="n")):
            for _ in range(kib * 1024 // 16 // ROW):
                b.rows.single.append(b.rows.issue((("ffma", ROW),), 1, -1, 0))
                b.rows.code.append(b.rows.single[-1])
    return b.build(tensors=(), tiles=Tiles(names=("n",), values=np.array([[passes]])))


def cycles_an_instruction(program: Program) -> float:
    """Of a warp, in the passes after the first."""
    n = program.instruction_counts(0)["ffma"] / program.warps / PASSES
    short = replace(program, tiles=replace(program.tiles, values=np.array([[1]])))
    return (both(job_of(program, "h200")).ticks - both(job_of(short, "h200")).ticks) / TICKS_PER_CYCLE / (PASSES - 1) / n


def measured(test: str, kib: int, warps: int) -> float:
    """The same on all SMs of an H200 (``h200_fetch.csv``)."""
    text = (resources.files("flashsim.validate") / "data" / "h200_fetch.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in text if not line.startswith("#")):
        wanted = (test, str(kib), "1", "132", str(warps), "0")
        if tuple(row[c] for c in ("test", "kib", "issue", "ctas", "warps", "gap")) == wanted:
            return float(row["cycles_mean"]) / (kib * 1024 / 16)
    raise AssertionError(f"no row for {wanted}")


@pytest.mark.parametrize("kib", [12, 20, 28, 40, 48, 64])
@pytest.mark.parametrize("warps", [1, 8])
def test_one_line_takes_what_was_measured(kib: int, warps: int) -> None:
    """A cycle an instruction while the line fits; where it does not, what one warp waits for its next instruction."""
    assert cycles_an_instruction(lines(kib, warps=warps)) == pytest.approx(measured("one", kib, warps), rel=0.2)


@pytest.mark.parametrize("kib", [12, 20, 24, 28, 40, 48])
def test_two_lines_share_the_cache_and_the_port(kib: int) -> None:
    """Two bodies fit up to 16 KiB each; larger ones get half of an SM's share of the port each, whatever their size."""
    assert cycles_an_instruction(lines(kib, warps=8, bodies=2)) == pytest.approx(measured("two", kib, 8), rel=0.1)


@pytest.mark.parametrize("kib", [16, 24])
def test_four_sub_partitions_share_one_cache(kib: int) -> None:
    """Each warp passes a line of its own on its own sub-partition: together they overflow the SM's cache."""
    assert cycles_an_instruction(lines(kib, warps=4, bodies=4)) == pytest.approx(measured("four", kib, 4), rel=0.05)


def beside(kib: int, line_cycles: int, *, passes: int = 20) -> Program:
    """A warp passes a loop of ``kib`` KiB at 16 cycles a 128-byte line, another meanwhile 64 KiB at ``line_cycles``."""
    b = Builder(name="beside", registers=32)
    for name, size, cycles, trips in (("loop", kib, 16, "n"), ("other", 64, line_cycles, "m")):
        with b.role(name, warps=1, registers=32), b.loop("i", Index(arg=trips)):
            for _ in range(size * 1024 // INSTRUCTION_BYTES // ROW):
                b.rows.single.append(b.rows.issue((("ffma", ROW), ("stall", ROW * (cycles // 8 - 1))), 1, -1, 0))
                b.rows.code.append(b.rows.single[-1])
    tiles = Tiles(names=("n", "m"), values=np.array([[passes, max(1, passes * kib // 64)]]))
    return b.build(tensors=(), tiles=tiles)


@pytest.mark.parametrize("kib", [8, 16, 20, 26])
@pytest.mark.parametrize("line_cycles", [16, 32])
def test_a_loop_is_evicted_by_other_code_as_measured(kib: int, line_cycles: int) -> None:
    """Cycles that a line of the loop waits (``h200_fetch_load.csv``, all SMs): none up to 16 KiB, 6 to 17 from 20 KiB on."""
    passes, lines_of_pass = 20, kib * 8
    run = both(job_of(beside(kib, line_cycles, passes=passes), "h200"))
    text = (resources.files("flashsim.validate") / "data" / "h200_fetch_load.csv").read_text().splitlines()
    rows = {
        int(r["streams"]): float(r["cycles_mean"])
        for r in csv.DictReader(line for line in text if not line.startswith("#"))
        if (r["test"], r["kib"], r["ctas"], r["warps"], r["slow_z"]) == ("loop", str(kib), "132", "1", str(line_cycles))
    }
    waited = run.stalls[0, 0, STALL_FETCH] / TICKS_PER_CYCLE / passes / lines_of_pass
    assert waited == pytest.approx((rows[2] - rows[1]) / lines_of_pass, abs=5)


def test_code_that_fits_is_not_tracked() -> None:
    assert len(job_of(lines(28, warps=4), "h200").stretch_size) == 0
    assert len(job_of(lines(36, warps=4), "h200").stretch_size) > 30


def fa2(head_dim: int, seqlen: int, *, causal: bool) -> Program:
    attention = Attention(batch=4, heads_q=16, seqlen_q=seqlen, head_dim=head_dim, causal=causal)
    return get_schedule("fa2").lower(load_gpu("h200"), attention)[0]


@pytest.mark.parametrize(
    ("head_dim", "causal", "executed"),
    [(64, True, 4252), (64, False, 3940), (128, True, 5122), (128, False, 3304)],
)
def test_fa2_has_the_code_of_its_binary(head_dim: int, causal: bool, executed: int) -> None:
    """Instructions of PyTorch's kernels for sm_90 up to the end of the epilogue, in their SASS."""
    assert stretches(fa2(head_dim, 512, causal=causal)).sizes.sum() == pytest.approx(executed, rel=0.02)


ON = {"fa2": "h200", "fa3": "h200", "fa4": "b200", "gluon": "b200", "triton": "h200"}


@pytest.mark.parametrize("schedule", ON)
def test_stretches_hold_each_instruction_once(schedule: str) -> None:
    """All sizes add up to the code of roles that differ; a stretch is short, and a new one begins behind each jump."""
    problem = Attention(batch=1, heads_q=4, seqlen_q=1024, head_dim=128, causal=True)
    program = get_schedule(schedule).lower(load_gpu(ON[schedule]), problem)[0]
    found, code = stretches(program), program.code
    ends = [*(role.start for role in program.roles[1:]), len(code)]
    total: dict[str, int] = {}
    for role, end in zip(program.roles, ends, strict=True):
        rows = [row for row in code[role.start : end] if row[OPCODE] == Opcode.ISSUE]
        counted = [(INSTRUCTIONS[name], n * int(row[COUNT])) for row in rows for name, n in program.bundles[row[BUNDLE]]]
        name = role.code or role.name
        total[name] = max(total.get(name, 0), sum(n for kind, n in counted if kind.counter != "none"))
    assert found.sizes.sum() == pytest.approx(sum(total.values()), rel=0.01)
    assert found.sizes.max() * INSTRUCTION_BYTES <= 2 * STRETCH_BYTES
    within = found.rows[found.rows[:, 0] >= 0]
    assert (within[within[:, 1] == 1][:, 2] == found.sizes[within[within[:, 1] == 1][:, 0]]).mean() > 0.9
    for jump in np.flatnonzero(np.isin(code[:, OPCODE], (Opcode.LOOP, Opcode.END, Opcode.SKIP_IF_NEGATIVE))):
        after = next((i for i in range(jump + 1, len(code)) if found.rows[i, 0] >= 0 or code[i, OPCODE] == Opcode.EXIT), None)
        assert after is None or code[after, OPCODE] == Opcode.EXIT or found.rows[after, 1] == 1


def job(program: Program, **changed: int) -> Job:
    return replace(job_of(program, "h200", slots=2, tiles=5), **changed)


@pytest.mark.parametrize("kib", [1, 8, 20, 32, 40])
def test_engines_agree_whatever_the_cache_holds(kib: int) -> None:
    run = both(job(fa2(64, 512, causal=True), code_held=kib * 64))
    assert (run.stalls[:, :, STALL_FETCH] > 0).any()


def test_a_larger_cache_waits_less_and_one_that_holds_all_only_once() -> None:
    program = fa2(64, 512, causal=True)
    waits = [both(job(program, code_held=kib * 64)).stalls[:, :, STALL_FETCH].sum() for kib in (8, 32, 48, 80)]
    assert waits[0] > waits[1] > waits[2] > waits[3]
    everything = both(job(program, code_held=80 * 64))
    assert waits[3] < 0.05 * everything.stalls.sum()


def test_without_a_mask_two_ctas_keep_step_and_share_what_is_fetched() -> None:
    """Causal CTAs differ in length and drift apart, so that each fetches for itself."""
    gpu = load_gpu("h200")
    problem = Attention(batch=32, heads_q=32, seqlen_q=512, head_dim=64, causal=True)
    causal = simulate(get_schedule("fa2"), gpu, problem)
    whole = simulate(get_schedule("fa2"), gpu, replace(problem, causal=False))
    assert causal.stalls["fetch"] > 0.1 > 0.05 > whole.stalls["fetch"]
    assert "instruction fetch" in causal.limiter
    assert simulate(get_schedule("fa2"), gpu.replace_number("fetch.cache_bytes", 1 << 20), problem).stalls["fetch"] == 0.0
    assert "fetch" in STALLS
