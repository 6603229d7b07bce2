"""Run ``microbench/l2_probe.cu`` under the profiler: what L2 keeps, and what a kernel takes beside its CTAs' cycles.

Run where a GPU, nvcc and Nsight Compute are:  python3 validate/profile_l2.py OUT.csv [PROGRAM]
PROGRAM: the compiled probe; without it, it is built. One CSV row a kernel: name, param, cycles, bytes at HBM and L2.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import tempfile
from pathlib import Path

METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
}


def main(out: str, program: str | None = None) -> None:
    """Profile the probe's kernels and write ``out``. Raises CalledProcessError where it cannot be built or profiled."""
    with tempfile.TemporaryDirectory() as folder:
        if program is None:
            program = str(Path(folder) / "l2_probe")
            source = Path(__file__).parent / "microbench" / "l2_probe.cu"
            subprocess.run(["nvcc", "-O3", "-std=c++17", "-arch=native", "-o", program, str(source)], check=True)
        command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(METRICS.values()), program]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels = [line.split(",", 1) for line in report.splitlines() if line.count(",") == 1 and line[0] not in '"=']
    rows = list(csv.DictReader(io.StringIO(report[report.index('"ID"') :])))[1:]
    with Path(out).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "param", *METRICS])
        for (name, param), row in zip(labels, rows, strict=True):
            writer.writerow([name, param, *(int(float(row[metric].replace(",", ""))) for metric in METRICS.values())])


if __name__ == "__main__":
    main(*sys.argv[1:])
