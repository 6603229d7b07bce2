"""Run ``microbench/burst.cu`` and sum it up: how long a burst of loads takes while all SMs make such bursts, round by round.

Run where a GPU and nvcc are:  python3 validate/profile_bursts.py OUT.csv [PROGRAM]
PROGRAM: the compiled benchmark; without it, it is built. One CSV row a (where, CTAs, bytes, gap, round): the fastest, median and
slowest SM's cycles from the first issue to the last byte, and how far apart in time SMs began; each the mean of the repeats.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

KEYS = ("where", "ctas", "bytes", "gap_cycles", "round")
FOUND = ("cycles_least", "cycles_median", "cycles_most", "starts_spread_ns")
#: Rounds that are kept. SMs move apart in the first ones.
ROUNDS = ("0", "1", "2", "4", "8", "16", "31")


def condensed(rows: Iterable[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """The benchmark's rows, one a burst, as rows of KEYS and FOUND."""
    bursts: dict[tuple[str, ...], dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["round"] in ROUNDS:
            key: tuple[str, ...] = (row["where"], row["ctas"], row["bytes"], row["gap"], row["round"])
            bursts[key][row["repeat"]].append((int(row["begin_ns"]), int(row["cycles"])))
    table: list[tuple[str, ...]] = []
    for key, repeats in bursts.items():
        found = []
        for sms in repeats.values():
            begins, cycles = zip(*sms, strict=True)
            found.append((min(cycles), statistics.median(cycles), max(cycles), max(begins) - min(begins)))
        table.append((*key, *(f"{statistics.mean(each):g}" for each in zip(*found, strict=True))))
    return table


def main(out: str, program: str | None = None) -> None:
    """Measure and write ``out``. Raises CalledProcessError where the benchmark cannot be built or run."""
    with tempfile.TemporaryDirectory() as folder:
        if program is None:
            program = str(Path(folder) / "burst")
            source = Path(__file__).parent / "microbench" / "burst.cu"
            subprocess.run(["nvcc", "-O3", "-std=c++17", "-arch=sm_90a", "-o", program, str(source)], check=True)
        rows = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    with Path(out).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*KEYS, *FOUND))
        writer.writerows(condensed(csv.DictReader(rows)))


if __name__ == "__main__":
    main(*sys.argv[1:])
