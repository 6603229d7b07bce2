"""The command explore: what it prints, and the sentence for each bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import command_line
import pyarrow.parquet as pq
import pytest
from matplotlib.colors import to_rgb
from small_sweeps import SHAPE, VARIED, answer, run, sentence

from flashsim import render_explore


def test_the_command_prints_its_parts(tmp_path: Path) -> None:
    png = tmp_path / "heat.png"
    done = run(*VARIED, "--heatmap", "block_q,block_kv", str(png))
    assert done.exit_code == 0, done.output
    for part in ("16 candidates: 8 ran, 8 cannot run", "best by time", "Pareto front", "how much each field matters", "heat map"):
        assert part in done.stdout
    assert "fa2 tile 100x32 with 2 warps" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""


def test_a_heat_map_can_be_read_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dark ink on light cells, light on dark: texts have the contrast of WCAG's AA, the map has a title and its scale a unit."""
    figures: list[Any] = []
    make = render_explore._figure
    monkeypatch.setattr(render_explore, "_figure", lambda *size: figures.append(make(*size)) or figures[-1])
    heat = {"x": "block_q", "y": "warps", "xs": [64, 128, 256], "ys": [4, 8], "cells": [[0.0, 5.0, 20.0], [40.0, 100.0, None]]}
    render_explore.heat_png(heat, "ms", "fa2 on h100, batch=4", tmp_path / "heat.png")
    (figure,) = figures
    axes, scale = figure.axes
    (image,) = axes.images
    texts = {text.get_text(): text for text in axes.texts}
    assert set(texts) == {"0.0", "5.0", "20.0", "40.0", "100.0", "-"}

    def luminance(colour: Any) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for name, text in texts.items():
        cell = axes.get_facecolor() if name == "-" else image.cmap(image.norm(float(name)))
        low, high = sorted(luminance(colour) for colour in (cell[:3], text.get_color()))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name
    greys = [luminance(image.cmap(image.norm(v))[:3]) for v in (0.0, 5.0, 20.0, 40.0, 100.0)]
    assert greys == sorted(greys)  # told apart without hue
    assert (figure.get_suptitle(), scale.get_ylabel()) == ("fa2 on h100, batch=4", "% above the best time")


def test_the_table_says_where_counts_come_from_and_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = run("--vary", "block_kv=64,128", "--vary", "warps=4", "--vary", "counts=binary,ideal")
    assert done.exit_code == 0, done.output
    rows = answer("--vary", "block_kv=64,128", "--vary", "warps=4", "--vary", "counts=binary,ideal")["rows"]
    assert {row["counts_from"] for row in rows} == {"binary", "derived", "ideal"}
    best = done.stdout.partition("best by time")[2].partition("note:")[0].splitlines()
    told = {line.split()[0]: line for line in best if line[:1].isdigit()}
    assert all(row["counts_from"] in told[str(row["candidate"])].split()[5:] for row in rows)
    assert "note: instruction counts are of 3 kinds (2 ideal, 1" in " ".join(done.stdout.split())
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 100


def test_values_may_follow_one_vary_and_sizes_need_no_option() -> None:
    found = answer("--vary", "block_kv=32,64", "warps=2,4")
    assert found["vary"] == {"block_kv": "32,64", "warps": "2,4"}
    bare = [word for word in SHAPE if word not in ("--seqlen", "256")]
    done = command_line.run("explore", "fa2", *bare, "--vary", "seqlen=128,256", "--jobs", "1", "--json")
    assert [row["seqlen"] for row in json.loads(done.stdout)["rows"]] == [128, 256]
    missing = command_line.run("explore", "fa2", *bare, "--vary", "warps=4")
    assert "seqlen is neither given nor varied: give --seqlen, or --vary seqlen=a,b,c" in missing.stderr


@pytest.mark.parametrize("command", ["explore", "whatif"])
def test_scope_is_not_an_option_of_what_simulates_one_sm(command: str) -> None:
    assert "No such option" in command_line.sentence(command, "fa2", *SHAPE, "--scope", "chip")


def test_nothing_varied_means_the_usual_tiles() -> None:
    found = answer("--set", "block_kv=64")
    assert found["vary"] == {
        "block_q": "32,64,128,256", "warps": "4,8", "sequence_parallel": "false,true", "deferred_divide": "false,true",
    }  # fmt: skip


