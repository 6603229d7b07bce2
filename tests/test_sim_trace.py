"""A trace is a document that Perfetto can draw: no overlap on a track, arrows in pairs, nothing half-written."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest
from machines import chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import INSTRUCTIONS, PIPES, Path
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.engine import PATH, PORT, PORT_BESIDE, TICKS_PER_CYCLE
from flashsim.sim.predict import Result, simulate
from flashsim.sim.timeline import TENSOR, flows, intervals, unit_spans, waits
from flashsim.sim.trace import SHOWN, trace, write_trace

ALL_SCHEDULES = list(SCHEDULES)
LIMIT = 6_000
PROBLEM = Attention(batch=1, heads_q=2, seqlen_q=512, head_dim=64)


def recorded(name: str, limit: int = LIMIT) -> Result:
    return simulate(get_schedule(name), load_gpu(chip_for(name, "a100-40gb")), PROBLEM, record_limit=limit + 1)


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["pid"], e["tid"], e["ts"]))


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_slices_of_a_track_never_overlap(name: str, tmp_path: File) -> None:
    write_trace(trace(recorded(name), limit=LIMIT), tmp_path / "out.json")
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["displayTimeUnit"] == "ns"
    drawn = slices(document["traceEvents"])
    assert len(drawn) > 20
    for (_, _), track in groupby(drawn, key=lambda e: (e["pid"], e["tid"])):
        for before, after in pairwise(track):
            assert before["dur"] >= 0
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6, (before, after)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_every_track_of_a_slice_has_a_name(name: str) -> None:
    result = recorded(name)
    events = trace(result, limit=LIMIT).events
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices(events)} == set(named)
    roles = {role.name for launch in result.launches for role in launch.program.roles}
    assert {f"CTA slot 0 / {role} (warp 0)" for role in roles} <= set(named.values())
    tensor = {place for place, _, unit in (track.partition(" / ") for track in named.values()) if unit == "tensor"}
    products = {x.path for launch in result.launches for b in launch.program.bundles for x in (INSTRUCTIONS[n] for n, _ in b)}
    assert tensor == ({"all sub-partitions"} if Path.TCGEN05 in products else {f"sub-partition {n}" for n in range(4)})
    assert [(e["args"]["name"], e["pid"]) for e in events if e["name"] == "process_name"] == [("SM", 0)]
    warps = [track for track in named.values() if track.startswith("CTA slot")]
    assert list(named.values())[: len(warps)] == warps  # threads are numbered as tracks are ordered: warps, then units
    assert list(named) == sorted(named)
    quarter = [track.partition(" / ")[2] for track in named.values() if track.startswith("sub-partition 1")]
    assert quarter == [unit for unit in SHOWN if unit in quarter]


def test_arrows_are_paired_and_point_forward_into_slices() -> None:
    events = trace(recorded("fa2"), limit=LIMIT).events
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(e["ph"] == "s" for e in events)
    at = {(e["tid"], e["ts"]): e["name"] for e in slices(events) if e["cat"] == "statement"}
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert start["name"] == end["name"]
        assert at[start["tid"], start["ts"]].startswith("load")
        assert at[end["tid"], end["ts"]].startswith("mma")


def test_each_fill_of_k_and_v_has_one_arrow_per_cta() -> None:
    """512 keys in blocks of 128: Q once, K and V four times in each CTA."""
    result = recorded("fa2", limit=1_000_000)
    launch = result.launches[0]
    statements = intervals(launch.program, launch.job, launch.run)
    ctas = len({x.tile for x in statements})
    count = Counter(flow.buffer for flow in flows(launch.program, statements))
    assert count == {"Qs": ctas, "Ks": 4 * ctas, "Vs": 4 * ctas}


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_intervals_hold_what_the_engine_counted(name: str) -> None:
    """Instructions of all intervals are the Program's, and unit shares add up to the engine's busy ticks.

    Where warpgroup products run, the engine charges an instruction beside one more than alone, which no record tells: unit
    shares are then those of instructions alone, and the engine's ticks lie between them and what all would cost beside one.
    """
    result = recorded(name, limit=1_000_000)
    for launch in result.launches:
        statements = intervals(launch.program, launch.job, launch.run)
        issued: Counter[str] = Counter()
        for x in statements:
            issued.update(dict(x.instructions))
        expected: Counter[str] = Counter()
        for bundle, times in zip(launch.program.bundles, launch.run.issued, strict=True):
            for instruction, n in bundle:
                expected[instruction] += n * int(times)
        assert +issued == +expected
        port = [0.0] * 4
        for span in unit_spans(statements):
            if span.unit == "port":
                port[span.subpartition] += span.share * (span.end - span.start)
        busy, bundles = launch.run.busy[0, :, -1].astype(float), launch.job.bundles
        if not np.isin(bundles[:, PATH], Path.WGMMA).any():
            assert port == pytest.approx(busy, rel=0.02)
            continue
        alone, beside = (float(launch.run.issued @ bundles[:, column]) for column in (PORT, PORT_BESIDE))
        assert sum(port) == pytest.approx(alone, rel=0.02)
        assert alone < busy.sum() < beside


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_products_fill_their_track_while_they_run(name: str) -> None:
    """A product goes on after its issue: the track holds it whole, with the name that its warp's slice has."""
    (launch,) = simulate(get_schedule(name), load_gpu(chip_for(name, "h100")), PROBLEM, record_limit=200_000).launches
    statements = intervals(launch.program, launch.job, launch.run)
    spans = [span for span in unit_spans(statements, lambda x: f"{x.warp}") if span.unit == "tensor"]
    busy = launch.run.busy[0, :, PIPES.index("tensor")].sum()
    drawn = sum(span.end - span.start for span in spans) * (4 if name == "fa4" else 1)  # one track for all four
    assert 0.8 * busy <= drawn <= busy  # the engine also counts what vector work holds products up
    issued = {(str(x.warp), x.start) for x in statements if x.held[TENSOR]}
    assert {span.name for span in spans} == {warp for warp, _ in issued}
    assert len(spans) == len(issued)


