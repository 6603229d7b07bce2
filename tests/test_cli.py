"""The command line: what each command prints, and the sentence for each bad input (exit code 2, no traceback)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from command_line import run, sentence
from machines import chip_for

import flashsim.cli as cli
import flashsim.sim.forecast as forecast_module
from flashsim.model.attention import Attention
from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.predict import peak_flops

ALL_GPUS, ALL_SCHEDULES = list(GPUS), list(SCHEDULES)
SHAPE = ["--gpu", "h200", "--batch", "1", "--heads", "2", "--seqlen", "512", "--head-dim", "64"]


def shape(**changed: str) -> list[str]:
    """SHAPE with options replaced or added, e.g. head_dim="300"."""
    options = dict(zip(SHAPE[::2], SHAPE[1::2], strict=True))
    options |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return [word for pair in options.items() for word in pair]


# --- commands ---


def test_gpus_lists_every_chip() -> None:
    result = run("gpus")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ALL_GPUS)


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("name", ALL_GPUS)
def test_gpus_name_shows_every_number_with_its_source(name: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number, unit and kind stay whole in a narrow terminal; long words of a source may not."""
    monkeypatch.setenv("COLUMNS", columns)
    result = run("gpus", name)
    assert result.exit_code == 0
    words = set(result.stdout.split())
    for number, value in load_gpu(name).numbers():
        assert {number, value.unit, value.kind} <= words
        assert value.source.split()[0] in words or columns == "80"


