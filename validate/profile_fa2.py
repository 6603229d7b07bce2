"""Read the profiler counters of PyTorch's FlashAttention-2 forward kernel, one CSV row a shape.

Run where a GPU, PyTorch and Nsight Compute are:  python3 -m flashsim.validate.profile_fa2 OUT.csv
It starts itself under ``ncu`` once and turns the report into the columns of ``validate/data/h200_counters.csv``. Counts and
bytes do not depend on the clock, so ``--clock-control none`` leaves the card as it is.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

METRICS = {
    "cycles": "sm__cycles_elapsed.max",
    "time_ns": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "sm_read_bytes": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "sm_write_bytes": "l1tex__m_l1tex2xbar_write_bytes.sum",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "xu_inst": "smsp__inst_executed_pipe_xu.sum",
    "fma_inst": "smsp__inst_executed_pipe_fma.sum",
    "alu_inst": "smsp__inst_executed_pipe_alu.sum",
    "lsu_inst": "smsp__inst_executed_pipe_lsu.sum",
    "tensor_inst": "smsp__inst_executed_pipe_tensor.sum",
    "inst": "smsp__inst_executed.sum",
    "tensor_active_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue_active_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "smem_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "regs": "launch__registers_per_thread",
    "smem_block_bytes": "launch__shared_mem_per_block",
    "block": "launch__block_size",
    "grid": "launch__grid_size",
}
#: (batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, causal)
SHAPES = (
    (4, 16, 16, 4096, 4096, 128, 0),
    (4, 16, 16, 4096, 4096, 128, 1),
    (4, 16, 16, 1024, 1024, 128, 0),
    (1, 132, 132, 128, 8192, 128, 0),
    (1, 264, 264, 128, 8192, 128, 0),
    (4, 32, 32, 4096, 4096, 64, 0),
    (4, 32, 32, 4096, 4096, 64, 1),
    (1, 132, 132, 128, 8192, 64, 0),
    (4, 16, 16, 4096, 4096, 96, 0),
    (2, 16, 16, 4096, 4096, 192, 0),
    (2, 8, 8, 4096, 4096, 256, 0),
    (2, 8, 8, 4096, 4096, 256, 1),
    (4, 32, 32, 4096, 4096, 32, 0),
)


def run_shapes() -> None:
    """What runs under the profiler: one warm-up and one profiled launch of each shape."""
    import torch  # type: ignore[import-not-found, unused-ignore]
    from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found, unused-ignore]

    for b, hq, hkv, nq, nkv, d, causal in SHAPES:
        q = torch.randn(b, hq, nq, d, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(b, hkv, nkv, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal))
        torch.cuda.synchronize()


def main(out: str) -> None:
    """Profile all shapes and write ``out``. Raises CalledProcessError with the profiler's words if it cannot read counters."""
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--kernel-name",
        "regex:flash_fwd",
        "--metrics",
        ",".join(METRICS.values()),
        "--launch-count",
        str(len(SHAPES)),
        sys.executable,
        __file__,
        "--shapes",
    ]
    report = subprocess.run(command, capture_output=True, text=True)
    if report.returncode:
        sys.exit(f"the profiler failed: {report.stdout[-1500:]} {report.stderr[-1500:]}")
    Path(out).with_suffix(".raw.csv").write_text(report.stdout)
    text = report.stdout[report.stdout.index('"ID"') :]
    rows = list(csv.DictReader(io.StringIO(text)))
    units, rows = rows[0], rows[1:]
    names = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "causal")
    with Path(out).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["gpu", "kernel", "pass", "dtype", *names, *METRICS])
        writer.writeheader()
        for shape, row in zip(SHAPES, rows, strict=True):
            values = {key: _plain(row[metric], units[metric]) for key, metric in METRICS.items()}
            writer.writerow(
                {"gpu": "h200", "kernel": "fa2", "pass": "fwd", "dtype": "bf16", **dict(zip(names, shape, strict=True)), **values}
            )


SCALE = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "us": 1e3, "ms": 1e6, "usecond": 1e3, "msecond": 1e6, "Kbyte/block": 1e3}


def _plain(value: str, unit: str) -> float:
    return float(value.replace(",", "")) * SCALE.get(unit, 1)


if __name__ == "__main__":
    if "--shapes" in sys.argv:
        run_shapes()
    else:
        main(sys.argv[1])
