"""How near the model is to every measurement that it keeps: ``accuracy() -> [{"what": ..., "rows": ..., ...}]``.

An entry is a question that users have (a kernel on a chip, at which sizes) and names its rows by what their cells say. No row
is left out for its error: those that no entry names are backward passes and kernels that the model does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..model.gpu import load_gpu
from ..sim.predict import simulate
from .crosscheck import crosscheck, read_rows, understand
from .summary import errors_of

DATA = Path(str(resources.files("flashsim.validate"))) / "data"
Cells = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """``keep`` says of a row's cells whether it belongs here. Targets in % of time (of cycles, where rows have cycles)."""

    what: str
    file: str
    keep: Callable[[Cells], bool]
    mean_target: float | None = None
    worst_target: float | None = None


def _is(**wanted: str) -> Callable[[Cells], bool]:
    """Rows of forward passes whose cells are these."""
    return lambda cells: cells.get("pass", "fwd") == "fwd" and all(cells.get(name) == value for name, value in wanted.items())


def _and(*tests: Callable[[Cells], bool]) -> Callable[[Cells], bool]:
    return lambda cells: all(test(cells) for test in tests)


def _from(least: int, most: int = 1 << 31) -> Callable[[Cells], bool]:
    return lambda cells: least <= int(cells["seqlen_q"]) <= most


def _dims(*dims: str) -> Callable[[Cells], bool]:
    return lambda cells: cells["head_dim"] in dims


def _full(cells: Cells) -> bool:
    """Benchmarks of papers keep 16,384 tokens."""
    return int(cells["batch"]) * int(cells["seqlen_q"]) == 16384


def _short(cells: Cells) -> bool:
    return not _full(cells)


def _fp8(cells: Cells) -> bool:
    return cells["dtype"] == "fp8"


def _wide(cells: Cells) -> bool:
    return cells["dtype"] != "fp8"


def _as_released(cells: Cells) -> bool:
    return not cells["variant"]


def _table_18(cells: Cells) -> bool:
    return "Table 18" in cells["source"]


SETTLED = ("h200_sustained.csv", "h200_sustained_fp16.csv")
COUNTERS, TIMED, BENCH, PUBLISHED = "h200_counters.csv", "h200_timed.csv", "h200_do_bench.csv", "published.csv"
H100_FA3 = _and(_is(gpu="h100", kernel="fa3"), _as_released)

