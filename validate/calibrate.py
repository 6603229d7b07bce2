"""Build and run the microbenchmarks on this machine's GPU and lay what they measure beside the chip file's numbers.

python -m flashsim.validate.calibrate [-o PATH]     or     flashsim calibrate
"""

from __future__ import annotations

import argparse
import csv
import datetime
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..model.gpu import GPU, load_gpu

SOURCES = Path(__file__).parent / "microbench"
NVCC_PLACES = ("/usr/local/cuda/bin/nvcc",)
COLUMNS = ("group", "name", "warps", "param", "value", "unit", "spread", "repeats")
#: What nvidia-smi calls a chip -> its name here; the first that matches.
CHIP_NAMES = (
    (r"A100.*80GB", "a100-80gb"), (r"A100.*40GB", "a100-40gb"), (r"\bH100 PCIe", "h100-pcie"), (r"\bH100 80GB HBM3", "h100"),
    (r"\bH200$", "h200"),
)

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True, kw_only=True)
class Feed:
    """The rows (one for each of ``warps``) behind a number of the chip, and how they become it.

    ``unit`` is part of the row's key: a memory stream has one row each for bandwidth, bytes per clock and SM clock.
    """

    group: str
    name: str
    warps: tuple[int, ...]
    param: str
    unit: str
    transform: Callable[[Sequence[float], GPU], float]

    @property
    def row(self) -> str:
        """The row in words, as the chip files' sources name it."""
        parts = (self.group, self.name, f"{'/'.join(map(str, self.warps))} warps", self.param, self.unit)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number of the chip beside what the rows say; ``measured`` and ``difference_pct`` are None where a row is missing."""

    field: str
    row: str
    chip: float
    kind: str
    unit: str
    measured: float | None

    @property
    def difference_pct(self) -> float | None:
        """100 * (chip / measured - 1)."""
        return None if self.measured is None else 100 * (self.chip / self.measured - 1)


def _as_is(values: Sequence[float], gpu: GPU) -> float:
    return values[0]


def _boost_ns(values: Sequence[float], gpu: GPU) -> float:
    return values[0] / float(gpu.clock.boost_mhz) * 1e3


def _all_sms(values: Sequence[float], gpu: GPU) -> float:
    return values[0] * float(gpu.sm.count)


def _from_tera(values: Sequence[float], gpu: GPU) -> float:
    return values[0] * 1e12


def _per_warp(values: Sequence[float], gpu: GPU) -> float:
    """Slope of a straight line through the barrier at 4 and at 16 warps."""
    return (values[1] - values[0]) / (16 - 4)


def _base(values: Sequence[float], gpu: GPU) -> float:
    return values[0] - 4 * _per_warp(values, gpu)


def _issue(name: str, param: str = "", warps: int = 4) -> Feed:
    return Feed(group="issue", name=name, warps=(warps,), param=param, unit="cycles_per_inst", transform=_as_is)


def _latency(
    name: str, param: str = "dependent", transform: Callable[[Sequence[float], GPU], float] = _as_is
) -> Feed:
    return Feed(group="latency", name=name, warps=(1,), param=param, unit="cycles", transform=transform)


def _barrier(transform: Callable[[Sequence[float], GPU], float]) -> Feed:
    return Feed(group="sync", name="syncthreads", warps=(4, 16), param="", unit="cycles", transform=transform)


def _l2(param: str, transform: Callable[[Sequence[float], GPU], float]) -> Feed:
    return Feed(
        group="memory", name="l2_read_cp_async", warps=(32,), param=param, unit="bytes_per_clk_per_sm", transform=transform
    )


def _hbm(name: str) -> Feed:
    return Feed(group="memory", name=name, warps=(32,), param="2_ctas_per_sm", unit="TB_per_s", transform=_from_tera)


def _beside(name: str, groups: int) -> Feed:
    """A vector instruction of ``groups`` warpgroups while another's product runs."""
    row = f"{name}|m64n128k16_ss"
    unit = "cycles_per_inst_per_smsp"
    return Feed(group="beside", name=row, warps=(groups,), param="mma_groups=1", unit=unit, transform=_as_is)


def _lag(name: str) -> Feed:
    return Feed(group="dispatch", name=name, warps=(4,), param="fit=2 median", unit="cycles", transform=_as_is)


#: Instruction class -> (the stream that measures it, ``param`` of its issue row).
STREAMS = {
    "ffma": ("ffma", ""), "fmul": ("fmul", ""), "fadd": ("fadd", ""), "imad": ("imad", ""), "fmnmx": ("fmnmx", ""),
    "f2fp": ("f2fp", ""), "int_alu": ("lop3", ""), "ex2": ("ex2", ""), "hmma": ("hmma", "8"),
}
COSTS = (*STREAMS, "mov", "shfl", "lsu", "control")