def test_a_sweep_in_which_nothing_runs_says_so(tmp_path: Path) -> None:
    done = run("--vary", "block_q=100,200", "-o", str(tmp_path / "sweep.parquet"))
    assert done.exit_code == 2
    assert "none of the 2 candidates can run" in done.stderr
    assert "why candidates did not run" in done.stdout
    assert pq.read_table(tmp_path / "sweep.parquet").num_rows == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--vary", "blok_q=64"], "'blok_q' cannot be varied; did you mean block_q? fa2 varies batch, heads"),
        (["--vary", "gpu.pipe.exp=4"], "'gpu.pipe.exp' cannot be varied; did you mean gpu.pipe.ex2?"),
        (["--vary", "=4"], "'a name' cannot be varied. fa2 varies batch"),
        (["--vary", "block_q="], "--vary block_q got '', which has an empty value"),
        (["--vary", "block_q=64,,128"], "--vary block_q got '64,,128', which has an empty value"),
        (["--vary", "block_q=128:64"], "--vary block_q got '128:64', an empty range: its stop is below its start"),
        (["--vary", "block_q=64:128:0"], "--vary block_q got the range '64:128:0'; write start:stop or start:stop:step"),
        (["--vary", "block_q=64:128:-8"], "--vary block_q got the range '64:128:-8'; write start:stop"),
        (["--vary", "block_q=a:b"], "--vary block_q got the range 'a:b'; write start:stop"),
        (["--vary", "block_q=1:2:3:4"], "--vary block_q got the range '1:2:3:4'; write start:stop"),
        (["--vary", "clock=nan:inf"], "--vary clock got the range 'nan:inf'"),
        (["--vary", "block_q=1:2:0.5"], "--vary block_q got '1:2:0.5'; it takes whole numbers"),
        (["--vary", "block_q=0:64:16"], "--vary block_q got 0; it must be at least 1, or none"),
        (["--vary", "block_q=64,64"], "--vary block_q has 64 twice: write each value once"),
        (["--vary", "block_q=" + "9" * 5000], "it takes a whole number or none"),
        (["--vary", "gpu.pipe.ex2=1:1e30"], "a range of more than 9.2e+18 values: use a larger step"),
        (["--vary", "block_q=1:999999999", "--vary", "block_kv=1:999999999", "--vary", "warps=1:999"], "about 1e20 combinations"),
        (["--vary", "block_q=1:1000", "--vary", "block_kv=1:1000000"], "the space has 1,000,000,000 combinations"),
        (["--vary", "warps=four"], "--vary warps got 'four'; it takes a whole number or none"),
        (["--vary", "warps=-4"], "--vary warps got -4; it must be zero or more"),
        (["--vary", "warps"], "--vary got 'warps' without values: write warps=a,b,c"),
        (["--vary", "causal=maybe"], "--vary causal got 'maybe'; it takes true or false"),
        (["--vary", "clock=1"], "clock is 1.0; give MHz between 100 and 1980"),
        (["--vary", "gpu.pipe.ex2=-1"], "--vary gpu.pipe.ex2 got -1; it must be zero or more"),
        (["--vary", "gpu.hbm.latency_ns=0"], "hbm.latency_ns has the value 0.0; it must be more than zero"),
        (["--vary", "seqlen=99999999999"], "--vary seqlen got 99999999999; it must be at most 2147483647"),
        (["--vary", "warps=2", "--vary", "warps=4"], "warps is varied twice: write all its values in one list"),
        (["--vary", "warps=2", "--set", "warps=4"], "warps is also set to one value: drop either"),
        (["--vary", "pipe.ex2=2", "--set-gpu", "pipe.ex2=4"], "gpu.pipe.ex2 is also set to one value"),
        (["--vary", "warps=2,4", "--trials", "0"], "trials is 0; it must be a whole number of at least 1"),
        (["--vary", "warps=2,4", "--max-candidates", "0"], "max-candidates is 0; it must be a whole number"),
        (["--vary", "warps=2,4", "--top", "0"], "top is 0; it must be a whole number of at least 1"),
        (["--vary", "warps=2,4", "--seed", "-1"], "seed is -1; it must be from 0 to"),
        (["--vary", "warps=2,4", "--jobs", "0"], "jobs is 0; it must be a whole number of at least 1"),
        (["--vary", "warps=2,4", "--engine", "slow"], "engine 'slow' is unknown"),
        (["--vary", "warps=2,4", "--clock", "fast"], "clock is 'fast'; give MHz"),
        (["--vary", "warps=2,4", "--heatmap", "warps", "x.png"], "--heatmap got 'warps'; it takes two of the varied fields"),
        (["--vary", "warps=2,4", "--heatmap", "warps,block_q", "x.png"], "--heatmap got 'warps,block_q'; it takes two of"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    assert words in sentence(*args)


def test_an_unwritable_picture_costs_the_picture_not_the_table(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "heat.png"
    done = run(*VARIED, "--heatmap", "block_kv,warps", str(path))
    assert done.exit_code == 2
    assert "best by time" in done.stdout
    assert done.stderr.strip() == f"flashsim: cannot write {path}: no such file or directory; choose another path for --heatmap"


@pytest.mark.parametrize(
    ("library", "args", "words"),
    [
        ("pyarrow", ["-o", "x.parquet"], "a sweep file needs pyarrow, which is not installed: pip install '.[explore]'"),
        ("optuna", ["--trials", "1"], "--trials needs optuna, which is not installed: pip install '.[explore]'"),
        ("distributed", ["--dask", "tcp://127.0.0.1:1"], "--dask needs distributed, which is not installed"),
        ("matplotlib", ["--heatmap", "block_q,warps", "x.png"], "--heatmap needs matplotlib, which is not installed"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    library: str, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without(library), *sys.meta_path])
    assert words in sentence(*VARIED, *args)


class _Without:
    """An import system in which one library is not installed."""

    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.library)