ENTRIES = (
    Entry(what="H200 FA2, cycles, B4 H16 N4096 D128", file=COUNTERS, keep=_is(kernel="fa2"), mean_target=8),
    Entry(what="H200 FA2, cycles, D32 to D256, causal, one and two CTAs an SM", file="h200_fa2_counters.csv", keep=_is()),
    Entry(what="H200 FA2, cycles, other tiles and warps", file="h200_fa2_tiles.csv", keep=_is()),
    Entry(what="H200 FA2, times at free clock, D128", file=TIMED, keep=_is(kernel="fa2"), mean_target=10),
    Entry(what="H200 FA3, cycles, B4 H16 N4096 D128", file=COUNTERS, keep=_is(kernel="fa3"), mean_target=4),
    Entry(what="H200 FA3, cycles, bf16 and FP8, D64 to D256, causal", file="h200_fa3_counters.csv", keep=_is(kernel="fa3")),
    Entry(what="H200 FA3, cycles, ping-pong and overlap on and off", file="h200_fa3_variants.csv", keep=_is()),
    Entry(what="H200 FA3 of July 2024, cycles, fp16, D64 to D256", file="h200_fa3_2024.csv", keep=_and(_is(), _wide)),
    Entry(what="H200 FA3 of July 2024, cycles, FP8", file="h200_fa3_2024.csv", keep=_and(_is(), _fp8)),
    Entry(what="H200 FA3, times at free clock, D128", file=TIMED, keep=_is(kernel="fa3")),
    Entry(what="H200 standard, times; PyTorch's math path computes in fp32", file=TIMED, keep=_is(kernel="standard")),
    Entry(what="H200 FA2, do_bench, 16,384 tokens, no mask", file=BENCH, keep=_and(_is(kernel="fa2", causal="0"), _full)),
    Entry(what="H200 FA2, do_bench, 16,384 tokens, causal", file=BENCH, keep=_and(_is(kernel="fa2", causal="1"), _full)),
    Entry(what="H200 FA3, do_bench, 16,384 tokens, no mask", file=BENCH, keep=_and(_is(kernel="fa3", causal="0"), _wide, _full)),
    Entry(what="H200 FA3, do_bench, 16,384 tokens, causal", file=BENCH, keep=_and(_is(kernel="fa3", causal="1"), _wide, _full)),
    Entry(what="H200 FA3 FP8, do_bench, 16,384 tokens", file=BENCH, keep=_and(_is(kernel="fa3"), _fp8, _full)),
    Entry(what="H200 FA2, do_bench, one to four waves", file=BENCH, keep=_and(_is(kernel="fa2"), _short)),
    Entry(what="H200 FA3, do_bench, one to four waves", file=BENCH, keep=_and(_is(kernel="fa3"), _short)),
    Entry(what="H200 FA2, cycles, short launches, caches flushed", file="h200_waves.csv", keep=_is(kernel="fa2")),
    Entry(what="H200 FA3, cycles, short launches, caches flushed", file="h200_waves.csv", keep=_is(kernel="fa3")),
    Entry(
        what="H100 FA2, 1830 MHz, D64 and D128", file=PUBLISHED, keep=_and(_is(gpu="h100", kernel="fa2"), _dims("64", "128")),
        mean_target=6, worst_target=20,
    ),
    Entry(
        what="H100 FA3, 1830 MHz, D64 and D128, N >= 1024", file=PUBLISHED, mean_target=6, worst_target=12,
        keep=_and(H100_FA3, _wide, _dims("64", "128"), _from(1024)),
    ),
    Entry(what="H100 FA3 FP8, D128", file=PUBLISHED, keep=_and(H100_FA3, _fp8, _dims("128")), mean_target=10),
    Entry(what="H100 FA3, N < 1024", file=PUBLISHED, keep=_and(H100_FA3, _wide, _from(1, 1023))),
    Entry(what="H100 FA3 ablation: full", file=PUBLISHED, keep=_and(H100_FA3, _wide, _from(8448, 8448)), mean_target=5),
    Entry(
        what="H100 FA3 ablation: no warp specialisation", file=PUBLISHED, mean_target=5,
        keep=_is(gpu="h100", kernel="fa3", variant="no_warp_specialization"),
    ),
    Entry(
        what="H100 FA3 ablation: no overlap", file=PUBLISHED, mean_target=5,
        keep=_is(gpu="h100", kernel="fa3", variant="no_intra_overlap"),
    ),
    Entry(what="H100 Triton", file=PUBLISHED, keep=_is(gpu="h100", kernel="triton")),
    Entry(what="H100 cuDNN, taken as FA3's pipeline", file=PUBLISHED, keep=_is(gpu="h100", kernel="cudnn")),
    Entry(what="H100 standard", file=PUBLISHED, keep=_is(gpu="h100", kernel="standard")),
    Entry(
        what="B200 FA4, D128, N >= 2048, cap 1850 MHz", file=PUBLISHED, keep=_and(_is(gpu="b200", kernel="fa4"), _from(2048)),
        mean_target=8, worst_target=15,
    ),
    Entry(what="B200 FA4, D128, N < 2048", file=PUBLISHED, keep=_and(_is(gpu="b200", kernel="fa4"), _from(1, 2047))),
    Entry(what="B200 FA4, D192/128 causal", file="published_fa4.csv", keep=_and(_is(kernel="fa4"), _dims("192"))),
    Entry(what="B200 FA4, D64, bf16 and FP8", file="published_fa4.csv", keep=_and(_is(kernel="fa4"), _dims("64"))),
    Entry(what="B200 Gluon, no mask", file=PUBLISHED, keep=_is(gpu="b200", kernel="gluon", causal="0"), mean_target=15),
    Entry(what="B200 Gluon, causal", file=PUBLISHED, keep=_is(gpu="b200", kernel="gluon", causal="1"), mean_target=15),
    Entry(what="B200 Triton", file=PUBLISHED, keep=_is(gpu="b200", kernel="triton"), mean_target=15),
    Entry(what="B200 FA2", file=PUBLISHED, keep=_is(gpu="b200", kernel="fa2")),
    Entry(what="B200 cuDNN, taken as FA4 without what FA4 added", file=PUBLISHED, keep=_is(gpu="b200", kernel="cudnn")),
    Entry(
        what="A100 standard and FA1, FA1's table 18", file=PUBLISHED, keep=_and(_is(gpu="a100-40gb"), _table_18), mean_target=15,
    ),
    Entry(
        what="A100 FA1, other tables of its paper", file=PUBLISHED,
        keep=_and(_is(gpu="a100-40gb"), lambda cells: not _table_18(cells)),
    ),
)  # fmt: skip


