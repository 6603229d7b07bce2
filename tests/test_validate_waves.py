"""Short launches and bursts, as an H200 ran them: files are what programs that measured them write, and say what pages say."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from flashsim.validate import profile_attention, profile_bursts
from flashsim.validate.crosscheck import crosscheck

DATA = Path(profile_bursts.__file__).parent / "data"


def rows_of(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(line for line in file if line[0] != "#"))


WAVES = rows_of("h200_waves.csv")
BURSTS = {tuple(row[key] for key in profile_bursts.KEYS): float(row["cycles_median"]) for row in rows_of("bursts_h200.csv")}


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_short_launches_are_the_shapes_that_the_profiler_is_given(kernel: str) -> None:
    names = profile_attention.SHAPE
    rows = [tuple(row[name] for name in names) for row in WAVES if row["kernel"] == kernel]
    assert rows == [tuple(map(str, shape)) for shape in profile_attention.short_launches(kernel)]


def test_crosscheck_reads_short_launches(tmp_path: Path) -> None:
    lines = (DATA / "h200_waves.csv").read_text().splitlines()
    names = lines[1].split(",")
    file = tmp_path / "one_cta_more.csv"
    chosen = [line for line in lines[2:] if dict(zip(names, line.split(","), strict=True))["grid"] in ("131", "133")]
    file.write_text("\n".join([lines[1], *chosen]) + "\n")
    reports = crosscheck(file)["rows"]
    assert [row["status"] for row in reports] == ["ok"] * len(chosen)
    assert len(chosen) == 8  # FA2, whose grid is one CTA a tile; FA3's is always one an SM


def test_a_burst_waits_for_all_sms_at_first_and_not_once_they_have_moved_apart() -> None:
    """32 KiB a burst of unread bytes, 16,000 cycles between: what validate/README.md says of them."""
    first, later = (BURSTS["hbm", "132", "32768", "16000", at] for at in ("0", "8"))
    alone = [BURSTS["hbm", "1", "32768", "16000", at] for at in profile_bursts.ROUNDS]
    assert first > 1.7 * max(alone)
    assert later < 1.1 * max(alone)
    assert alone[0] < 1.05 * max(alone[1:])  # first touch costs a warm machine nothing


def test_bursts_are_condensed_to_one_row_a_round() -> None:
    each = {"where": "hbm", "ctas": "2", "bytes": "8", "gap": "1", "round": "0"}
    sms = [("0", 0, 10), ("0", 5, 30), ("0", 7, 14), ("1", 0, 20), ("1", 3, 40), ("1", 1, 24)]
    rows = [{**each, "repeat": repeat, "begin_ns": str(ns), "cycles": str(cycles)} for repeat, ns, cycles in sms]
    assert profile_bursts.condensed([*rows, {**rows[0], "round": "3"}]) == [("hbm", "2", "8", "1", "0", "15", "19", "35", "5")]
