"""Calibrate: what is missing is said, what was measured is compared with the chip file that claims to rest on it."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from flashsim.model.gpu import load_gpu
from flashsim.validate import calibrate
from flashsim.validate.calibrate import FEEDS, JUDGED, Machine, chip_of, compare, read_measurements

DATA = Path(calibrate.__file__).parent / "data" / "microbench_h200.csv"
HEADER = "group,name,warps,param,value,unit,spread,repeats\n"
MACHINE = Machine(nvcc="nvcc", gpu="NVIDIA H200", driver="580.159.04", compute="90", cuda="13.0")
H200 = {each.field: each for each in compare(DATA, "h200")}


@pytest.mark.parametrize("field", FEEDS)
def test_the_h200_file_is_fed_from_its_measurements(field: str) -> None:
    each = H200[field]
    assert each.measured is not None, f"{DATA.name} has no row {each.row}"
    assert each.chip == pytest.approx(each.measured, rel=0.02), f"{field} is not what {each.row} says"


def test_every_measured_number_of_the_h200_names_its_feed() -> None:
    files = (DATA.name, "h200_energy.csv", "h200_sustained.csv")
    numbers = load_gpu("h200").numbers()
    from_files = {name for name, n in numbers if n.kind == "measured" and any(file in n.source for file in files)}
    assert from_files - set(FEEDS) == set(JUDGED)


def test_rows_become_numbers_in_the_chips_units() -> None:
    assert H200["l2.bytes_per_clk"].measured == pytest.approx(132 * 40.575)
    assert H200["hbm.read_bytes_per_s"].measured == pytest.approx(4.5804e12)
    assert H200["hbm.latency_ns"].measured == pytest.approx(656.431 / 1.98)
    assert H200["latency.barrier_base"].measured == pytest.approx(13.2559)
    assert H200["power.idle_w"].measured == pytest.approx((121.398 + 124.563) / 2)


def test_a_changed_number_shows_its_difference() -> None:
    changed = compare(DATA, load_gpu("h200").replace_number("pipe.ex2", 4.0))
    assert next(each.difference_pct for each in changed if each.field == "pipe.ex2") == pytest.approx(-50, abs=0.1)


def test_a_missing_row_is_shown_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "part.csv"
    path.write_text(f"# gpu: NVIDIA H200\n{HEADER}# note\nissue,ex2,4,,8.8,cycles_per_inst,0,7\n")
    found = {each.field: each for each in compare(path, "h200")}
    assert found["pipe.ex2"].difference_pct == pytest.approx(100 * (8 / 8.8 - 1))
    assert found["pipe.ffma"].measured is None
    assert found["pipe.ffma"].difference_pct is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not a microbenchmark file; its header must be group,name,warps,param,value,unit,spread,repeats"),
        ("a,b\n1,2\n", "is not a microbenchmark file"),
        (f"# note\n{HEADER}issue,ex2,4,,fast,cycles_per_inst,0,7\n", "line 3 is not a measurement"),
        (f"{HEADER}issue,ex2\n", "line 2 is not a measurement"),
    ],
)
def test_a_file_that_is_no_measurement_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read_measurements(path)


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H200 NVL", None), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100 80GB PCIe", "a100-80gb"), ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_chips_by_what_nvidia_smi_calls_them(name: str, chip: str | None) -> None:
    assert chip_of(name) == chip


@pytest.mark.parametrize(
    ("nvcc", "listed", "named", "unnamed"),
    [
        (None, "", ["nvcc (install the CUDA toolkit", " and an NVIDIA GPU (nvidia-smi -L lists none"], []),
        ("/cuda/nvcc", "", ["an NVIDIA GPU"], ["install the CUDA toolkit"]),
        (None, "GPU 0: NVIDIA H200", ["nvcc (install the CUDA toolkit"], ["an NVIDIA GPU"]),
    ],
)
def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, nvcc: str | None, listed: str, named: list[str], unnamed: list[str]
) -> None:
    monkeypatch.setattr(calibrate, "NVCC_PLACES", ())
    monkeypatch.setattr(calibrate.shutil, "which", lambda name: nvcc)
    monkeypatch.setattr(calibrate, "_output", lambda *command: listed)
    with pytest.raises(ValueError, match=r"^calibrate measures a real GPU, and this machine lacks ") as error:
        calibrate.main([])
    assert all(words in str(error.value) for words in named)
    assert not any(words in str(error.value) for words in unnamed)


def script(folder: Path, body: str) -> Path:
    path = folder / "microbench"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_run_is_written_whole_with_what_it_was_taken_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = script(tmp_path, f"echo issue >&2; grep -v '^#' '{DATA}'")
    monkeypatch.setattr(calibrate, "find_machine", lambda: MACHINE)
    monkeypatch.setattr(calibrate, "build", lambda machine, folder: program)
    monkeypatch.chdir(tmp_path)
    assert calibrate.main() == 0
    written = tmp_path / "microbench_h200.csv"
    head = written.read_text().splitlines()[:5]
    assert head[:3] == ["# gpu: NVIDIA H200", "# driver: 580.159.04", "# cuda: 13.0"]
    assert re.fullmatch(r"# date: \d{4}-\d\d-\d\d", head[3])
    assert head[4] == HEADER.strip()
    assert read_measurements(written) == read_measurements(DATA)
    shown = capsys.readouterr().out
    assert "measured here beside h200.toml" in shown
    assert "pipe.ex2" in shown


def test_a_run_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    output = tmp_path / "kept.csv"
    output.write_text("old\n")
    program = script(tmp_path, "echo group,name; echo out of memory >&2; exit 3")
    with pytest.raises(ValueError, match="the microbenchmarks stopped with exit code 3: out of memory"):
        calibrate.run(program, MACHINE, output, lambda line: None)
    assert output.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.csv", "microbench"]


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    nvcc = script(tmp_path, "echo \"main.cu(3): error: expected a ';'\" >&2; exit 2")
    machine = Machine(nvcc=str(nvcc), gpu="NVIDIA H200", driver="1", compute="90", cuda="13.0")
    with pytest.raises(ValueError, match=r"nvcc could not build .*main.cu: main.cu\(3\): error: expected a ';'"):
        calibrate.build(machine, tmp_path)


def test_an_output_folder_that_is_not_there_is_refused_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "find_machine", lambda: MACHINE)
    with pytest.raises(ValueError, match=r"its folder does not exist; choose another path for -o$"):
        calibrate.main(["-o", str(tmp_path / "none" / "out.csv")])