def accuracy(*, jobs: int | None = None, progress: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """One dict an entry: what, file, rows, mean_abs_pct, bias_pct, worst_pct, worst_row, targets, ``met``; then settled clocks.

    Errors are prediction over measurement less one. ``jobs``: processes, as in ``crosscheck``.
    """
    found = []
    for file in dict.fromkeys(entry.file for entry in ENTRIES):
        progress(file)
        cells = {row.line: row.cells for row in read_rows(DATA / file)}
        reports = [report for report in crosscheck(DATA / file, jobs=jobs)["rows"] if report["status"] == "ok"]
        for entry in (entry for entry in ENTRIES if entry.file == file):
            mine = [report for report in reports if entry.keep(cells[report["line"]])]
            found.append((ENTRIES.index(entry), _summed(entry, mine)))
    progress(SETTLED[0])
    return [row for _, row in sorted(found, key=lambda pair: pair[0])] + [_clocks()]


def _summed(entry: Entry, reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``reports``: error_pct and label of each row."""
    errors, worst = errors_of(reports), max(reports, key=lambda report: abs(report["error_pct"]))
    targets = [(errors["mean_abs_error_pct"], entry.mean_target), (errors["max_abs_error_pct"], entry.worst_target)]
    asked = [figure <= target for figure, target in targets if target is not None]
    return {
        "what": entry.what,
        "file": entry.file,
        "rows": errors["n"],
        "mean_abs_pct": errors["mean_abs_error_pct"],
        "bias_pct": errors["bias_pct"],
        "worst_pct": worst["error_pct"],
        "worst_row": worst["label"],
        "mean_target": entry.mean_target,
        "worst_target": entry.worst_target,
        "met": all(asked) if asked else None,
    }


def _clocks() -> dict[str, Any]:
    """Clocks at which FA2 and FA3 settle: what the power limit leaves them."""
    entry = Entry(what="H200 FA2 and FA3, settled SM clock", file=SETTLED[0], keep=_as_released)
    reports = []
    for row in (row for file in SETTLED for row in read_rows(DATA / file)):
        if row.cells["kernel"] in ("fa2", "fa3") and entry.keep(row.cells):
            known = understand(row, gpu=None, engine="fast")
            if known.case is None:
                raise ValueError(f"{row.label}, line {row.line}: {known.reason}")
            result = simulate(known.case.schedule, load_gpu(known.case.gpu), known.case.attention)
            error = 100 * (result.clock_mhz / float(row.cells["sm_clock_mhz"]) - 1)
            reports.append({"error_pct": error, "label": known.label})
    return _summed(entry, reports)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table; what misses its target in bold."""
    lines = ["| what | rows | mean absolute error | worst | target |", "|---|---|---|---|---|"]
    for row in rows:
        mean, worst = f"{row['mean_abs_pct']:.1f} %", f"{row['worst_pct']:+.1f} % ({row['worst_row']})"
        if row["rows"] == 1:
            mean, worst = f"{row['worst_pct']:+.1f} %", ""
        targets = [f"{row['mean_target']:g} %"] if row["mean_target"] else []
        targets += [f"none over {row['worst_target']:g} %"] if row["worst_target"] else []
        if row["met"] is False:
            mean = f"**{mean}**"
        cells = (f"{row['what']} (`{row['file']}`)", str(row["rows"]), mean, worst, ", ".join(targets))
        lines.append("| " + " | ".join(cells).replace("|  |", "| |") + " |")
    return "\n".join(lines)
