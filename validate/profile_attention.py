"""Read the profiler counters of attention kernels on this GPU, and their times at free clock, one CSV row a shape.

Run where a GPU, PyTorch and Nsight Compute are:  python3 validate/profile_attention.py {fa2,fa3} OUT.csv [waves]
``fa2`` is PyTorch's FlashAttention-2 kernel, ``fa3`` the package fa3-fwd. ``waves``: short launches, of full waves and of a CTA
less or more, instead of a few long ones. Counts and bytes do not depend on the clock, so
``--clock-control none`` leaves the card as it is; the column ``loop_ms`` is the median of many launches back to back.
"""

from __future__ import annotations

import csv
import io
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

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
SHAPE = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "causal", "dtype")
SHAPES: dict[str, tuple[tuple[int | str, ...], ...]] = {
    "fa2": (
        (4, 16, 16, 4096, 4096, 128, 0, "bf16"),
        (4, 16, 16, 4096, 4096, 128, 1, "bf16"),
        (4, 16, 16, 1024, 1024, 128, 0, "bf16"),
        (1, 132, 132, 128, 8192, 128, 0, "bf16"),
        (1, 264, 264, 128, 8192, 128, 0, "bf16"),
        (4, 32, 32, 4096, 4096, 64, 0, "bf16"),
        (4, 32, 32, 4096, 4096, 64, 1, "bf16"),
        (1, 132, 132, 128, 8192, 64, 0, "bf16"),
        (4, 16, 16, 4096, 4096, 96, 0, "bf16"),
        (2, 16, 16, 4096, 4096, 192, 0, "bf16"),
        (2, 8, 8, 4096, 4096, 256, 0, "bf16"),
        (2, 8, 8, 4096, 4096, 256, 1, "bf16"),
        (4, 32, 32, 4096, 4096, 32, 0, "bf16"),
    ),
    "fa3": (
        (4, 16, 16, 4096, 4096, 128, 0, "bf16"),
        (4, 16, 16, 4096, 4096, 128, 1, "bf16"),
        (16, 16, 16, 1024, 1024, 128, 0, "bf16"),
        (16, 16, 16, 1024, 1024, 128, 1, "bf16"),
        (1, 16, 16, 16384, 16384, 128, 0, "bf16"),
        (1, 16, 16, 16384, 16384, 128, 1, "bf16"),
        (4, 16, 4, 4096, 4096, 128, 1, "bf16"),
        (1, 132, 132, 128, 8192, 128, 0, "bf16"),
        (4, 32, 32, 4096, 4096, 64, 0, "bf16"),
        (4, 32, 32, 4096, 4096, 64, 1, "bf16"),
        (4, 8, 8, 4096, 4096, 256, 0, "bf16"),
        (4, 8, 8, 4096, 4096, 256, 1, "bf16"),
        (4, 16, 16, 4096, 4096, 128, 0, "fp8"),
        (4, 16, 16, 4096, 4096, 128, 1, "fp8"),
        (4, 32, 32, 4096, 4096, 64, 0, "fp8"),
        (4, 8, 8, 4096, 4096, 256, 0, "fp8"),
    ),
}
Shape = tuple[int | str, ...]


def short_launches(kernel: str) -> tuple[Shape, ...]:
    """Shapes of one to sixteen full waves of short tiles, and of 131, 132, 133, 263, 264 and 265 CTAs (an H200 has 132 SMs)."""

    def shape(heads: int, seqlen_q: int, seqlen_kv: int, head_dim: int = 128, causal: int = 0, heads_kv: int = 0) -> Shape:
        return (1, heads, heads_kv or heads, seqlen_q, seqlen_kv, head_dim, causal, "bf16")

    grids = [(h, n) for h in (33, 66, 132, 264) for n in (512, 1024, 2048) if h * n <= 264 * 1024]
    grids += [(33, 4096), (33, 256), (264, 256), (1056, 128)]
    if kernel == "fa2":
        grids.remove((33, 256))  # PyTorch splits its keys: two kernels
    shapes = [shape(h, n, n) for h, n in grids]
    masked = ((33, 512), (264, 512), (33, 1024), (132, 1024), (33, 2048), (66, 2048))
    shapes += [shape(h, n, n, causal=1) for h, n in masked]
    for n in (512, 1024, 2048) if kernel == "fa2" else (768, 1536, 3072):
        shapes += [shape(33, n, n, 64), shape(132, n, n, 64), shape(66, n, n, 64, causal=1)]
    shapes += [shape(h, n, n, 256) for h, n in ((33, 512), (132, 512), (33, 1024), (33, 2048))]
    for h in (131, 132, 133, 263, 264, 265):
        shapes += [shape(h, 128, 4096), shape(h, 128, 1024)]
    for h in (131, 132, 133):
        shapes += [shape(h, 128, 4096, heads_kv=1), shape(h, 128, 4096, 64)]
    if kernel == "fa3":
        fp8 = ((33, 512), (264, 512), (33, 1024), (132, 1024), (33, 2048))
        shapes += [(*shape(h, n, n)[:-1], "fp8") for h, n in fp8]
    return tuple(shapes)


