"""Tables of the command line in a terminal of 80 or 100 columns: lineage, ideas, crosscheck."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run, sentence

import flashsim.cli as cli
from flashsim.render import brief, milliseconds


def as_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Print as a terminal of that width would show it."""
    monkeypatch.setenv("COLUMNS", str(columns))


def lines_within(text: str, columns: int) -> list[str]:
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    return text.splitlines()


LINEAGE = [
    {
        "generation": name, "gpu": "b200", "shape": "B1 H16 N32768 D128 bf16", "predicted_tflops": 1570.2,
        "published_tflops": 1613.0, "error_pct": 2.7, "clock_mhz": 1830.0, "hbm_gb": 0.3, "repeats": 100,
        "source": "FA4 paper, figure 4",
        "switches": {"persistent": False, "build": "2024-07"},
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
    assert "persistent=false;" in shown.stdout
    assert "build=2024-07;" in shown.stdout
    assert "mean of 100 launches" in " ".join(shown.stdout.split())
    assert json.loads(run("lineage", "--json").stdout) == json.loads(json.dumps(LINEAGE))


@pytest.mark.parametrize(("ms", "text"), [(0.02, "0.02000"), (15.2345, "15.23"), (1523.4, "1523"), (0.0170549, "0.01705")])
def test_small_times_have_as_many_digits(ms: float, text: str) -> None:
    assert milliseconds(ms) == text


def test_a_result_that_the_host_bounds_shows_its_kernels_time() -> None:
    shape = ("--gpu", "h200", "--batch", "1", "--heads", "2", "--seqlen", "512", "--head-dim", "64")
    answer = json.loads(run("predict", "fa2", *shape, "--json").stdout)
    assert answer["host_bound"]
    assert answer["kernel_ms"] == pytest.approx(answer["cycles"] / answer["clock_mhz"] / 1e3)
    assert f"0.02000 ms   of which the kernel {milliseconds(answer['kernel_ms'])} ms: " in run("predict", "fa2", *shape).stdout


UNEVEN = "imbalance: 20 of 108 SMs have 3 CTAs, the others 2 (1.09 waves)"


@pytest.mark.parametrize(
    ("limiter", "words"),
    [
        (f"{UNEVEN}; there the issue port is 85 % busy", "imbalance, issue port 85 %"),
        (f"{UNEVEN}; busiest there is HBM bandwidth, 60 %; warps wait most for CTA barriers", "imbalance, waits: CTA barriers"),
        ("latency: busiest is L2 bandwidth, 60 %; warps wait most for CTA barriers", "waits: CTA barriers"),
        ("the tensor cores, 85 % busy", "tensor cores 85 %"),
    ],
)  # fmt: skip
def test_a_limiter_in_a_cell(limiter: str, words: str) -> None:
    assert brief(limiter) == words


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


CSV = """gpu,kernel,batch,heads_q,seqlen_q,head_dim,causal,ms
h100,fa2,1,2,256,64,0,0.004
h100,fa2,1,2,256,64,1,0.5
h100,fa3,1,2,256,64,0,0.004
h100,fa3,1,2,384,64,0,0.001
h100,fa9,1,2,256,64,0,0.004
h100,fa9,1,2,512,64,0,0.004
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("crosscheck") / "rows.csv"
    file.write_text(CSV)
    return file


@pytest.mark.parametrize("columns", [80, 100])
def test_crosscheck_is_one_table_with_the_worst_row_of_each_group(
    columns: int, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_terminal(monkeypatch, columns)
    found = json.loads(run("crosscheck", str(measured), "--json").stdout)
    error = {row["line"]: row["error_pct"] for row in found["rows"] if row["status"] == "ok"}
    shown = run("crosscheck", str(measured))
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in lines_within(shown.stdout, columns)]
    assert "4 rows predicted, 2 skipped" in " ".join(shown.stdout.split())
    sizes = [abs(error[line]) for line in (2, 3, 4, 5)]
    said = " ".join(shown.stdout.split())
    assert f"absolute error: median {statistics.median(sizes):.1f} %, mean {sum(sizes) / 4:.1f} %" in said
    far, others = (sum(some) / 2 for some in (sizes[2:], sizes[:2]))
    assert f"furthest off kernel fa3 causal no (2 rows, mean {far:.1f} %; of all others {others:.1f} %)" in said
    groups = [line for line in lines if line[:1] == ["h100"]]
    assert [line[:6] for line in groups] == [
        ["h100", "fa2", "bf16", "64", "no", "1"], ["h100", "fa2", "bf16", "64", "yes", "1"],
        ["h100", "fa3", "bf16", "64", "no", "2"],
    ]  # fmt: skip
    worst = max((4, 5), key=lambda line: abs(error[line]))
    mean, bias = (abs(error[4]) + abs(error[5])) / 2, (error[4] + error[5]) / 2
    assert groups[2][6:13] == [f"{mean:,.0f}", "%", f"{bias:+,.0f}", "%", f"{error[worst]:+,.0f}", "%", f"{worst}:"]
    assert sum(line[:2] == ["2", "6"] and "'fa9'" in line for line in lines) == 1  # both skipped rows under one reason


@pytest.mark.parametrize("columns", [80, 100])
def test_crosscheck_shows_rows_and_other_groups(columns: int, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_terminal(monkeypatch, columns)
    shown = run("crosscheck", str(measured), "--rows", "--by", "kernel")
    assert shown.exit_code == 0, shown.output
    lines = [line.split() for line in lines_within(shown.stdout, columns)]
    assert [line[:2] for line in lines if line[:1] in (["fa2"], ["fa3"])] == [["fa2", "2"], ["fa3", "2"]]
    assert [line[0] for line in lines if line[1:2] == ["h100"]] == ["2", "3", "4", "5"]
    assert sum("slower" in line for line in lines) == 1  # the verdict on line 3
    assert "by got 'speed'; it takes columns of gpu, kernel" in sentence("crosscheck", str(measured), "--by", "gpu,speed")