#: Number of the chip file -> the rows that it comes from.
FEEDS: dict[str, Feed] = {
    **{f"pipe.{cost}": _issue(name, param) for cost, (name, param) in STREAMS.items()},
    **{f"warp.{cost}": _issue("ffma", warps=1) for cost in COSTS},
    **{f"result.{cost}": _latency(name) for cost, (name, _) in STREAMS.items()},
    "result.shfl": _latency("shfl"),
    "latency.lds": _latency("ldsm_x4"),
    "latency.barrier_base": _barrier(_base),
    "latency.barrier_per_warp": _barrier(_per_warp),
    "l2.bytes_per_clk": _l2("sms=132", _all_sms),
    "l2.bytes_per_clk_one_sm": _l2("sms=1", _as_is),
    "l2.latency_near_ns": _latency("ldg_l2_line", "near_median", _boost_ns),
    "l2.latency_far_ns": _latency("ldg_l2_line", "far_median", _boost_ns),
    "hbm.read_bytes_per_s": _hbm("hbm_read"),
    "hbm.write_bytes_per_s": _hbm("hbm_write"),
    "hbm.copy_bytes_per_s": _hbm("hbm_copy_read_plus_write"),
    "hbm.latency_ns": _latency("ldg_hbm", "stride4KiB_17MiB", _boost_ns),
    "launch.cta_dispatch_ns": Feed(
        group="launch", name="per_cta_dispatch", warps=(4,), param="slope_10_to_100_ctas_per_sm", unit="ns", transform=_as_is
    ),
    "launch.second_cta_cycles": _lag("second_cta_lag"),
    "launch.cta_replace_cycles": _lag("replace_lag"),
    "wgmma.cycles_per_column": Feed(
        group="wgmma", name="m64n128k16_ss", warps=(1,), param="pipelined", unit="cycles_per_inst_per_sm",
        transform=lambda values, gpu: values[0] / 128,
    ),
    "beside.alu": _beside("fmnmx", 2),
    "beside.mufu": _beside("ex2", 2),
    "beside.port_fma": _beside("ffma", 1),
    "beside.smem_bytes_per_clk": Feed(
        group="async", name="lds128|m64n256k16_ss", warps=(4,), param="2_warpgroups", unit="bytes_per_clk", transform=_as_is
    ),
    "async.mbarrier_cycles": Feed(
        group="async", name="mbarrier_wake", warps=(2,), param="wait_lanes=32_other_smsp_first", unit="cycles", transform=_as_is
    ),
    "async.mbarrier_lane_cycles": Feed(
        group="async", name="mbarrier_wake", warps=(2,), param="wait_lanes=1_other_smsp_first", unit="cycles", transform=_as_is
    ),
    "async.mbarrier_try_cycles": Feed(
        group="sync", name="mbarrier_wait_over", warps=(1,), param="", unit="cycles", transform=_as_is
    ),
    "async.tma_issue_cycles": Feed(
        group="tma", name="bulk_issue", warps=(1,), param="bytes=1024_each_of_next7", unit="cycles", transform=_as_is
    ),
    "power.idle_w": Feed(group="power", name="idle", warps=(0,), param="power_w", unit="W", transform=_as_is),
}
#: Measured numbers that rest on several rows and a judgement, so no row feeds them.
JUDGED = {
    "power.regulated_share": "the mean power of all kernels that reach the limit",
    "power.hold_ms": "where clocks fall in the traces of a load that follows a rest",
    "power.tensor_stretch": "the SM clock of products on zeros over the clock that the driver reports",
}