@pytest.mark.parametrize(("name", "expected"), [
    ("fa3", {("producer", f"consumer{w}", tile): n for w in (0, 1) for tile, n in ((f"Qs{w}", 1), ("Ks", 8), ("Vs", 8))}),
    ("fa4", {("load", "mma", tile): n for tile, n in (("Qs0", 1), ("Qs1", 1), ("KV", 8), ("KV.v", 8))}),
])  # fmt: skip
def test_every_tma_load_has_an_arrow_to_each_of_its_consumers(name: str, expected: dict[tuple[str, str, str], int]) -> None:
    """One tile with 8 K/V blocks."""
    problem = Attention(batch=1, heads_q=1, seqlen_q=1024, head_dim=128, causal=True)
    (launch,) = simulate(get_schedule(name), load_gpu(chip_for(name, "h100")), problem, record_limit=200_000).launches
    roles = launch.program.roles
    statements = intervals(launch.program, launch.job, launch.run)
    first = statements[0].tile

    def role(number: int) -> str:
        return roles[launch.program.statements[number].role].name

    found = Counter(
        (role(flow.producer.statement), role(flow.consumer.statement), flow.buffer)
        for flow in flows(launch.program, statements)
        if flow.producer.tile == first and flow.producer.name == "tma_load"
    )
    assert found == expected
    loads = [launch.program.statements[x.statement] for x in statements if x.name == "tma_load" and x.tile == first]
    assert Counter(s.writes[0] for s in loads) == {tile: n for (_, _, tile), n in expected.items()}


def test_waits_lie_between_statements_and_say_what_for() -> None:
    launch = recorded("fa2").launches[0]
    statements = intervals(launch.program, launch.job, launch.run, limit=LIMIT)
    found = waits(launch.program, statements)
    assert {"wait: barrier", "wait: result"} <= {x.name for x in found}
    assert all(x.end > x.start and not x.instructions for x in found)


def test_time_is_the_ticks_at_the_clock_used() -> None:
    result = recorded("fa2", limit=1_000_000)
    launch = result.launches[0]
    last = max(e["ts"] + e["dur"] for e in slices(trace(result, limit=1_000_000).events))
    assert last == pytest.approx(np.max(launch.run.records[:, 1]) / TICKS_PER_CYCLE / launch.clock.mhz, abs=2e-3)


def test_kernels_follow_each_other() -> None:
    events = slices(trace(recorded("standard"), limit=LIMIT).events)
    spans = {}
    for kernel in ("standard_qk", "standard_softmax", "standard_pv"):
        mine = [e for e in events if e["args"]["kernel"] == kernel]
        spans[kernel] = (min(e["ts"] for e in mine), max(e["ts"] + e["dur"] for e in mine))
    assert spans["standard_qk"][1] <= spans["standard_softmax"][0] + 1e-6
    assert spans["standard_softmax"][1] <= spans["standard_pv"][0] + 1e-6


def test_a_cut_is_noted_and_cuts() -> None:
    few = trace(recorded("fa2", limit=100), limit=100)
    assert few.notes == ("fa2_fwd: only the first 100 records are in the trace; raise --limit for more",)
    assert few.document["otherData"]["notes"] == list(few.notes)
    whole = trace(recorded("fa2", limit=1_000_000), limit=1_000_000)
    assert whole.notes == ()
    assert len(few.events) < len(whole.events)


def test_blocks_keeps_the_first_ctas() -> None:
    result = recorded("fa1", limit=200_000)
    wide = simulate(
        get_schedule("fa2"), load_gpu("a100-40gb"), Attention(batch=16, heads_q=16, seqlen_q=512, head_dim=64),
        record_limit=100_000,
    )
    assert len({e["args"].get("tile") for e in slices(trace(wide, limit=100_000).events)} - {None}) > 2
    kept = trace(wide, limit=100_000, blocks=2)
    assert len({e["args"].get("tile") for e in slices(kept.events)} - {None}) == 2
    assert "only the first 2 of the" in kept.notes[0]
    assert trace(result, limit=200_000, blocks=5).notes == ()


def test_a_result_without_records_is_refused() -> None:
    result = simulate(get_schedule("fa2"), load_gpu("a100-40gb"), PROBLEM)
    with pytest.raises(ValueError, match="fa2_fwd has no records: simulate with record_limit=11"):
        trace(result, limit=10)
    with pytest.raises(ValueError, match="blocks is 0; it must be a whole number of at least 1"):
        trace(result, limit=10, blocks=0)


def test_a_failed_write_leaves_nothing(tmp_path: File) -> None:
    laid = trace(recorded("fa2"), limit=LIMIT)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match=r"directory"):
        write_trace(laid, tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
