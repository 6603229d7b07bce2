"""What-if: chips that differ in one thing, what they save, and what the command says."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import pytest
from machines import chip_for

from flashsim import Attention, cli_explore, simulate
from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.instructions import INSTRUCTIONS
from flashsim.model.schedule import choices, lowered
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.model.sourced import TOLD
from flashsim.sim.unit_words import NUMBERS, UNITS, words
from flashsim.sim.whatif import (
    ALMOST,
    Case,
    every_swap,
    every_unit,
    free,
    numbers_of,
    scale,
    set_numbers,
    take,
    together,
    tornado,
    units,
    what_if,
)
from flashsim.sim.workers import local

ALL_GPUS = list(GPUS)
H100, A100 = load_gpu("h100"), load_gpu("a100-80gb")
PROBLEM = Attention(batch=1, heads_q=8, seqlen_q=1024, head_dim=128)
SHAPE = ["--gpu", "h100", "--batch", "1", "--heads", "8", "--seqlen", "1024", "--head-dim", "128"]


WHATIF = ("whatif", "fa2", *SHAPE, "--clock", "boost", "--jobs", "1")
run, sentence = (partial(each, *WHATIF) for each in (command_line.run, command_line.sentence))


def cycles(gpu: Any) -> float:
    return simulate(get_schedule("fa2"), gpu, PROBLEM, clock="boost").cycles


# --- changes ---


@pytest.mark.parametrize("name", ALL_GPUS)
def test_every_pipe_port_memory_and_latency_is_a_unit(name: str) -> None:
    found = units(load_gpu(name))
    pipes = {row.pipe for row in INSTRUCTIONS.values()} - {"control", "tmem"}
    assert pipes | {"port", "warp", "result", "smem", "l2", "l2 latency", "hbm", "hbm latency", "latency.lds"} <= found.keys()
    assert {"launch.ramp_cycles", "power limit"} <= found.keys()
    numbers = [number for group in found.values() for number in group]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) <= {number for number, _ in load_gpu(name).numbers()}


@pytest.mark.parametrize("name", ALL_GPUS)
def test_every_change_of_every_chip_is_accepted(name: str) -> None:
    gpu = load_gpu(name)
    for change in every_unit(gpu):
        changed = dict(change.on(gpu).numbers())
        assert all(changed[path] == value for path, value in change.numbers.items())
        assert any(changed[path] != before for path, before in gpu.numbers())


@pytest.mark.parametrize("name", ALL_GPUS)
def test_every_unit_and_number_has_words_of_its_own(name: str) -> None:
    """None is missing, none is so long that a table has no room for it; units of one chip are told apart."""
    gpu = load_gpu(name)
    for each in (*units(gpu), *(number for number, _ in gpu.numbers()), *INSTRUCTIONS, "exp2", "l2_latency", "pipe", "hbm"):
        assert 0 < len(words(each)) <= 36, each
    told = [words(each) for each in units(gpu)]
    assert len(set(told)) == len(told)
    assert words("all together") == words("pipe.ex2, sm.count") == ""
    assert words("beside.tensor_per_fma") == "product held up by FMA issue"


def test_no_words_are_of_what_no_chip_has() -> None:
    chips = [load_gpu(name) for name in ALL_GPUS]
    numbers = {number for gpu in chips for number, _ in gpu.numbers()}
    assert set(NUMBERS) <= numbers
    assert set(UNITS) <= {each for gpu in chips for each in units(gpu)} | {number.partition(".")[0] for number in numbers}


def test_free_is_zero_or_says_what_it_is() -> None:
    assert free(H100, "mufu").numbers == {"pipe.ex2": 0.0}
    assert free(H100, "mufu").note == ""
    lds = free(H100, "latency.lds")
    assert lds.numbers == {"latency.lds": pytest.approx(H100.latency.lds / ALMOST)}
    assert lds.note == "1/100 of latency.lds, which may not be zero"
    assert free(H100, "smem").numbers == {"smem.bytes_per_clk": 12800}
    assert free(H100, "latency.lsu_queue").numbers["latency.lsu_queue"] > H100.latency.lsu_queue  # room, not time


def test_an_instruction_takes_no_issue_slot_and_a_unit_does() -> None:
    """A unit whose instructions hold the port for its sake keeps one slot of it."""
    sections = {"pipe.ex2", "port.ex2", "warp.ex2", "result.ex2"}
    assert set(free(H100, "ex2").numbers) == set(free(H100, "exp2").numbers) == sections
    assert set(numbers_of(H100, "rcp")) == sections
    tensor = free(H100, "tensor").numbers
    assert tensor["pipe.hmma"] == 0
    assert tensor["port.hmma"] == H100.port.control
    assert scale(H100, "tensor", 2).numbers["port.hmma"] == pytest.approx(H100.port.hmma / 2)
    assert scale(H100, "tensor", 0.5).numbers["port.hmma"] == pytest.approx(H100.port.hmma * 2)


def test_scale_knows_times_from_rates() -> None:
    assert scale(H100, "mufu", 2).numbers == {"pipe.ex2": 4.0}
    assert scale(H100, "hbm", 2).numbers["hbm.read_bytes_per_s"] == 2 * H100.hbm.read_bytes_per_s
    assert scale(H100, "hbm_latency", 2).numbers == {"hbm.latency_ns": pytest.approx(H100.hbm.latency_ns / 2)}
    assert scale(H100, "sm.count", 1.01).numbers == {"sm.count": 133}
    assert scale(H100, "mufu", 3).kind == "3x"


def test_take_gives_one_chip_the_units_of_another() -> None:
    swapped = take(H100, A100, "hbm").on(H100)
    assert swapped.hbm.read_bytes_per_s == A100.hbm.read_bytes_per_s
    assert swapped.l2 == H100.l2
    assert take(H100, A100, "pipe.ex2").numbers == {"pipe.ex2": float(A100.pipe.ex2)}
    assert take(H100, A100, "tensor").numbers["port.hmma"] == float(A100.port.hmma)
    names = {change.name for change in every_swap(H100, A100)}
    assert {"hbm", "tensor", "power limit"} <= names
    assert every_swap(H100, H100) == []


def test_changes_add_up_in_their_order() -> None:
    both = together([scale(H100, "mufu", 2), set_numbers(H100, {"pipe.ex2": 3, "pipe.mov": 2})])
    assert both.numbers == {"pipe.ex2": 3, "pipe.mov": 2}


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^h100 has no unit, instruction or number 'muffu'; did you mean mufu\? Units are "):
        free(H100, "muffu")


# --- outcomes ---


def test_rows_are_simulates_own() -> None:
    case = Case(schedule=get_schedule("fa2"), gpu=H100, attention=PROBLEM, clock="boost")
    changes = [free(H100, "tensor"), scale(H100, "mufu", 0.5)]
    with local(1) as workers:
        base, faster, slower = sorted(what_if(case, changes, workers), key=lambda row: int(row["index"]))
    assert base["cycles"] == cycles(H100)
    assert faster["cycles"] == cycles(changes[0].on(H100))
    assert slower["cycles"] == cycles(H100.replace_number("pipe.ex2", 16))
    assert faster["saved_pct"] == pytest.approx(100 * (1 - faster["ms"] / base["ms"]))
    assert faster["saved_pct"] > 0 > slower["saved_pct"]
    assert faster["numbers"]["pipe.hmma"] == [float(H100.pipe.hmma), 0.0]
    assert [line["change"] for line in tornado([base, slower, faster])] == ["tensor", "mufu"]


def test_a_change_that_cannot_run_is_a_row_and_a_base_that_cannot_is_a_sentence() -> None:
    case = Case(schedule=get_schedule("fa2"), gpu=H100, attention=PROBLEM)
    small = set_numbers(H100, {"sm.smem_per_cta_bytes": 1024})
    with local(1) as workers:
        rows = list(what_if(case, [small], workers))
    assert rows[1]["status"] == "pruned"
    assert "gives a CTA at most 1024 B" in rows[1]["reason"]
    wide = Case(schedule=get_schedule("fa2"), gpu=H100, attention=Attention(batch=1, heads_q=1, seqlen_q=64, head_dim=512))
    with local(1) as workers, pytest.raises(ValueError, match="fa2 has no tile for head_dim 512"):
        list(what_if(wide, [small], workers))


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_no_program_follows_the_chip_unannounced(name: str) -> None:
    """Where a change of the chip gives another program, ``choices`` names the field that moved; where not, it names none."""
    schedule, gpu = get_schedule(name), load_gpu(chip_for(name, "b200"))
    problem = Attention(batch=1, heads_q=2, seqlen_q=512, head_dim=128)
    own = [str(program) for program in lowered(schedule, gpu, problem)]
    moved = set()
    for change in every_unit(gpu):
        chip = change.on(gpu)
        other = choices(schedule, chip, problem) != choices(schedule, gpu, problem)
        assert other is ([str(program) for program in lowered(schedule, chip, problem)] != own), f"{change.name} {change.kind}"
        moved |= {change.name} if other else set()
    assert moved == ({"mufu"} if name == "fa4" else set())


def test_a_default_that_follows_the_chip_is_said() -> None:
    shape = ["--gpu", "b200", "--batch", "1", "--heads", "2", "--seqlen", "512", "--head-dim", "128", "--jobs", "1"]
    done = command_line.run("whatif", "fa4", *shape, "--scale", "mufu=2")
    said = " ".join(done.stdout.split())
    assert "2x: the schedule's own exp2_emulation goes from 0.1875 to 0; --set exp2_emulation=0.1875 keeps it" in said
    answer = json.loads(command_line.run("whatif", "fa4", *shape, "--scale", "mufu=2", "--json").stdout)
    assert answer["rows"][0]["choices"] == {"exp2_emulation": [0.1875, 0.0]}
    kept = command_line.run("whatif", "fa4", *shape, "--scale", "mufu=2", "--set", "exp2_emulation=0.1875", "--json")
    assert json.loads(kept.stdout)["rows"][0]["choices"] == {}


# --- the command ---


def test_without_changes_it_draws_every_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    png = tmp_path / "tornado.png"
    done = run("--plot", str(png))
    assert done.exit_code == 0, done.output
    for part in ("what each unit costs", "free", "2x", "half", "tensor", "hbm latency", "may not be zero"):
        assert part in done.stdout
    told = {line["change"]: max(map(abs, line["saved_pct"].values())) for line in json.loads(run("--json").stdout)["tornado"]}
    assert sum(effect > 0.05 for effect in told.values()) > 3
    text = done.stdout.partition("without effect")[0].splitlines()
    for unit, effect in told.items():
        assert any(line.startswith(f"{unit} ") and words(unit) in line for line in text) is (effect >= 0.05), unit
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_tornado_is_sorted_by_gain() -> None:
    answer = json.loads(run("--json").stdout)
    gains = [max(line["saved_pct"].values()) for line in answer["tornado"]]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0
    assert len(answer["rows"]) == 3 * len(answer["tornado"]) == 3 * len(units(H100))
    assert answer["base"]["cycles"] == cycles(H100)


def test_changes_one_by_one_and_together() -> None:
    args = ["--free", "exp2", "--scale", "tensor=2", "--set-gpu", "hbm.latency_ns=100", "--from", "a100-80gb", "--take", "l2"]
    answer = json.loads(run(*args, "--json").stdout)
    assert [row["change"] for row in answer["rows"]] == ["exp2", "tensor", "hbm.latency_ns", "l2", "all together"]
    assert [row["kind"] for row in answer["rows"]] == ["free", "2x", "set", "a100-80gb's", ""]
    assert answer["base"]["cycles"] == cycles(H100)  # --set-gpu is a change here, not the base
    shown = run(*args)
    assert shown.exit_code == 0
    assert "all together" in shown.stdout


def test_another_chip_unit_by_unit() -> None:
    answer = json.loads(run("--from", "h200", "--json").stdout)
    row = next(row for row in answer["rows"] if row["change"] == "hbm")
    assert row["kind"] == "h200's"
    assert row["numbers"]["hbm.read_bytes_per_s"][1] == float(load_gpu("h200").hbm.read_bytes_per_s)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--free", "mufuu"], "h100 has no unit, instruction or number 'mufuu'; did you mean mufu?"),
        (["--scale", "mufu"], "--scale got 'mufu'; write --scale name=value"),
        (["--scale", "mufu=0"], "--scale mufu got the factor 0.0; it must be above zero"),
        (["--scale", "mufu=-2"], "--scale mufu got the factor -2.0; it must be above zero"),
        (["--scale", "mufu=fast"], "--scale mufu got 'fast'; it takes a finite number"),
        (["--scale", "mufu=inf"], "--scale mufu got 'inf'; it takes a finite number"),
        (["--scale", "mufu=1e-320"], "h100: pipe.ex2 has the value"),
        (["--set-gpu", "pipe.exp=2"], "h100 has no number 'pipe.exp'; did you mean pipe.ex2?"),
        (["--take", "mufu"], "--take needs the chip to take it from: give --from CHIP"),
        (["--from", "h10"], "gpu 'h10' is unknown; did you mean h100 or h100-pcie?"),
        (["--from", "h100"], "h100 and h100 have the same numbers in every unit"),
        (["--from", "h200", "--take", "tmem"], "h100 has no unit, instruction or number 'tmem'"),
        (["--jobs", "0"], "jobs is 0; it must be a whole number of at least 1"),
        (["--set", "block_q=100"], "block_q must be a multiple of 16 x warps"),
        (["--clock", "1"], "clock is 1.0; give MHz between 100 and 1980"),
        (["--engine", "slow"], "engine 'slow' is unknown"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    assert words in sentence(*args)


def test_an_unwritable_plot_costs_the_plot_not_the_table(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "tornado.png"
    done = run("--free", "mufu", "--plot", str(path))
    assert done.exit_code == 2
    assert "mufu" in done.stdout
    assert done.stderr.strip() == f"flashsim: cannot write {path}: no such file or directory; choose another path for --plot"


@pytest.mark.parametrize(("chip", "schedule"), [("h200", "fa2"), ("h200", "fa3"), ("b200", "fa4"), ("b200", "gluon")])
def test_what_is_only_told_enters_no_prediction(chip: str, schedule: str) -> None:
    """And what does in its place enters one, so that the test can see a difference."""
    gpu, problem = load_gpu(chip), Attention(batch=4, heads_q=8, seqlen_q=1024, head_dim=128)
    own = dict(gpu.numbers())
    changed = gpu
    for name in own.keys() & TOLD.keys():
        changed = changed.replace_number(name, 3 * own[name])
    results = [simulate(get_schedule(schedule), each, problem) for each in (gpu, changed)]
    assert results[0].cycles == results[1].cycles
    assert results[0].ms == results[1].ms
    slower = changed.replace_number("hbm.read_bytes_per_s", own["hbm.read_bytes_per_s"] / 20)
    assert simulate(get_schedule(schedule), slower, problem).cycles > results[0].cycles


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_person_sees_how_far_the_simulations_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar that counts the base and every change, on a terminal; nothing elsewhere."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    with cli_explore._progress("simulating", 3) as advance:
        advance()
        advance()
    assert "simulating" in terminal.getvalue()
    assert "2/3" in terminal.getvalue()

    calls: list[int] = []

    @contextmanager
    def counted(what: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
        yield lambda: calls.append(total)

    monkeypatch.setattr(cli_explore, "_progress", counted)
    done = run("--scale", "mufu=2", "--free", "port")
    assert done.exit_code == 0, done.output
    assert calls == [4] * 4  # the base, two changes, and both together
