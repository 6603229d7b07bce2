"""Crosscheck: a CSV of measurements in, every row predicted or listed with its reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import get_schedule
from flashsim.sim.predict import simulate
from flashsim.validate import crosscheck as module
from flashsim.validate.crosscheck import crosscheck, summarize
from flashsim.validate.protocol import clock_in, flush_in, repeats_in
from flashsim.validate.verdict import Prediction, verdict

COLUMNS = [
    "source", "gpu", "clock_mhz", "kernel", "pass", "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim",
    "head_dim_v", "causal", "variant", "ms", "tflops", "cycles", "note",
]
SMALL = {"gpu": "h200", "kernel": "fa2", "batch": "1", "heads_q": "2", "seqlen_q": "256", "head_dim": "64", "ms": "0.01"}
ATTENTION = Attention(batch=1, heads_q=2, seqlen_q=256, head_dim=64)


def write(folder: Path, *rows: dict[str, str], columns: list[str] | None = None) -> Path:
    """A file with these rows; cells that a row does not name are blank."""
    names = columns or COLUMNS
    path = folder / "rows.csv"
    path.write_text("\n".join([",".join(names), *(",".join(row.get(name, "") for name in names) for row in rows)]) + "\n")
    return path


def only(report: dict[str, Any]) -> dict[str, Any]:
    (row,) = report["rows"]
    assert isinstance(row, dict)
    return row


@pytest.fixture(scope="module")
def small() -> Any:
    return simulate(get_schedule("fa2"), load_gpu("h200"), ATTENTION)


def test_a_row_is_the_prediction_beside_the_measurement(tmp_path: Path, small: Any) -> None:
    row = only(crosscheck(write(tmp_path, SMALL)))
    assert (row["line"], row["status"], row["reason"], row["label"]) == (2, "ok", "", ATTENTION.label)
    assert (row["gpu"], row["kernel"], row["pass"], row["dtype"]) == ("h200", "fa2", "fwd", "bf16")
    assert (row["head_dim"], row["causal"]) == (64, 0)
    assert row["predicted_ms"] == small.ms
    assert row["predicted_cycles"] == small.cycles
    assert row["measured_tflops"] == pytest.approx(ATTENTION.flops() / 0.01 / 1e9)
    assert row["error_pct"] == pytest.approx(100 * (small.ms / 0.01 - 1))


def test_the_fewest_columns_are_enough(tmp_path: Path, small: Any) -> None:
    row = only(crosscheck(write(tmp_path, SMALL, columns=list(SMALL))))
    assert (row["status"], row["predicted_ms"]) == ("ok", small.ms)


@pytest.mark.parametrize("causal", ["0", "1"])
def test_tflops_become_ms_by_the_papers_flops(tmp_path: Path, causal: str) -> None:
    row = only(crosscheck(write(tmp_path, {**SMALL, "ms": "", "tflops": "5", "causal": causal})))
    flops = 4 * 64 * 256 * 256 * 2 / (2 if causal == "1" else 1)
    assert row["measured_ms"] == pytest.approx(flops / 5e9)
    assert row["error_pct"] == pytest.approx(100 * (row["predicted_ms"] / row["measured_ms"] - 1))


def test_cycles_where_given_are_what_is_compared(tmp_path: Path, small: Any) -> None:
    row = only(crosscheck(write(tmp_path, {**SMALL, "ms": "5", "cycles": str(2 * small.cycles)})))
    assert row["error_pct"] == pytest.approx(-50)
    assert f"predicted {small.cycles:,.0f} cycles" in row["verdict"]


def test_clock_mhz_caps_the_clock(tmp_path: Path) -> None:
    free, slow = crosscheck(write(tmp_path, SMALL, {**SMALL, "clock_mhz": "500"}))["rows"]
    asked = simulate(get_schedule("fa2"), load_gpu("h200"), ATTENTION, clock=500.0)
    assert slow["predicted_ms"] == asked.ms > free["predicted_ms"]


def test_a_rows_protocol_decides_how_long_its_load_lasted() -> None:
    assert repeats_in({"source": "FA3 paper Table 2 (arXiv 2407.08608v2)"}) == 100
    assert repeats_in({"source": "FA3 chart flash3_fp16_fwd.png"}) == 100
    assert repeats_in({"source": "FA2 README chart"}) == repeats_in({}) == 0
    assert repeats_in({"source": "FA3 paper Table 2", "repeats": "7"}) == 7
    assert repeats_in({"cycles": "1000"}) == 1
    assert clock_in({"cycles": 1.5e6, "time_ns": 1e6}) == 1500.0
    assert clock_in({"cycles": 1.5e6, "time_ns": None}) is clock_in({}) is None
    assert flush_in({"note": "free clock 700 W; do_bench median"}) == 256 * 2**20
    assert flush_in({"note": "read off a chart"}) == flush_in({}) == 0
    with pytest.raises(ValueError, match=r"repeats is '2\.5'; it must be a whole number of launches, 0 for a load that has"):
        repeats_in({"repeats": "2.5"})


def test_fewer_launches_after_a_rest_are_faster(tmp_path: Path) -> None:
    long = {**SMALL, "batch": "4", "heads_q": "16", "seqlen_q": "4096", "head_dim": "128"}
    rows = [{**long, "repeats": repeats} for repeats in ("1", "0")]
    one, settled = crosscheck(write(tmp_path, *rows, columns=[*COLUMNS, "repeats"]))["rows"]
    assert one["predicted_ms"] < 0.99 * settled["predicted_ms"]


def test_a_variant_sets_switches(tmp_path: Path) -> None:
    path = write(tmp_path, {**SMALL, "variant": "block_kv=64; counts=ideal;warps=none"})
    asked = simulate(get_schedule("fa2", block_kv=64, counts="ideal"), load_gpu("h200"), ATTENTION)
    assert only(crosscheck(path))["predicted_cycles"] == asked.cycles


def test_gpu_stands_in_for_the_column(tmp_path: Path) -> None:
    columns = [name for name in SMALL if name != "gpu"]
    row = only(crosscheck(write(tmp_path, SMALL, columns=columns), gpu="a100-80gb"))
    assert (row["gpu"], row["predicted_ms"]) == (
        "a100-80gb", simulate(get_schedule("fa2"), load_gpu("a100-80gb"), ATTENTION).ms,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "h300"}, "gpu 'h300' is unknown; did you mean h100, h200 or b300?"),
        ({"gpu": "no.toml"}, "chip file no.toml does not exist"),
        ({"kernel": "fa22"}, "schedule 'fa22' is unknown; did you mean fa2?"),
        ({"kernel": ""}, "kernel is missing"),
        ({"seqlen_q": ""}, "seqlen_q is missing"),
        ({"pass": "bwd"}, "fa2 has a forward schedule only, got pass 'bwd'"),
        ({"pass": "sideways"}, "pass is 'sideways'; it must be one of fwd, bwd, fwd+bwd: change pass_"),
        ({"dtype": "fp7"}, "dtype is 'fp7'; it must be one of"),
        ({"batch": "four"}, "batch is 'four'; it must be a number above zero"),
        ({"batch": "1.5"}, "batch is 1.5; it must be a whole number from 1 to 2147483647"),
        ({"batch": "-1"}, "batch is '-1'; it must be a number above zero"),
        ({"batch": "nan"}, "batch is 'nan'; it must be a number above zero"),
        ({"seqlen_q": "400000000"}, "batch x heads_q x seqlen_q is 800000000; at most 268435456 query rows"),
        ({"heads_kv": "3"}, "heads_q is 2 and heads_kv is 3; heads_q must be a multiple of heads_kv"),
        ({"head_dim": "512"}, "fa2 has no tile for head_dim 512"),
        ({"causal": "maybe"}, "causal is 'maybe'; it must be 0 or 1"),
        ({"ms": ""}, "ms, tflops and cycles are all blank; give one to compare with"),
        ({"ms": "0"}, "ms is '0'; it must be a number above zero"),
        ({"cycles": "1e999"}, "cycles is '1e999'; it must be a number above zero"),
        ({"clock_mhz": "5"}, "clock is 5.0; give MHz between 100 and 1980 (h200's clock.boost_mhz), boost or power"),
        ({"clock_mhz": "2500"}, "clock is 2500.0; give MHz between 100 and 1980"),
        ({"variant": "9.13"}, "variant '9.13' names no switch; write field=value;field=value or one of no_intra_overlap"),
        ({"variant": "no_intra_overlap"}, "fa2 has no field 'intra_overlap'. Its fields are block_q"),
        ({"variant": "stages=2"}, "fa2 has no field 'stages'. Its fields are block_q"),
        ({"variant": "block_q=wide"}, "variant sets block_q to 'wide'; it takes int or none"),
    ],
)
def test_a_row_that_cannot_be_modelled_is_listed_with_its_reason(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    bad, good = crosscheck(write(tmp_path, {**SMALL, **change}, SMALL))["rows"]
    assert (bad["line"], bad["status"], bad["predicted_ms"], bad["error_pct"]) == (2, "skipped", None, None)
    assert bad["reason"].startswith(reason)
    assert (good["line"], good["status"]) == (3, "ok")


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [
        "# where this comes from", "note,gpu,kernel,batch,heads_q,seqlen_q,head_dim,ms", "",
        '"two', 'lines",h200,fa2,1,2,256,64,0.01', "# skipped", "short,h200", '"never closed,h200,fa2,1,2,256,64,0.01',
        "last,h200,fa2,1,2,256,64,0.01",
    ]
    path.write_text("\r\n".join(lines))
    found = [(each["line"], each["status"], each["reason"]) for each in crosscheck(path)["rows"]]
    assert found == [
        (4, "ok", ""),
        (7, "skipped", "the line has 2 cells and the header 8"),
        (8, "skipped", "the line is not CSV: unexpected end of data"),
        (9, "ok", ""),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; give a CSV file with a header and rows"),
        ("# only a comment\n", "is empty; give a CSV file with a header and rows"),
        (",".join(COLUMNS), "has a header and no rows; add measurements"),
        ("gpu,kernel,ms\nh200,fa2,1\n", "has no column batch, heads_q, seqlen_q, head_dim; it needs gpu, kernel, batch,"),
        ("gpu,kernel,batch,heads_q,seqlen_q,head_dim\nh200,fa2,1,1,1,64\n", "has none of the columns ms, tflops, cycles"),
        (",".join([*COLUMNS, "ms"]) + "\n", "has the column ms twice; keep one"),
        ('"gpu,kernel\n', "the header is not CSV: unexpected end of data"),
    ],
)
def test_a_file_without_the_columns_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"rows\.csv") as error:
        crosscheck(path)
    assert sentence in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        crosscheck(tmp_path / "none.csv")
    with pytest.raises(OSError, match="directory"):
        crosscheck(tmp_path)
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=r"image.csv is not UTF-8 text .*; give a CSV file"):
        crosscheck(tmp_path / "image.csv")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"engine": "quick"}, "engine 'quick' is unknown; choose one of fast, simpy"),
        ({"jobs": 0}, "jobs is 0; it must be at least 1, or None for one per CPU"),
        ({"gpu": "h300"}, "gpu 'h300' is unknown"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match="is") as error:
        crosscheck(write(tmp_path, SMALL), **options)
    assert str(error.value).startswith(sentence)


def test_equal_rows_are_predicted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(case: module.Case) -> Prediction:
        calls.append(case)
        return Prediction(ms=1.0, cycles=1.0, tflops=1.0, limiter="HBM bandwidth")

    monkeypatch.setattr(module, "predict", counted)
    longer = {**SMALL, "seqlen_q": "512"}
    crosscheck(write(tmp_path, SMALL, {**SMALL, "ms": "2", "heads_kv": "2"}, longer, SMALL))
    assert [case.attention.seqlen_q for case in calls] == [256, 512]


def test_processes_change_nothing(tmp_path: Path) -> None:
    lengths = [{**SMALL, "seqlen_q": str(64 * n)} for n in range(1, 12)]
    path = write(tmp_path, *lengths, {**SMALL, "gpu": "h300"}, {**SMALL, "pass": "bwd"})
    assert crosscheck(path, jobs=1) == crosscheck(path, jobs=2)


@pytest.mark.parametrize(
    ("error", "limiter", "words"),
    [
        (9.9, "", "as predicted (within 10 %)"),
        (-9.9, "", "as predicted (within 10 %)"),
        (10.1, "", "faster than predicted by more than 10 %: the model misses something or the clock was higher"),
        (-30, "HBM bandwidth, 90 % busy", "predicted 1.5 ms, bound by HBM bandwidth, 90 % busy; look for more HBM bytes"),
        (-30, "parallelism: 9 of 132 SMs have no CTA", "look for a smaller grid"),
        (-30, "the FMA pipe, 90 % busy", "look for instructions beside the modelled ones"),
    ],
)
def test_verdicts_say_what_the_error_means(error: float, limiter: str, words: str) -> None:
    said = verdict(error, Prediction(ms=1.5, cycles=1e6, tflops=1.0, limiter=limiter))
    assert words in said
    assert said.startswith("slower than predicted by more than 10 %: ") == (error < -10)


FA3_ROW = {"gpu": "h100", "kernel": "fa3", "batch": "4", "heads_q": "16", "seqlen_q": "4096", "head_dim": "128"}
FA3_PER_MHZ = 132 * 4096 * 4096 / (24 * 176) / 1e6  # TFLOP/s of an H100's tensor cores, busy with 24 blocks of 176 keys for 4096
TOO_FAST = "faster than the hardware allows this kernel: "


def test_a_row_in_tflops_is_told_in_tflops_with_its_bound(tmp_path: Path) -> None:
    """Beside tensor cores an H100's SMs run at 0.91 of boost, so that the datasheet's peak of 989 TFLOP/s is out of reach."""
    rates = ("1000", "900", "600", "60")
    fast, near, good, slow = crosscheck(write(tmp_path, *({**FA3_ROW, "tflops": rate} for rate in rates)))["rows"]
    assert fast["given"] == "tflops"
    assert round(fast["peak_tflops"]) == 989
    mhz = 1980 * load_gpu("h100").power.tensor_stretch
    bound = f"at most {FA3_PER_MHZ * mhz:.4g} TFLOP/s: the tensor cores"
    assert fast["verdict"] == f"{TOO_FAST}{bound} at {mhz:,.0f} MHz; check the row"
    assert near["verdict"].startswith("faster than predicted by more than 10 %: ")
    assert good["verdict"] == f"as predicted (within 10 %); {bound}"
    assert slow["verdict"].startswith("slower than predicted by more than 10 %: predicted 6")
    assert slow["verdict"].endswith(f"; {bound}")


def test_a_bound_goes_with_the_clock_of_its_row(tmp_path: Path) -> None:
    (told,) = crosscheck(write(tmp_path, {**FA3_ROW, "clock_mhz": "1000", "tflops": "560"}))["rows"]
    assert told["verdict"] == f"{TOO_FAST}at most {1000 * FA3_PER_MHZ:.4g} TFLOP/s: the tensor cores at 1,000 MHz; check the row"


def test_a_bound_in_the_unit_that_was_given(tmp_path: Path) -> None:
    ms, cycles = crosscheck(write(tmp_path, {**FA3_ROW, "ms": "0.1"}, {**FA3_ROW, "cycles": "1000"}))["rows"]
    assert re.fullmatch(rf"{TOO_FAST}at least 0\.5\d+ ms: the tensor cores at 1,80\d MHz; check the row", ms["verdict"])
    assert re.fullmatch(rf"{TOO_FAST}at least 1,0\d\d,\d+ cycles: the tensor cores; check the row", cycles["verdict"])


def test_the_summary_counts_and_groups() -> None:
    ok = {"status": "ok", "gpu": "h200", "pass": "fwd", "head_dim": 64, "causal": 0}
    skipped = {"status": "skipped", "reason": "no such gpu"}
    summary = summarize([
        {**ok, "line": 2, "kernel": "fa1", "error_pct": -30.0}, {**ok, "line": 3, "kernel": "fa2", "error_pct": 10.0},
        {**ok, "line": 4, "kernel": "fa2", "error_pct": -1.0}, {**skipped, "line": 5}, {**skipped, "line": 6},
    ])
    assert (summary["ok"], summary["skipped"]) == (3, 2)
    assert summary["skipped_reasons"] == {"no such gpu": {"n": 2, "first_line": 5}}
    assert summary["overall"] == {
        "n": 3, "mean_abs_error_pct": pytest.approx(41 / 3), "median_abs_error_pct": 10, "max_abs_error_pct": 30, "bias_pct": -7,
    }
    assert summary["kernel"]["fa2"]["bias_pct"] == 4.5
    assert summary["gpu/kernel/pass/head_dim/causal"]["h200 fa1 fwd 64 0"]["n"] == 1
    assert set(summary["head_dim"]) == {"64"}


def test_a_file_of_bad_rows_alone_has_no_errors_to_average(tmp_path: Path) -> None:
    summary = crosscheck(write(tmp_path, {**SMALL, "gpu": "h300"}))["summary"]
    assert (summary["ok"], summary["skipped"], summary["kernel"]) == (0, 1, {})
    assert "overall" not in summary


def test_an_absurd_cell_stops_no_other_row(tmp_path: Path, small: Any) -> None:
    report = crosscheck(write(tmp_path, SMALL, SMALL | {"ms": "1e17"}, SMALL | {"ms": "1e-300"}))
    good, *absurd = report["rows"]
    assert good["status"] == "ok"
    reasons = [f"ms is {text}, which nothing can have taken; check its unit" for text in ("1e17", "1e-300")]
    assert [row["reason"] for row in absurd] == reasons
