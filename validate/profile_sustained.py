"""What clock and power a kernel settles at: launches it for seconds without a gap, one CSV row each, on the machine with the GPU.

The clock is that of the SMs (``microbench/stamp.cu``), cycles over nanoseconds between stamps some 5 ms apart; NVML's sampled
clock does not show what the power limit does. Power is the mean of the driver's samples, asked for only afterwards: a call to
NVML holds launches up for milliseconds, and a chip that rests in between draws less and runs faster. Each kernel starts from a
pause, so the first rows of a trace show how the controller gets there. Columns: see :data:`COLUMNS`; ``--trace`` keeps all.

    python -m flashsim.validate.profile_sustained --library libstamp.so fa3 gemm > sustained.csv
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: Seconds: of one kernel, of its last part that counts as settled, of the pause before it, between two stamps.
BUSY_S, SETTLED_S, PAUSE_S, STAMP_S = 3.0, 1.5, 1.0, 0.005
#: Groups of launches that are queued at a time.
QUEUED = 8
#: A trace's mean clock from its start to so many seconds.
FIRST_S = (0.025, 0.1, 0.3, 1.0)
COLUMNS = (
    "gpu,kernel,pass,batch,heads_q,seqlen_q,head_dim,causal,dtype,variant,sm_clock_mhz,power_w,temperature_c,nvml_clock_mhz,"
    "ms,launches," + ",".join(f"sm_clock_first_{1000 * s:.0f}ms" for s in FIRST_S)
).split(",")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with its shape; ``make`` allocates its inputs and gives what launches it once."""

    kernel: str
    make: Callable[[], Callable[[], Any]]
    batch: int = 0
    heads: int = 0
    seqlen: int = 0
    head_dim: int = 0
    causal: bool = False
    dtype: str = "bf16"
    variant: str = ""