def read_measurements(path: Path) -> dict[Key, float]:
    """(group, name, warps, param, unit) -> value; rows of the same key are averaged. Raises OSError and ValueError."""
    values: dict[Key, list[float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        numbered = [(number, line) for number, line in enumerate(file, 1) if line.strip() and not line.startswith("#")]
    if not numbered or numbered[0][1].strip().split(",") != list(COLUMNS):
        raise ValueError(f"{path} is not a microbenchmark file; its header must be {','.join(COLUMNS)}")
    for (number, _), cells in zip(numbered[1:], csv.reader(line for _, line in numbered[1:]), strict=True):
        try:
            group, name, warps, param, value, unit, _, _ = cells
            values.setdefault((group, name, warps, param, unit), []).append(float(value))
        except ValueError:
            raise ValueError(f"{path} line {number} is not a measurement; it needs {','.join(COLUMNS)}") from None
    return {key: sum(found) / len(found) for key, found in values.items()}


def compare(csv_path: str | Path, gpu: str | GPU) -> list[Comparison]:
    """Each number of FEEDS beside its rows in ``csv_path``. Raises OSError and ValueError for a file or chip it cannot read."""
    chip = load_gpu(gpu) if isinstance(gpu, str) else gpu
    rows = read_measurements(Path(csv_path))
    numbers = dict(chip.numbers())
    return [
        Comparison(
            field=field, row=feed.row, chip=float(numbers[field]), kind=numbers[field].kind, unit=numbers[field].unit,
            measured=_measured(feed, rows, chip),
        )
        for field, feed in FEEDS.items()
    ]


def _measured(feed: Feed, rows: Mapping[Key, float], gpu: GPU) -> float | None:
    found = [rows.get((feed.group, feed.name, str(warps), feed.param, feed.unit)) for warps in feed.warps]
    values = [value for value in found if value is not None]
    return feed.transform(values, gpu) if len(values) == len(found) else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the measurements are taken with."""

    nvcc: str
    gpu: str
    driver: str
    compute: str
    cuda: str


def find_machine() -> Machine:
    """The first GPU and nvcc of this machine. Raises ValueError with what is missing and what to do."""
    nvcc = shutil.which("nvcc") or next((place for place in NVCC_PLACES if Path(place).is_file()), None)
    listed = _output("nvidia-smi", "-L")
    missing = []
    if nvcc is None:
        missing.append("nvcc (install the CUDA toolkit, 12.0 or later, and put its bin folder on PATH)")
    if "GPU 0" not in listed:
        missing.append("an NVIDIA GPU (nvidia-smi -L lists none: run this on a machine with one and its driver)")
    if nvcc is None or missing:
        raise ValueError(f"calibrate measures a real GPU, and this machine lacks {' and '.join(missing)}")
    fields = _output("nvidia-smi", "-i", "0", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
    parts = [part.strip() for part in fields.strip().split(",")]
    if len(parts) != 3:
        raise ValueError(f"nvidia-smi answered {fields.strip()!r} for name, driver and compute capability: update the driver")
    release = re.search(r"release (\S+),", _output(nvcc, "--version"))
    return Machine(
        nvcc=nvcc, gpu=parts[0], driver=parts[1], compute=parts[2].replace(".", ""), cuda=release[1] if release else "unknown"
    )


def _output(*command: str) -> str:
    """What the command prints; nothing where it cannot run or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def chip_of(gpu_name: str) -> str | None:
    """The chip file's name for what nvidia-smi calls a GPU, None where there is none."""
    return next((chip for pattern, chip in CHIP_NAMES if re.search(pattern, gpu_name)), None)


def build(machine: Machine, folder: Path) -> Path:
    """Compile ``microbench/main.cu`` into ``folder``. Raises ValueError with the compiler's first error."""
    arch = ["-gencode=arch=compute_90a,code=sm_90a"] if machine.compute == "90" else [f"-arch=sm_{machine.compute}"]
    program = folder / "microbench"
    command = [machine.nvcc, "-O3", "-std=c++17", *arch, "-o", str(program), str(SOURCES / "main.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or [done.stderr.strip()]
        raise ValueError(f"nvcc could not build {SOURCES / 'main.cu'}: {lines[0]}")
    return program


def run(program: Path, machine: Machine, output: Path, say: Callable[[str], None]) -> None:
    """Run the microbenchmarks into ``output``: whole, or not at all. ``say`` gets the lines of progress."""
    part = output.with_name(f".{output.name}.part")
    try:
        with part.open("w") as file:
            today = datetime.date.today().isoformat()
            file.write(f"# gpu: {machine.gpu}\n# driver: {machine.driver}\n# cuda: {machine.cuda}\n# date: {today}\n")
            file.flush()
            last = ""
            with subprocess.Popen([str(program)], stdout=file, stderr=subprocess.PIPE, text=True) as process:
                try:
                    assert process.stderr is not None
                    for line in process.stderr:
                        last = line.strip() or last
                        say(last)
                except BaseException:
                    process.kill()
                    raise
        if process.returncode:
            raise ValueError(f"the microbenchmarks stopped with exit code {process.returncode}: {last or 'no message'}")
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


def show(comparisons: Sequence[Comparison], chip: str) -> None:
    """The comparison as a table on stdout."""
    table = Table(title=f"measured here beside {chip}.toml", title_justify="left", box=None, pad_edge=False)
    for column in ("number", "unit", "measured", "chip file", "difference", "kind", "row"):
        table.add_column(column, justify="right" if column in ("measured", "chip file", "difference") else "left")
    for each in comparisons:
        difference = each.difference_pct
        table.add_row(
            each.field, each.unit, "no row" if each.measured is None else f"{each.measured:.6g}", f"{each.chip:.6g}",
            "" if difference is None else f"{difference:+.1f} %", each.kind, each.row,
        )
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the CSV and show the comparison. Raises ValueError where this machine cannot, with what is missing."""
    parser = argparse.ArgumentParser(prog="calibrate", description="Measure this machine's GPU.")
    parser.add_argument("-o", "--output", type=Path, metavar="PATH", help="CSV [default: microbench_<gpu>.csv here]")
    options = parser.parse_args(list(argv or ()))
    machine = find_machine()
    chip = chip_of(machine.gpu)
    output: Path = options.output or Path(f"microbench_{chip or re.sub(r'[^a-z0-9]+', '_', machine.gpu.lower())}.csv")
    if not output.parent.is_dir():
        raise ValueError(f"cannot write {output}: its folder does not exist; choose another path for -o")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, console.status(f"building for {machine.gpu} ...") as status:
        program = build(machine, Path(folder))
        run(program, machine, output, lambda line: status.update(f"measuring: {line}"))
    Console().print(f"{output}: measured on {machine.gpu}, driver {machine.driver}, CUDA {machine.cuda}", soft_wrap=True)
    if chip is None:
        Console().print(f"no chip file describes {machine.gpu}: nothing to compare with")
    else:
        show(compare(output, chip), chip)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as problem:
        sys.exit(f"calibrate: {problem}")