def shapes_of(kernel: str, which: str) -> tuple[Shape, ...]:
    """What is profiled: ``which`` is "waves" for short launches, else empty."""
    return short_launches(kernel) if which == "waves" else SHAPES[kernel]


KERNELS = {"fa2": "regex:flash_fwd", "fa3": "regex:FlashAttnFwd|flash::Flash|device_kernel"}


def _call(kernel: str, shape: Shape) -> Any:
    """A function that launches ``kernel`` once on random inputs of ``shape``."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    b, hq, hkv, nq, nkv, d = (int(v) for v in shape[:6])
    causal, fp8 = bool(shape[6]), shape[7] == "fp8"
    sizes = ((b, nq, hq, d), (b, nkv, hkv, d), (b, nkv, hkv, d))
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    if kernel == "fa3":
        import fa3_fwd_interface  # type: ignore[import-not-found, unused-ignore]

        if fp8:
            q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        return lambda: fa3_fwd_interface.flash_attn_func(q, k, v, causal=causal)
    from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found, unused-ignore]

    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def call() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=hq != hkv)

    return call


def run_shapes(kernel: str, which: str) -> None:
    """What runs under the profiler: one launch of each shape."""
    import torch

    for shape in shapes_of(kernel, which):
        _call(kernel, shape)()
        torch.cuda.synchronize()


def loop_ms(kernel: str, shape: Shape, seconds: float = 0.4) -> float:
    """Median milliseconds a launch over ``seconds`` of launches back to back, after as long a warm-up."""
    import torch

    call = _call(kernel, shape)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def lap(n: int) -> float:
        start.record()
        for _ in range(n):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / n

    lap(3)
    n = max(5, int(seconds * 1e3 / lap(5) / 8))
    for _ in range(8):
        lap(n)
    return statistics.median(lap(n) for _ in range(8))


def main(kernel: str, out: str, which: str = "") -> None:
    """Profile and time the shapes of ``kernel`` and write ``out``. Exits with the profiler's words if it cannot read counters."""
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--kernel-name", KERNELS[kernel], "--metrics"]
    command += [",".join(METRICS.values()), sys.executable, __file__, "--shapes", kernel, which]
    report = subprocess.run(command, capture_output=True, text=True)
    if report.returncode:
        sys.exit(f"the profiler failed: {report.stdout[-1500:]} {report.stderr[-1500:]}")
    rows = list(csv.DictReader(io.StringIO(report.stdout[report.stdout.index('"ID"') :])))
    units, rows = rows[0], [row for row in rows[1:] if "prepare" not in row["Kernel Name"]]
    with Path(out).open("w", newline="") as file:
        writer = csv.DictWriter(file, ["gpu", "kernel", "pass", *SHAPE, *METRICS, "loop_ms"])
        writer.writeheader()
        for shape, row in zip(shapes_of(kernel, which), rows, strict=True):
            values = {key: _plain(row[metric], units[metric]) for key, metric in METRICS.items()}
            named = dict(zip(SHAPE, shape, strict=True))
            time = round(loop_ms(kernel, shape), 5)
            writer.writerow({"gpu": "h200", "kernel": kernel, "pass": "fwd", **named, **values, "loop_ms": time})


SCALE = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "us": 1e3, "ms": 1e6, "usecond": 1e3, "msecond": 1e6, "Kbyte/block": 1e3}


def _plain(value: str, unit: str) -> float:
    return float(value.replace(",", "")) * SCALE.get(unit, 1)


if __name__ == "__main__":
    if "--shapes" in sys.argv:
        run_shapes(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