def test_schedules_lists_every_schedule() -> None:
    result = run("schedules")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ALL_SCHEDULES)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_schedules_name_shows_fields_and_program(name: str) -> None:
    result = run("schedules", name, "--gpu", chip_for(name))
    assert result.exit_code == 0
    assert all(field in result.stdout for field in SCHEDULES[name].__dataclass_fields__)
    assert f"program {name}" in result.stdout


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_predict_prints_the_parts_of_a_result(name: str) -> None:
    gpu = chip_for(name)
    result = run("predict", name, *shape(gpu=gpu))
    assert result.exit_code == 0, result.output
    for part in ("cycles", "TFLOP/s", "limiter", "units busy", "warps wait for", "compulsory", "occupancy", "bounds"):
        assert part in result.stdout
    for part in ("warp instructions", "counts from", f"numbers of {gpu}", "datasheet", "x 32 ->"):
        assert part in result.stdout


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_predict_json_has_the_contract(name: str) -> None:
    gpu = chip_for(name)
    result = run("predict", name, *shape(gpu=gpu), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    keys = {
        "cycles", "ms", "tflops", "utilization", "clock_mhz", "limiter", "units", "stalls", "bytes", "instructions",
        "occupancy", "bounds", "provenance", "schedule", "gpu", "attention",
    }
    assert keys <= answer.keys()
    assert {"hbm_read", "hbm_write", "l2", "smem"} <= answer["bytes"].keys()
    assert answer["attention"]["pass"] == "fwd"
    assert (answer["schedule"], answer["gpu"]) == (name, gpu)
    assert answer["tflops"] == pytest.approx(4 * 2 * 512 * 512 * 64 / answer["ms"] / 1e9)


def test_predict_heeds_clock_switches_and_chip_numbers() -> None:
    def predicted(*args: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(run("predict", "fa2", *SHAPE, "--json", *args).stdout)
        return answer

    base = predicted()
    assert predicted("--clock", "1000")["clock_mhz"] == pytest.approx(1000)
    assert "power limit ignored" in predicted("--clock", "boost")["clock_rule"]
    assert predicted("--set", "counts=ideal")["counts_from"] == ["ideal"]
    assert predicted("--set-gpu", "pipe.ex2=40")["cycles"] > base["cycles"]
    assert predicted("--set-gpu", "pipe.ex2=40")["provenance"]["assumed"] == base["provenance"]["assumed"] + 1
    assert predicted("--causal")["attention"]["causal"] is True
    assert predicted("--heads-kv", "1")["attention"]["heads_kv"] == 1


def test_both_engines_answer_alike() -> None:
    small = shape(seqlen="128", head_dim="64")
    answers = [json.loads(run("predict", "fa2", *small, "--engine", e, "--json").stdout) for e in ("fast", "simpy")]
    assert answers[0] == answers[1]


def test_compare_has_one_row_a_schedule_and_keeps_the_refused() -> None:
    result = run("compare", "standard", "fa1", "fa2", *shape(head_dim="256"))
    assert result.exit_code == 0, result.output
    assert "fa1 has no tile for head_dim 256" in " ".join(result.stdout.split())
    answer = json.loads(run("compare", "standard", "fa1", "fa2", *shape(head_dim="256"), "--json").stdout)
    assert [row["schedule"] for row in answer] == ["standard", "fa1", "fa2"]
    assert answer[0]["speedup"] == 1
    assert answer[1]["error"].startswith("fa1 has no tile")
    assert answer[2]["speedup"] == pytest.approx(answer[0]["ms"] / answer[2]["ms"])


def test_compare_takes_switches_of_one_row() -> None:
    answer = json.loads(run("compare", "fa2", "fa2:counts=ideal,block_kv=64", *SHAPE, "--json").stdout)
    assert answer[1]["schedule"] == "fa2:counts=ideal,block_kv=64"
    assert answer[0]["cycles"] != answer[1]["cycles"]


def shown(*args: str) -> str:
    """What a command prints, as one line."""
    return " ".join(run(*args).stdout.split())


def test_a_stand_in_says_that_it_is_one() -> None:
    """In the words for people and for programs, of every command that predicts with it; no other schedule says so."""
    words = "an assumption: cuDNN's kernels are closed, and here fa3 stands for them"
    assert words in shown("predict", "cudnn", *SHAPE)
    assert json.loads(run("predict", "cudnn", *SHAPE, "--json").stdout)["notes"] == [words]
    assert f"note: cudnn: {words}" in shown("compare", "fa2", "cudnn", *SHAPE)
    rows = json.loads(run("compare", "fa2", "cudnn", *SHAPE, "--json").stdout)
    assert [row["notes"] for row in rows] == [[], [words]]
    varied = ("--vary", "version=9.13,9.19", "--jobs", "1")
    assert f"note: {words}" in shown("explore", "cudnn", *SHAPE, *varied)
    assert json.loads(run("explore", "cudnn", *SHAPE, *varied, "--json").stdout)["notes"] == [words]
    changed = ("--scale", "mufu=2", "--jobs", "1")
    assert f"note: {words}" in shown("whatif", "cudnn", *SHAPE, *changed)
    assert json.loads(run("whatif", "cudnn", *SHAPE, *changed, "--json").stdout)["notes"] == [words]


def test_a_sum_of_units_below_the_prediction_is_explained() -> None:
    """Of one CTA, whose time is latency and launch: the sum has its work on all SMs. Where the chip is full it is above."""
    words = "the sum is less than predicted: it has all work spread evenly over all SMs"
    assert words in shown("predict", "fa3", *shape(batch="1", heads="1", seqlen="128"))
    full = shown("predict", "fa2", *shape(batch="4", heads="16", seqlen="2048"))
    assert "units one after the other (sum of units)" in full
    assert words not in full


def test_compare_fails_where_none_can_run() -> None:
    result = run("compare", "fa1", "fa2", *shape(head_dim="512"))
    assert result.exit_code == 2
    assert "none of these schedules can run this problem on this chip" in result.stderr


def test_trace_writes_a_document_and_notes_a_cut(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("trace", "fa2", *SHAPE, "-o", str(out), "--limit", "50")
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["traceEvents"]
    assert result.stderr.strip() == "note: fa2_fwd: only the first 50 records are in the trace; raise --limit for more"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("where", ["missing/out.json", "folder"])
def test_trace_to_an_unwritable_path_leaves_nothing(where: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    said = sentence("trace", "fa2", *SHAPE, "-o", str(tmp_path / where))
    assert said.startswith(f"flashsim: cannot write {tmp_path / where}: ")
    assert said.endswith("choose another path for -o")
    assert [p.name for p in tmp_path.rglob("*")] == ["folder"]


def test_crosscheck_of_a_file_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_validate", lambda module: SimpleNamespace(crosscheck=lambda file: file.read_text()))
    assert sentence("crosscheck", "/no/rows.csv") == "flashsim: /no/rows.csv: no such file or directory"


def test_calibrate_hands_on_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_validate", lambda module: SimpleNamespace(main=lambda: 3))
    assert run("calibrate").exit_code == 3


def test_a_validate_module_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match=r"this installation has no flashsim\.validate\.nothing"):
        cli._validate("nothing")


# --- bad input ---


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["predict", "fa22", *SHAPE], "schedule 'fa22' is unknown; did you mean fa2?"),
        (["predict", "fa2", *shape(gpu="h10")], "gpu 'h10' is unknown; did you mean h100 or h100-pcie?"),
        (["predict", "fa2", *shape(gpu="a100")], "gpu 'a100' is unknown; did you mean a100-40gb or a100-80gb?"),
        (["predict", "mykernel", *SHAPE], "schedule 'mykernel' is unknown. Known are standard, "),
        (["predict", "fa2", *shape(gpu="my.toml")], "chip file my.toml does not exist"),
        (["gpus", "h20"], "gpu 'h20' is unknown; did you mean h200?"),
        (["schedules", "standart"], "schedule 'standart' is unknown; did you mean standard?"),
        (["predct"], "command 'predct' is unknown; did you mean predict?"),
        (["predict", "fa2", *shape(batch="0")], "batch is 0; it must be a whole number of at least 1"),
        (["predict", "fa2", *shape(seqlen="-4")], "seqlen_q is -4; it must be a whole number of at least 1"),
        (["predict", "fa2", *shape(heads="3", heads_kv="2")], "heads_q must be a multiple of heads_kv"),
        (["predict", "fa2", *shape(heads_kv="0")], "heads_kv is 0; it must be a whole number of at least 1"),
        (["predict", "fa2", *shape(head_dim="300")], "fa2 has no tile for head_dim 300; the largest is 256"),
        (["predict", "fa2", *shape(dtype="int8")], "dtype is 'int8'; it must be one of bf16, fp16, fp8, fp32"),
        (["predict", "fa2", *shape(dtype="fp8")], "fa2 runs bf16 or fp16, got dtype 'fp8'"),
        (["predict", "fa2", *SHAPE, "--pass", "back"], "pass is 'back'; it must be one of fwd, bwd, fwd+bwd"),
        (["predict", "fa3", *shape(gpu="a100-40gb")], "fa3 multiplies with wgmma and a100-40gb has none: choose fa2"),
        (["predict", "fa4", *SHAPE], "fa4 keeps S and O in TMEM; h200 has none: choose fa3, or gpu b200"),
        (["schedules", "fa4", "--gpu", "h100"], "fa4 keeps S and O in TMEM; h100 has none: choose fa3, or gpu b200"),
        (["predict", "fa2", *SHAPE, "--pass", "bwd"], "fa2 has a forward schedule only"),
        (["predict", "fa2", *shape(seqlen="abc")], "Invalid value for '--seqlen': 'abc' is not a valid integer."),
        (["predict", "fa2", "--gpu", "h200"], "Missing option '--batch'."),
        (["predict", "fa2", *SHAPE, "--clock", "fast"], "clock is 'fast'; give MHz between 100 and 1980 ("),
        (["predict", "fa2", *SHAPE, "--clock", "2500"], "clock is 2500.0; give MHz between 100 and 1980 (h200's"),
        (["predict", "fa2", *SHAPE, "--clock", "1"], "clock is 1.0; give MHz between 100 and 1980 ("),
        (["predict", "fa2", *SHAPE, "--clock", "nan"], "clock is nan; give MHz between 100 and 1980 ("),
        (["predict", "fa2", *SHAPE, "--engine", "slow"], "engine 'slow' is unknown; choose one of fast"),
        (["predict", "fa2", *SHAPE, "--set", "blok_q=64"], "fa2 has no field 'blok_q'; did you mean block_q?"),
        (["predict", "fa2", *SHAPE, "--set", "warps"], "--set got 'warps'; write --set name=value"),
        (["predict", "fa2", *SHAPE, "--set", "warps=four"], "warps got 'four'; it takes a whole number or none"),
        (["predict", "fa2", *SHAPE, "--set", "warps=-4"], "--set warps got -4; it must be zero or more"),
        (["predict", "fa1", *SHAPE, "--set", "warps=0"], "fa1 cannot run with warps=0"),
        (["predict", "fa2", *SHAPE, "--set", "block_q=100"], "block_q must be a multiple of 16 x warps = 64"),
        (["predict", "standard", *SHAPE, "--set", "mask_kernel=7"], "got '7'; it takes true or false or none"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "pipe.exp=4"], "no number 'pipe.exp'; did you mean pipe.ex2?"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "pipe.ex2=x"], "--set-gpu pipe.ex2 got 'x'; it takes a finite number"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "pipe.ex2=inf"], "it takes a finite number"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "pipe.ex2=-1"], "h200: pipe.ex2 has the value -1.0"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "pipe.ex2=1e15"], "has the value 1e+15; it must be at most 1e+09 cycles"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "clock.boost_mhz=1e-300"], "has the value 1e-300; it must be at least 1 MHz"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "power.limit_w=1e300"], "has the value 1e+300; it must be at most 1e+06 W"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "power.ex2_pj=1e30"], "has the value 1e+30; it must be at most 1e+06 pJ"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "power.voltage_floor=1e-9"], "1e-09; it must be at least 0.001 ratio"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "sm.count=1e7"], "has the value 1e+07; it must be at most 1e+06 count"),
        (["predict", "fa2", *SHAPE, "--set-gpu", "sm.count=1e18"], "has the value 1e+18; it must be at most 1e+06 count"),
        (["predict", "fa2", *shape(seqlen="9" * 14)], "seqlen is 99999999999999; it must be at most 2147483647"),
        (["predict", "fa2", *shape(batch="2147483647")], "seqlen_q is 2199023254528; at most 268435456 query rows can be"),
        (["predict", "fa2", *SHAPE, "--set", "block_kv=0"], "block_kv got 0; it must be at least 1, or none"),
        (["compare", "fa2", "fa9", *SHAPE], "schedule 'fa9' is unknown; did you mean fa"),
        (["trace", "fa2", *SHAPE, "-o", "x.json", "--limit", "0"], "limit is 0; it must be a whole number"),
        (["trace", "fa2", *SHAPE, "-o", "x.json", "--blocks", "-1"], "blocks is -1; it must be a whole number"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    assert words in sentence(*args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["predict", "fa2", *SHAPE, "--causl"], "--causal"),
        (["predict", "fa2"], "Missing option"),
        (["predict", "fa2", *shape(batch="two")], "'two' is not a valid integer"),
        (["predict", "fa2", *SHAPE, "--scope", "gpc"], "'gpc' is not one of 'sm', 'chip'"),
        (["compare", *SHAPE], "Missing argument"),
    ],
)
def test_usage_errors_are_clicks_own(args: list[str], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_a_problem_beyond_this_machine_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("flashsim.sim.predict.simulate", full)
    assert sentence("predict", "fa2", *SHAPE).endswith("is too large for this machine's memory: use smaller sizes")


def test_ctrl_c_says_so_and_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_validate", lambda module: SimpleNamespace(lineage=interrupted, ideas=interrupted))
    for args in (["lineage"], ["lineage", "--ideas"]):
        result = run(*args)
        assert result.exit_code == 130
        assert result.stderr.strip() == "flashsim: interrupted"


def test_importing_the_command_line_loads_no_engine() -> None:
    code = "import sys, flashsim.cli; print([m for m in ('numba', 'simpy', 'numpy', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nonsense"], "No such option '--nonsense'."),
        (["predict", "fa2", "--bogus"], "No such option '--bogus'."),
        (["predict"], "Missing argument 'SCHEDULE|FILE.py'."),
        (["gpus", "a", "b"], "Got unexpected extra argument (b)"),
        (["predict", "fa2", "--gpu", "h100", "--batch", "x"], "'x' is not a valid integer."),
    ],
)
def test_a_wrong_option_is_one_sentence(args: list[str], words: str) -> None:
    assert words in sentence(*args)


