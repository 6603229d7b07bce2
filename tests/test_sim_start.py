"""What a launch pays once, as an H200 was measured: code before its first load, the store of O at its end, events around it."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_jobs import both, job_of

from flashsim import validate
from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Index, Opcode, Program, Tensor, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules import get_schedule
from flashsim.sim.engine import STORE, STORE_RATE, TICKS_PER_CYCLE
from flashsim.sim.predict import simulate

DATA = Path(next(iter(validate.__path__))) / "data"
H200 = load_gpu("h200")


def rows_of(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(line for line in file if line[0] != "#"))


def storing(rows: int, *, warps: int = 1, wait: str | None = "read") -> Program:
    """Each of ``warps`` warps stores its part of a tile of 128-byte rows."""
    b = Builder(name="stores", registers=64)
    b.smem("S", rows=rows, cols=64, bytes_per_element=2)
    with b.role("writer", warps=warps, registers=64):
        b.op("tma_store", writes="O", reads="S", index=Index(arg="plane"), wait=wait)
    o = Tensor(name="O", heads=1, rows=rows, cols=64, bytes_per_element=2, block_rows=rows, head_arg="plane")
    return b.build(tensors=(o,), tiles=Tiles(names=("plane",), values=np.zeros((1, 1), np.int64)))


def alone(program: Program) -> float:
    """Cycles of the CTA on an SM that has L2 to itself."""
    job = job_of(program, "h200", ppm=0)
    rate = job.rate.copy()
    rate[STORE_RATE] = (TICKS_PER_CYCLE, int(H200.async_.store_bytes_per_clk) if H200.async_ else 1)
    rate[0] = (TICKS_PER_CYCLE, int(H200.l2.bytes_per_clk_one_sm))
    return both(replace(job, rate=rate)).ticks / TICKS_PER_CYCLE


MEASURED = {
    int(row["param"]): float(row["median"])
    for row in rows_of("h200_cold_start.csv")
    if (row["test"], row["state"], row["ctas"], row["step"]) == ("tensor_store_read", "again", "1", "1")
}


@pytest.mark.parametrize("size", sorted(MEASURED))
def test_a_bulk_store_holds_its_warp_until_shared_memory_has_been_read(size: int) -> None:
    assert len(MEASURED) == 4
    assert alone(storing(size // 128)) == pytest.approx(MEASURED[size], abs=6)


def test_the_copy_engine_reads_for_one_store_after_the_other() -> None:
    assert alone(storing(512, warps=4)) == pytest.approx(alone(storing(512)), abs=6)


def test_a_store_that_nothing_waits_for_holds_no_warp() -> None:
    assert alone(storing(512, wait=None)) < 10


def test_all_sms_together_store_at_less_than_their_own_rate() -> None:
    attention = Attention(batch=1, heads_q=132, seqlen_q=128, head_dim=128)
    job = simulate(get_schedule("fa3"), H200, attention).launches[0].job
    assert job.latency[STORE] == 178 * TICKS_PER_CYCLE
    ticks_per_byte = job.rate[STORE_RATE, 0] / job.rate[STORE_RATE, 1]
    assert ticks_per_byte == pytest.approx(132 / 2800 * TICKS_PER_CYCLE, rel=0.001)


def test_only_the_first_ctas_of_fa2_find_the_arguments_unread() -> None:
    (program,) = get_schedule("fa2").lower(H200, Attention(batch=1, heads_q=133, seqlen_q=512, head_dim=128))
    assert program.tiles.column("later").tolist() == [0] * 264 + [1] * 268
    first, later = (program.instruction_counts(tile) for tile in (0, 300))
    assert first["uldc"] == 4 * 5
    assert later["uldc"] == 0
    assert first["control"] == later["control"]


SAMPLES: dict[tuple[str, int], list[float]] = {}
for sampled in rows_of("h200_prologue.csv"):
    if sampled["caches"] == "kept":
        SAMPLES.setdefault((sampled["kernel"], int(sampled["head_dim"])), []).append(float(sampled["cycles"]))


@pytest.mark.parametrize(("kernel", "head_dim"), list(SAMPLES))
def test_first_loads_are_issued_as_late_as_in_samples_of_the_kernels(kernel: str, head_dim: int) -> None:
    """FA3: until its producer's first copy, through two parts; FA2: until both first tiles are asked for.

    Within 30 %: waits for special registers, for code and (FA2) for the loads' own addresses are left out.
    """
    measured = sum(SAMPLES[kernel, head_dim]) / 2  # of two launches
    attention = Attention(batch=1, heads_q=66, seqlen_q=512, head_dim=head_dim)
    launch = simulate(get_schedule(kernel), H200, attention, record_limit=20_000).launches[0]
    loading = [any(name in ("utmaldg", "ldgsts") for name, _ in bundle) for bundle in launch.program.bundles]
    rows = launch.run.records[np.argsort(launch.run.records[:, 1], kind="stable")]
    code = launch.program.code[rows[:, 6]]
    loads = rows[(code[:, 0] == Opcode.ISSUE) & np.array(loading)[code[:, 1]] & (rows[:, 3] == 0)]
    last = loads[loads[:, 4] == loads[0, 4]][0 if kernel == "fa3" else 1]
    assert last[0 if kernel == "fa3" else 1] / TICKS_PER_CYCLE == pytest.approx(measured, rel=0.3)


def test_events_around_a_call_are_part_of_its_time_where_caches_are_flushed_between() -> None:
    attention = Attention(batch=1, heads_q=66, seqlen_q=1024, head_dim=128)
    plain, timed = (simulate(get_schedule("fa2"), H200, attention, clock="boost", flush_bytes=n) for n in (0, 256 << 20))
    assert timed.cycles == plain.cycles
    assert timed.ms - plain.ms == pytest.approx(H200.launch.events_us / 1e3)
