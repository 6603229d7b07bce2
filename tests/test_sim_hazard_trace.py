"""``check --trace``: the hazards lie where they were found, with an arrow between the two ops; a deadlock shows who waits."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from faults import find, without
from test_sim_hazards_cluster import FAULTS, lowered

import flashsim.cli as cli
from flashsim.model.attention import Attention
from flashsim.model.gpu import GPU, load_gpu
from flashsim.model.program import Program
from flashsim.model.schedules import get_schedule
from flashsim.sim.hazard_findings import Verdict
from flashsim.sim.hazard_trace import check_and_trace

Events = list[dict[str, Any]]
PROBLEM = Attention(batch=1, heads_q=1, seqlen_q=640, head_dim=128, causal=True)


class Broken:
    """A schedule whose Program is given."""

    name = "broken"

    def __init__(self, program: Program) -> None:
        self.program = program

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        return (self.program,)


def fa3() -> Program:
    (program,) = get_schedule("fa3").lower(load_gpu("h200"), PROBLEM)
    return program


def drawn(program: Program, gpu: str = "h200") -> tuple[Verdict, Events]:
    verdict, trace = check_and_trace(Broken(program), load_gpu(gpu), PROBLEM)
    return verdict, trace.events


def tracks(events: Events) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def slice_at(events: Events, event: dict[str, Any]) -> dict[str, Any]:
    """The op of the event's track that begins with it."""
    place = ("pid", "tid", "ts")
    (found,) = [e for e in events if e["ph"] == "X" and all(e[key] == event[key] for key in place)]
    return found


def test_a_race_is_shown_at_both_ops_with_an_arrow() -> None:
    program = fa3()
    verdict, events = drawn(without(program, find(program, "mbarrier_wait", role="consumer0", barrier="v_full", nth=1)))
    first = verdict.findings[0]
    assert first.at is not None
    assert first.other is not None
    assert first.role == "consumer0"
    marks = [e for e in events if e["ph"] == "i" and e["args"]["sentence"] == first.sentence]
    names = tracks(events)
    assert [names[e["pid"], e["tid"]] for e in marks] == ["hazards", first.at.warps, "producer"]
    assert marks[0]["ts"] == marks[1]["ts"]
    assert marks[0]["name"] == "read before data"
    assert marks[0]["args"]["barrier"].startswith("v_full[")
    assert [slice_at(events, mark)["args"]["op"] for mark in marks[1:]] == [first.op, first.other.op]
    arrow = {e["ph"]: e for e in events if e["ph"] in "sf" and e["id"] == 0}
    assert slice_at(events, arrow["s"])["name"] == "tma_load Vs"
    assert slice_at(events, arrow["f"])["name"] == "wgmma O0"


def test_a_deadlock_shows_who_waits_with_barrier_and_phase() -> None:
    program = fa3()
    verdict, events = drawn(without(program, find(program, "mbarrier_arrive", role="consumer0", barrier="k_empty")))
    assert verdict.findings[0].kind == "deadlock"
    names = tracks(events)
    waiting = {names[e["pid"], e["tid"]]: e for e in events if e.get("cat") == "wait"}
    assert {"producer", "consumer0 warp 0", "consumer0 warps 1-3"} <= set(waiting)
    args = waiting["producer"]["args"]
    assert (args["barrier"], args["phase"], args["has"]) == ("k_empty[0]", 0, "4 of 8 arrivals")
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert {e["ts"] + e["dur"] for e in waiting.values()} == {last}
    assert all(e["ph"] == "X" or e["ts"] < last for e in events if "ts" in e)


def test_a_cluster_has_a_process_a_cta() -> None:
    base, breaking, *_ = FAULTS["K released to the own CTA only, and counted so"]
    verdict, events = drawn(breaking(lowered(base)))
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["fa3_fwd, CTA 0", "fa3_fwd, CTA 1"]
    arrow = {e["ph"]: e for e in events if e["ph"] in "sf" and e["id"] == 0}
    assert arrow["s"]["pid"] != arrow["f"]["pid"]
    assert verdict.findings[0].kind == "write before release"


def test_time_is_logical() -> None:
    """Ops of a warp follow each other; a wait ends after the arrivals that end it."""
    verdict, events = drawn(fa3())
    assert verdict.clean
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["pid"], e["tid"], e["ts"]))
    for _, track in groupby(spans, key=lambda e: (e["pid"], e["tid"])):
        for before, after in pairwise(track):
            assert before["ts"] + before["dur"] == after["ts"]
    ends = [e for e in spans if e["name"].startswith("mbarrier_wait k_full[0]") and e["args"]["phase"] == 0]
    (sent,) = [e for e in spans if e["name"] == "mbarrier_expect k_full[0]" and e["args"]["phase"] == 0]
    assert len(ends) == 4
    assert all(e["ts"] + e["dur"] > sent["ts"] for e in ends)
    assert not [e for e in events if e["ph"] in "isf"]


def test_a_budget_has_no_op() -> None:
    verdict, events = drawn(replace(fa3(), smem_bytes=300_000))
    assert verdict.findings[0].kind == "budget"
    (mark,) = [e for e in events if e["ph"] == "i"]
    assert tracks(events)[mark["pid"], mark["tid"]] == "hazards"
    assert "300000 B of shared memory" in mark["args"]["sentence"]


def test_the_command_writes_the_first_problem_that_goes_wrong(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    clean = CliRunner().invoke(cli.main, ["check", "fa3", "--seqlen", "256", "--trace", str(out)])
    assert clean.exit_code == 0, clean.output
    assert f"(clean) in {out}; open it in ui.perfetto.dev" in clean.stderr
    document = json.loads(out.read_text())
    assert document["otherData"]["verdict"].endswith("ops followed)")
    nowhere = CliRunner().invoke(cli.main, ["check", "fa3", "--seqlen", "256", "--trace", str(tmp_path / "no" / "out.json")])
    assert nowhere.exit_code == 2
    assert nowhere.stderr.startswith("flashsim: ")
