"""Tables of the command line in a terminal of 80 or 100 columns: lineage, ideas, crosscheck."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from command_line import run, sentence

import flashsim.cli as cli


def as_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Print as a terminal of that width would show it."""
    monkeypatch.setattr("flashsim.render.PIPED_WIDTH", columns)


def lines_within(text: str, columns: int) -> list[str]:
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    return text.splitlines()


LINEAGE = [
    {
        "generation": name, "gpu": "b200", "shape": "B1 H16 N32768 D128 bf16", "predicted_tflops": 1570.2,
        "published_tflops": 1613.0, "error_pct": 2.7, "clock_mhz": 1830.0, "hbm_gb": 0.3, "source": "FA4 paper, figure 4",
        "limiter": "the tensor cores and the MUFU (exponentials) together, 75 and 74 % busy",
        "speedups": [{"over": "Triton, B200", "predicted": 2.41, "published": (2.29, 2.29)}],
    }
    for name in ("FA4, B200", "FA3 FP8 D256, 1830 MHz kept")
]  # fmt: skip


@pytest.mark.parametrize("columns", [80, 100])
def test_lineage_prints_its_rows_speed_ups_and_limiters(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_validate", lambda module: SimpleNamespace(lineage=lambda progress: LINEAGE))
    as_terminal(monkeypatch, columns)
    shown = run("lineage")
    assert shown.exit_code == 0, shown.output
    lines = lines_within(shown.stdout, columns)
    assert sum("1570.2" in line and "1613.0" in line and "+2.7 %" in line for line in lines) == len(LINEAGE)
    assert sum("2.41x" in line and "2.29x" in line and "Triton, B200" in line for line in lines) == len(LINEAGE)
    assert "the tensor cores" in shown.stdout
    assert json.loads(run("lineage", "--json").stdout) == json.loads(json.dumps(LINEAGE))


SIDE = {"cycles": 5_386_122.0, "limiter": "latency: busiest is the tensor cores, 71 %; warps wait most for CTA barriers"}
IDEA = {
    "idea": "split Q instead of K", "generation": "FA2", "schedule": "fa2", "without_it": "split=k", "with_it": "counts=ideal",
    "shape": "B4 H32 N2048 D64",
    "claim": "fewer shared-memory reads and writes", "source": "FA2 section 3.3",
}  # fmt: skip
IDEAS = [
    {
        **IDEA, "gpu": "a100-80gb", "reason": None, "with": SIDE, "without": SIDE | {"cycles": 7_000_000.0},
        "worth": "+30 % time; SMEM bytes 2.1x; 4 barriers a block, 2 with it",
    },
    {**IDEA, "gpu": "b200", "reason": "fa2 has no switch split"},
]  # fmt: skip


@pytest.mark.parametrize("columns", [80, 100])
def test_lineage_says_what_each_idea_is_worth(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_validate", lambda module: SimpleNamespace(ideas=lambda names, gpus, progress: IDEAS))
    as_terminal(monkeypatch, columns)
    shown = run("lineage", "--ideas")
    assert shown.exit_code == 0, shown.output
    lines = lines_within(shown.stdout, columns)
    assert sum("5,386,122" in line and "7,000,000" in line for line in lines) == 1
    text = " ".join(shown.stdout.split())
    assert "FA2: split Q instead of K" in text
    assert "no switch" in text
    assert json.loads(run("lineage", "--ideas", "--json").stdout) == IDEAS


def test_lineage_takes_a_chip_for_its_ideas_only() -> None:
    assert sentence("lineage", "--gpu", "h100").endswith("each generation's row has a chip of its own: add --ideas")
    assert "idea 'tilling' is unknown; known are tiling" in sentence("lineage", "--idea", "tilling")
    assert "gpu 'h10' is unknown" in sentence("lineage", "--idea", "tiling", "--gpu", "h10")


@pytest.mark.parametrize("columns", [80, 100])
def test_crosscheck_is_readable_in_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of numbers stays one line; only what is words folds."""
    row = {
        "line": 204, "status": "ok", "gpu": "a100-80gb", "kernel": "standard", "label": "B16 H16 N16384 D128 causal bf16",
        "predicted_ms": 12.345, "measured_ms": 11.5, "predicted_cycles": 17_000_000.0, "measured_cycles": None, "error_pct": 7.4,
        "verdict": "as predicted (within 10 %)", "reason": "",
    }  # fmt: skip
    group = {"n": 305, "mean_abs_error_pct": 7.123, "median_abs_error_pct": 5.5, "max_abs_error_pct": 39.7, "bias_pct": -2.2}
    groups = {"gpu/kernel/pass/head_dim/causal": {"a100-80gb fa1 fwd 128 0": group}}
    report = {"rows": [row], "summary": {"ok": 1, "skipped": 0, **groups}}
    monkeypatch.setattr(cli, "_validate", lambda module: SimpleNamespace(crosscheck=lambda file: report))
    as_terminal(monkeypatch, columns)
    lines = lines_within(run("crosscheck", "rows.csv").stdout, columns)
    assert sum("12.35 ms" in line and "11.5 ms" in line and "+7.4 %" in line for line in lines) == 1
    assert sum("305" in line and "7.123" in line and "39.7" in line for line in lines) == 1