def normal(*shape: int, dtype: str = "bf16") -> Any:
    """Random normal numbers, as the papers' benchmarks use."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[dtype]
    drawn = torch.float16 if dtype == "fp16" else torch.bfloat16  # all of its bits must toggle
    return torch.randn(*shape, device="cuda", dtype=drawn).to(kind)


def attention(kernel: str, batch: int, heads: int, seqlen: int, head_dim: int, causal: bool, dtype: str) -> Callable[[], Any]:
    """FA2 as PyTorch ships it, FA3 as the wheel ``fa3-fwd`` does, or attention by cuBLAS and a softmax."""
    import torch

    if kernel == "fa3":
        from fa3_fwd_interface import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

        q, k, v = (normal(batch, seqlen, heads, head_dim, dtype=dtype) for _ in range(3))
        return lambda: flash_attn_func(q, k, v, causal=causal)
    q, k, v = (normal(batch, heads, seqlen, head_dim, dtype=dtype) for _ in range(3))
    if kernel == "fa2":
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return lambda: flash(q, k, v, 0.0, causal)
    scale = head_dim**-0.5
    return lambda: torch.softmax(torch.matmul(q * scale, k.transpose(-1, -2)), dim=-1) @ v


def gemm(m: int, n: int, k: int, dtype: str = "bf16", fill: str = "normal") -> Callable[[], Any]:
    """cuBLAS, both operands K-major; ``fill`` "normal", "zeros", or "weights": the first operand like rows of a softmax."""
    import torch

    a, b = (normal(rows, k, dtype="fp16" if dtype == "fp16" else "bf16") for rows in (m, n))
    if fill == "zeros":
        a, b = torch.zeros_like(a), torch.zeros_like(b)
    if fill == "weights":
        a = torch.exp(a.float() - 4).to(a.dtype)
    if dtype == "fp8":
        one = torch.ones((), device="cuda")
        a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
        return lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = torch.empty(m, n, device="cuda", dtype=a.dtype)
    return lambda: torch.mm(a, b.t(), out=out)


FILL_BYTES = 256 << 20


def fill(what: str) -> Callable[[], Any]:
    """256 MiB written at once: "zeros", as do_bench empties L2, "bits" half of which are set, or "copy" of random numbers."""
    import torch

    into = torch.empty(FILL_BYTES // 4, device="cuda", dtype=torch.int32)
    if what == "copy":
        numbers = torch.randint(-(2**31), 2**31 - 1, into.shape, device="cuda", dtype=torch.int32)
        return lambda: into.copy_(numbers)
    return into.zero_ if what == "zeros" else lambda: into.fill_(0x55AA55AA)


def cases(wanted: set[str]) -> Iterator[Case]:
    """The kernels by name, shapes chosen beforehand; "fp16": FA2 and GEMMs in fp16 beside bf16, one after the other."""
    shapes = {
        "fa3": [
            (4, 16, 4096, 128, False, "bf16"),
            (4, 16, 4096, 128, True, "bf16"),
            (1, 16, 16384, 128, False, "bf16"),
            (1, 16, 16384, 128, True, "bf16"),
            (4, 32, 4096, 64, False, "bf16"),
            (1, 32, 16384, 64, False, "bf16"),
            (4, 8, 4096, 256, False, "bf16"),
            (4, 8, 4096, 256, True, "bf16"),
            (1, 8, 16384, 256, False, "bf16"),
            (4, 16, 4096, 128, False, "fp8"),
            (4, 16, 4096, 128, True, "fp8"),
            (4, 32, 4096, 64, False, "fp8"),
            (4, 8, 4096, 256, False, "fp8"),
            (1, 8, 16384, 256, False, "fp8"),
        ],
        "fa2": [
            (4, 16, 4096, 128, False, "bf16"),
            (4, 16, 4096, 128, True, "bf16"),
            (4, 32, 4096, 64, False, "bf16"),
            (4, 16, 4096, 96, False, "bf16"),
            (2, 8, 4096, 256, False, "bf16"),
            (1, 16, 16384, 128, False, "bf16"),
        ],
        "standard": [(4, 16, 2048, 128, False, "bf16")],
    }
    alike = [(1, 8, 16384, 256, False), (1, 16, 16384, 128, False), (1, 16, 16384, 128, True), (1, 32, 16384, 64, False)]
    pairs = [(kernel, (*shape, dtype)) for kernel in ("fa2",) for shape in alike for dtype in ("bf16", "fp16")]
    chosen = [(kernel, row) for kernel, rows in shapes.items() if kernel in wanted for row in rows]
    for kernel, (b, h, n, d, causal, dtype) in chosen + (pairs if "fp16" in wanted else []):
        make = lambda a=(kernel, b, h, n, d, causal, dtype): attention(*a)  # noqa: E731
        yield Case(kernel=kernel, make=make, batch=b, heads=h, seqlen=n, head_dim=d, causal=causal, dtype=dtype)
    products = [
        (8192, 8192, 8192, "bf16", "normal"),
        (4096, 4096, 4096, "bf16", "normal"),
        (8192, 8192, 8192, "bf16", "weights"),
        (8192, 8192, 8192, "bf16", "zeros"),
        (16384, 16384, 1024, "bf16", "normal"),
        (8192, 8192, 1024, "bf16", "normal"),
        (8192, 8192, 8192, "fp8", "normal"),
    ]
    halves = [(8192, 8192, 8192, dtype, data) for data in ("normal", "weights") for dtype in ("bf16", "fp16")]
    for m, n, k, dtype, data in (products if "gemm" in wanted else []) + (halves if "fp16" in wanted else []):
        make = lambda a=(m, n, k, dtype, data): gemm(*a)  # noqa: E731
        yield Case(kernel="gemm", make=make, dtype=dtype, variant=f"{m}x{n}x{k} {data}")
    for what in ("zeros", "bits", "copy") if "fill" in wanted else ():
        yield Case(kernel="fill", make=lambda a=what: fill(a), dtype="int32", variant=what)  # type: ignore[misc]


class Stamps:
    """Stamps of all SMs, one row a stamp; read when the launches are over."""

    def __init__(self, library: Path, most: int) -> None:
        import torch

        self.call = ctypes.CDLL(str(library.resolve())).stamp
        self.call.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.rows = torch.zeros(most, self.sms, 2, dtype=torch.int64, device="cuda")
        self.used = 0

    def take(self) -> None:
        import torch

        status = self.call(self.rows[self.used].data_ptr(), self.sms, torch.cuda.current_stream().cuda_stream)
        if status:
            raise RuntimeError(f"the stamp kernel failed with CUDA status {status}")
        self.used += 1

    def clocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds since the first stamp at each later one, and the mean MHz since the one before it (median over SMs)."""
        rows = self.rows[: self.used].cpu().numpy().astype(float)
        both = (rows[1:, :, 1] > 0) & (rows[:-1, :, 1] > 0)
        step = np.where(both, np.diff(rows, axis=0).transpose(2, 0, 1), np.nan)
        return np.nanmedian(np.where(rows[:, :, 1] > 0, rows[:, :, 1], np.nan) - np.nanmax(rows[0, :, 1]), axis=1)[
            1:
        ] * 1e-9, np.nanmedian(step[0] / step[1] * 1e3, axis=1)


