"""The table of all kept measurements: its rows are all there are, its sums are right, README shows them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import run, sentence

import flashsim.cli as cli
from flashsim.validate.accuracy import DATA, ENTRIES, SETTLED, Entry, _summed, accuracy, markdown
from flashsim.validate.crosscheck import read_rows, understand

FILES = sorted({entry.file for entry in ENTRIES})
#: A sum's worst row by hand: errors of +1, -4 and +3 %.
ERRORS = [{"error_pct": error, "label": label} for error, label in ((1.0, "short"), (-4.0, "long"), (3.0, "wide"))]


@pytest.mark.parametrize("file", FILES)
def test_no_forward_row_that_can_be_predicted_is_left_out(file: str) -> None:
    entries = [entry for entry in ENTRIES if entry.file == file]
    seen: set[str] = set()
    for row in read_rows(DATA / file):
        case = understand(row, gpu=None, engine="fast").case
        mine = [entry.what for entry in entries if case and entry.keep(row.cells)]
        if case and case.attention.pass_ == "fwd":
            assert mine, f"{file}, line {row.line}"
        seen |= set(mine)
    assert seen == {entry.what for entry in entries}


def test_every_file_of_measured_forward_kernels_has_an_entry() -> None:
    """Samples of a loop and what neighbours' caches do have no time of a whole launch to compare; fills are no kernels here."""
    kernels = {"h200_fa3_samples.csv", "h200_zero_fill.csv", *SETTLED}
    for path in DATA.glob("*.csv"):
        try:
            read_rows(path)
        except ValueError:
            continue  # a microbenchmark: no kernel, no shape
        assert path.name in {*FILES, *kernels}


@pytest.mark.parametrize(
    ("mean_target", "worst_target", "met"), [(None, None, None), (3, None, True), (2, None, False), (3, 4, True), (3, 3, False)]
)
def test_a_sum_says_mean_bias_worst_and_whether_its_targets_are_met(
    mean_target: float | None, worst_target: float | None, met: bool | None
) -> None:
    entry = Entry(what="x", file="y.csv", keep=lambda cells: True, mean_target=mean_target, worst_target=worst_target)
    row = _summed(entry, ERRORS)
    assert (row["rows"], row["mean_abs_pct"], row["bias_pct"], row["worst_pct"]) == (3, pytest.approx(8 / 3), 0, -4)
    assert (row["worst_row"], row["met"]) == ("long", met)
    assert ("**2.7 %**" in markdown([row])) is (met is False)


def test_the_command_prints_tables_within_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_summed(entry, ERRORS) for entry in ENTRIES]
    said: list[str] = []

    def kept(progress: object) -> list[dict[str, object]]:
        said.append("asked")
        return rows

    monkeypatch.setattr(cli, "_validate", lambda module: SimpleNamespace(accuracy=kept, markdown=markdown))
    monkeypatch.setenv("COLUMNS", "100")
    shown = run("accuracy")
    assert shown.exit_code == 0, shown.output
    assert max(len(line.rstrip()) for line in shown.stdout.splitlines()) <= 100
    assert f"{3 * len(rows)} rows, " in shown.stdout
    assert json.loads(run("accuracy", "--json").stdout) == rows
    assert run("accuracy", "--markdown").stdout.count("\n| ") == len(rows)
    assert len(said) == 3
    assert "give one" in sentence("accuracy", "--json", "--markdown")


@pytest.mark.slow
def test_the_stored_table_is_what_the_command_prints() -> None:
    stored = (Path(__file__).parent.parent / "validate" / "ACCURACY.md").read_text()
    assert markdown(accuracy()) in stored


def test_the_readmes_table_is_of_the_stored_one() -> None:
    root = Path(__file__).parent.parent
    stored = (root / "validate" / "ACCURACY.md").read_text().splitlines()
    readme = (root / "README.md").read_text()
    shown = [line for line in readme.splitlines() if line.startswith("| ") and ".csv`)" in line]
    assert shown
    assert [line for line in shown if line not in stored] == []
    assert [line for line in stored if "**" in line and line not in shown] == []  # no target missed is left out