def test_without_a_command_there_is_help() -> None:
    result = run()
    assert all(f"{title}:" in result.output for title in cli.GROUPS)
    assert "Others:" not in result.output
    assert sorted(name for group in cli.GROUPS.values() for name in group) == cli.main.list_commands(click.Context(cli.main))


def test_a_long_simulation_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast is a small part's time, times what was left out; a short problem has none."""
    shape = ["--gpu", "h100", "--heads", "8", "--seqlen", "256", "--head-dim", "64", "--clock", "boost"]
    assert "note: this simulation" not in run("predict", "fa2", *shape, "--batch", "4").stderr
    monkeypatch.setattr(forecast_module, "LONG_CHIP_MS", 0.002)
    monkeypatch.setattr(forecast_module, "PROBE_CHIP_MS", 0.0005)
    result = run("predict", "fa2", *shape, "--batch", "64")
    assert result.exit_code == 0
    assert re.fullmatch(
        r"note: this simulation takes about [\d.]+ (s|min): the chip itself would work [\d.e-]+ s or longer;"
        r" a smaller batch has nearly the same TFLOP/s",
        result.stderr.strip(),
    )


def test_a_forecast_scales_with_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few sequences or heads are tried, in the same groups, and the time is that of all; one head cannot be cut."""
    clock = iter(range(0, 100, 3))
    asked = []
    monkeypatch.setattr(forecast_module, "simulate", lambda schedule, gpu, attention: asked.append(attention))
    monkeypatch.setattr(forecast_module.time, "perf_counter", lambda: next(clock))
    problem = Attention(batch=1024, heads_q=32, heads_kv=8, seqlen_q=4096, head_dim=128)
    found = forecast_module.forecast(get_schedule("fa3"), load_gpu("h100"), problem)
    assert found is not None
    small = asked[-1]
    assert found.seconds == 3 * problem.flops() / small.flops()
    assert (small.seqlen_q, small.head_dim, small.heads_q // small.heads_kv) == (4096, 128, 4)
    peak = peak_flops(load_gpu("h100"), float(load_gpu("h100").clock.boost_mhz))
    assert 1e3 * small.flops() / peak == pytest.approx(forecast_module.PROBE_CHIP_MS, rel=0.5)
    lone = Attention(batch=1, heads_q=1, seqlen_q=2**19, head_dim=128)
    found = forecast_module.forecast(get_schedule("fa3"), load_gpu("h100"), lone)
    assert found is not None
    assert found.sentence.startswith("this simulation is long: the chip itself would work ")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "0.5 s"), (42.0, "42 s"), (100.0, "1.7 min"), (300.0, "5 min"), (40 * 3600.0, "40 h")]
)
def test_durations_are_in_two_digits(seconds: float, words: str) -> None:
    assert forecast_module.duration(seconds) == words