def measure(case: Case, chip: str, library: Path, nvml: Any, trace: Any) -> list[Any]:
    """Launch ``case`` for BUSY_S seconds and give its row."""
    import torch

    device = nvml.nvmlDeviceGetHandleByIndex(0)
    launch = case.make()
    launch()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(5):
        launch()
    torch.cuda.synchronize()
    once = (time.perf_counter() - begin) / 5
    group = max(1, round(STAMP_S / once))
    stamps = Stamps(library, int(BUSY_S / STAMP_S * 3) + 8)
    time.sleep(PAUSE_S)
    events = [torch.cuda.Event() for _ in range(QUEUED)]
    joules = nvml.nvmlDeviceGetTotalEnergyConsumption(device) * 1e-3
    begin, steps = time.perf_counter(), 0
    stamps.take()
    while time.perf_counter() - begin < BUSY_S and stamps.used < len(stamps.rows):
        if steps >= QUEUED:
            events[steps % QUEUED].synchronize()
        for _ in range(group):
            launch()
        stamps.take()
        events[steps % QUEUED].record()
        steps += 1
    reported = nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)
    torch.cuda.synchronize()
    end_us = int(time.time() * 1e6)
    joules = nvml.nvmlDeviceGetTotalEnergyConsumption(device) * 1e-3 - joules
    heat = nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
    _, samples = nvml.nvmlDeviceGetSamples(device, nvml.NVML_TOTAL_POWER_SAMPLES, end_us - int(SETTLED_S * 1e6))
    watts = float(np.mean([s.sampleValue.uiVal for s in samples if s.timeStamp <= end_us])) * 1e-3
    seconds, mhz = stamps.clocks()
    settled = seconds > seconds[-1] - SETTLED_S
    lengths = np.diff(seconds, prepend=0.0)
    name = f"{case.kernel} B{case.batch} H{case.heads} N{case.seqlen} D{case.head_dim} {case.causal} {case.dtype} {case.variant}"
    for s, f in zip(seconds, mhz, strict=True):
        trace.writerow([name, "mhz", f"{s:.4f}", f"{f:.1f}"])
    for sample in samples:
        trace.writerow([name, "milliwatts", f"{seconds[-1] + (sample.timeStamp - end_us) * 1e-6:.4f}", sample.sampleValue.uiVal])
    trace.writerow([name, "joules", f"{seconds[-1]:.4f}", f"{joules:.2f}"])
    first = [
        float(np.average(mhz[seconds <= s], weights=lengths[seconds <= s])) if (seconds <= s).any() else mhz[0] for s in FIRST_S
    ]
    clock = float(np.average(mhz[settled], weights=lengths[settled]))
    ms = float(lengths[settled].sum() / settled.sum() / group * 1e3)
    shape = [case.batch, case.heads, case.seqlen, case.head_dim, int(case.causal), case.dtype, case.variant]
    settled_at = [f"{clock:.1f}", f"{watts:.1f}", heat, reported, f"{ms:.5f}", steps * group]
    return [chip, case.kernel, "fwd", *shape, *settled_at, *(f"{f:.1f}" for f in first)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kernels", nargs="+", choices=["fa3", "fa2", "standard", "gemm", "fill", "fp16"])
    parser.add_argument("--gpu", default="h200", help="the chip file's name for what this machine has")
    parser.add_argument("--library", type=Path, required=True, help="libstamp.so, built from microbench/stamp.cu")
    parser.add_argument("--trace", type=Path, default=Path("trace.csv"), help="every stamp and power sample")
    arguments = parser.parse_args()
    import pynvml  # type: ignore[import-not-found, unused-ignore]

    pynvml.nvmlInit()
    out = csv.writer(sys.stdout)
    out.writerow(COLUMNS)
    with arguments.trace.open("w", newline="") as file:
        trace = csv.writer(file)
        for case in cases(set(arguments.kernels)):
            try:
                out.writerow(measure(case, arguments.gpu, arguments.library, pynvml, trace))
            except (RuntimeError, ImportError, pynvml.NVMLError) as error:
                print(f"{case.kernel} {case.variant}: {error}", file=sys.stderr)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
