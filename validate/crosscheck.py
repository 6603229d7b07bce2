"""Predict measured rows of a CSV file and say how far off each is: ``crosscheck(path) -> {"rows": [...], "summary": {...}}``.

A row that cannot be modelled is listed with its line and the reason; bad rows never stop good ones. A negative error means
that the prediction is faster than the measurement. Columns are those of ``data/published.csv``, any subset that names the
chip, the kernel, the shape and one of ms, tflops, cycles.
"""

from __future__ import annotations

import concurrent.futures
import csv
import math
import os
import re
import signal
import sys
import time
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..model.attention import Attention
from ..model.gpu import load_gpu
from ..model.schedule import MOST_QUERY_ROWS, Schedule
from ..model.schedules import SCHEDULES, get_schedule
from ..sim.predict import ENGINES, Result, cap_mhz, simulate
from .protocol import LAYOUT_OF_ARRAYS, PACKAGE_SOURCE, TABLES_OF_ARRAYS, clock_in, first_fa3, flush_in, repeats_in
from .summary import summarize
from .verdict import Prediction, prediction, verdict

SHAPE = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v")
NEEDED = ("gpu", "kernel", "batch", "heads_q", "seqlen_q", "head_dim")
MEASURES = ("ms", "tflops", "cycles")
MOST = 1e12  #: of a measure, and its inverse the least: 30 years in ms, minutes in cycles
#: Names that papers give to a switched-off part of a schedule (why FA3's 582 has no ping-pong either: model/README.md).
SWITCH_NAMES = {"no_intra_overlap": "intra_overlap=false;pingpong=false", "no_warp_specialization": "warp_specialization=false"}
WORDS = {"true": True, "false": False, "none": None}
LARGEST = 2**31 - 1
ROUNDED = 1.01  # cycles over a profiler's time may come out a little above the boost clock
SERIAL_UP_TO = 8
QUIET_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What determines one prediction; equal cases are predicted once. ``gpu`` is a chip's name or the path of its TOML."""

    schedule: Schedule
    gpu: str
    attention: Attention
    clock: float | str
    engine: str
    repeats: int = 0
    flush_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the file: what it says, and the case to predict or why there is none."""

    line: int
    cells: Mapping[str, str]
    case: Case | None = None
    measured: Mapping[str, float | None] | None = None
    label: str = ""
    reason: str = ""


def crosscheck(path: str | Path, *, engine: str = "fast", gpu: str | None = None, jobs: int | None = None) -> dict[str, Any]:
    """Predict each row of the CSV file and compare.

    ``gpu``: a chip's name or TOML path that stands in for the gpu column. ``jobs``: processes (None: one per CPU where there
    are many predictions); results do not depend on it. Raises OSError where the file cannot be read, ValueError where it is
    empty, lacks a needed column, or an argument is wrong.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1, or None for one per CPU")
    if gpu is not None:
        load_gpu(gpu)
    rows = [understand(row, gpu=gpu, engine=engine) for row in read_rows(Path(path), gpu_given=gpu is not None)]
    predictions = _predict_all(list(dict.fromkeys(row.case for row in rows if row.case)), jobs)
    reports = [_report(row, predictions[row.case] if row.case else row.reason) for row in rows]
    return {"rows": reports, "summary": summarize(reports)}


def read_rows(path: Path, *, gpu_given: bool = False) -> list[Row]:
    """The file's rows with their line numbers; a row that is not CSV carries the reason. Raises OSError and ValueError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(file)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); give a CSV file") from None
    records = _records(lines)
    _, header = next(records, (0, []))
    if isinstance(header, str):
        raise ValueError(f"{path}: the header is not CSV: {header}")
    header = [name.strip() for name in header]
    needed = [name for name in NEEDED if not (gpu_given and name == "gpu")]
    missing = [name for name in needed if name not in header]
    if not header:
        raise ValueError(f"{path} is empty; give a CSV file with a header and rows")
    if missing:
        raise ValueError(f"{path} has no column {', '.join(missing)}; it needs {', '.join(needed)} and one of ms, tflops, cycles")
    if not set(MEASURES) & set(header):
        raise ValueError(f"{path} has none of the columns ms, tflops, cycles; it needs one to compare with")
    twice = [name for name in header if name and header.count(name) > 1]
    if twice:
        raise ValueError(f"{path} has the column {twice[0]} twice; keep one")
    rows = []
    for line, cells in records:
        if isinstance(cells, str):
            rows.append(Row(line=line, cells={}, reason=f"the line is not CSV: {cells}"))
        elif len(cells) != len(header):
            found = {name: cell.strip() for name, cell in zip(header, cells, strict=False)}
            rows.append(Row(line=line, cells=found, reason=f"the line has {len(cells)} cells and the header {len(header)}"))
        else:
            rows.append(Row(line=line, cells={name: cell.strip() for name, cell in zip(header, cells, strict=True)}))
    if not rows:
        raise ValueError(f"{path} has a header and no rows; add measurements")
    return rows


def _records(lines: Sequence[str]) -> Iterator[tuple[int, list[str] | str]]:
    """(line of its first character, cells or what is wrong) of each record; blank lines and # comments are passed over."""
    at = 0
    while at < len(lines):
        if not lines[at].strip() or lines[at].startswith("#"):
            at += 1
            continue
        reader = csv.reader((lines[i] for i in range(at, len(lines))), strict=True)
        try:
            cells: list[str] | str = next(reader)
            length = reader.line_num
        except csv.Error as error:  # an open quote would swallow the rest of the file: give up this line alone
            cells, length = str(error), 1
        yield at + 1, cells
        at += length


def understand(row: Row, *, gpu: str | None, engine: str) -> Row:
    if row.reason:
        return row
    label = ""
    try:
        cells = row.cells
        for name in NEEDED:
            if not cells.get(name) and not (name == "gpu" and gpu):
                raise ValueError(f"{name} is missing")
        chip = gpu or cells["gpu"]
        boost = float(load_gpu(chip).clock.boost_mhz)
        get_schedule(cells["kernel"])
        attention = _attention(cells)
        label = attention.label
        measured = _measured(cells, attention)
        schedule = _schedule(cells["kernel"], _variant(cells))
        clock = _positive(cells, "clock_mhz") or clock_in({n: _positive(cells, n) for n in ("cycles", "time_ns")}) or "power"
        if isinstance(clock, float) and boost < clock < ROUNDED * boost:
            clock = boost
        load: dict[str, int] = {"repeats": repeats_in(cells), "flush_bytes": flush_in(cells)}
    except (ValueError, OSError) as error:
        return replace(row, label=label, reason=" ".join(str(error).split()))
    case = Case(schedule=schedule, gpu=chip, attention=attention, clock=clock, engine=engine, **load)
    return replace(row, case=case, measured=measured, label=label)


def _attention(cells: Mapping[str, str]) -> Attention:
    sizes: dict[str, Any] = {}
    for name in SHAPE:
        value = _positive(cells, name)
        if value is not None:
            if not value.is_integer() or value > LARGEST:
                raise ValueError(f"{name} is {cells[name]}; it must be a whole number from 1 to {LARGEST}")
            sizes[name] = int(value)
    causal = cells.get("causal", "").lower() or "0"
    if causal not in ("0", "1", "true", "false"):
        raise ValueError(f"causal is {cells['causal']!r}; it must be 0 or 1")
    attention = Attention(
        **sizes, causal=causal in ("1", "true"), dtype=cells.get("dtype") or "bf16", pass_=cells.get("pass") or "fwd"
    )
    rows = attention.batch * attention.heads_q * attention.seqlen_q
    if rows > MOST_QUERY_ROWS:
        raise ValueError(f"batch x heads_q x seqlen_q is {rows}; at most {MOST_QUERY_ROWS} query rows can be predicted")
    return attention


def _positive(cells: Mapping[str, str], name: str) -> float | None:
    """The cell as a number above zero, None where it is blank or there is no such column."""
    text = cells.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {text!r}; it must be a number above zero")
    return value


def _measured(cells: Mapping[str, str], attention: Attention) -> dict[str, float | None]:
    """ms, tflops and cycles; of ms and tflops each follows from the other (paper convention), ms where both are given."""
    ms, tflops, cycles = (_positive(cells, name) for name in MEASURES)
    if ms is None and tflops is None and cycles is None:
        raise ValueError("ms, tflops and cycles are all blank; give one to compare with")
    for name, value in zip(MEASURES, (ms, tflops, cycles), strict=True):
        if value is not None and not 1 / MOST <= value <= MOST:
            raise ValueError(f"{name} is {cells[name]}, which nothing can have taken; check its unit")
    flops = attention.flops("paper")
    if ms is None and tflops is not None:
        ms = flops / tflops / 1e9
    if tflops is None and ms is not None:
        tflops = flops / ms / 1e9
    return {"ms": ms, "tflops": tflops, "cycles": cycles}


def _variant(cells: Mapping[str, str]) -> str:
    """The row's variant; of a paper's or the package's chart FA2's own build, of FA3's its first, with FP8 not persistent."""
    variant = cells.get("variant") or ""
    if cells["kernel"] == "cudnn" and re.fullmatch(r"[0-9.]+", variant):
        return f"version={variant}"
    if TABLES_OF_ARRAYS.match(cells.get("source") or "") and "layout" not in variant and cells["kernel"] in LAYOUT_OF_ARRAYS:
        return f"layout={LAYOUT_OF_ARRAYS[cells['kernel']]};{variant}"
    if PACKAGE_SOURCE.match(cells.get("source") or ""):
        if cells["kernel"] == "fa2" and "build" not in variant:
            return f"build=flash-attn;{variant}"
        if cells["kernel"] == "fa3":
            fp8, causal = cells.get("dtype") == "fp8", cells.get("causal") not in (None, "", "0")
            told = first_fa3(cells["head_dim"], fp8=fp8, causal=causal)
            return "".join(f"{name}={str(value).lower()};" for name, value in told.items() if name not in variant) + variant
    return variant


def _schedule(kernel: str, variant: str) -> Schedule:
    """``variant``: ``field=value;field=value`` and the names of SWITCH_NAMES. Raises ValueError for what the kernel lacks."""
    hints = typing.get_type_hints(SCHEDULES[kernel])
    fields: dict[str, Any] = {}
    parts = (piece.strip() for piece in variant.split(";"))
    for part in (switch for piece in parts for switch in SWITCH_NAMES.get(piece, piece).split(";")):
        if not part:
            continue
        name, equals, raw = (piece.strip() for piece in part.partition("="))
        if not (name and equals and raw):
            known = ", ".join(SWITCH_NAMES)
            raise ValueError(f"variant {part!r} names no switch; write field=value;field=value or one of {known}")
        if name in SCHEDULES[kernel].__dataclass_fields__:
            fields[name] = _switch(name, raw, hints[name])
        else:
            fields[name] = raw  # get_schedule says what the kernel's fields are
    return get_schedule(kernel, **fields)


def _switch(name: str, raw: str, hint: Any) -> Any:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    allowed = typing.get_args(hint) if union else (hint,)
    text = raw.lower()
    if text in WORDS and type(WORDS[text]) in allowed:
        return WORDS[text]
    for kind in (int, float):
        if kind in allowed:
            try:
                value = kind(raw)
            except ValueError:
                continue
            if math.isfinite(value) and value >= 0:
                return value
    if str in allowed:
        return raw
    takes = " or ".join("none" if kind is type(None) else kind.__name__ for kind in allowed)
    raise ValueError(f"variant sets {name} to {raw!r}; it takes {takes}")


def predict(case: Case) -> Prediction | str:
    """The prediction, or in a sentence why there is none."""
    try:
        gpu = load_gpu(case.gpu)
        load: dict[str, Any] = {"repeats": case.repeats, "flush_bytes": case.flush_bytes}
        how: dict[str, Any] = {"engine": case.engine, "clock": case.clock, **load}
        result: Result = simulate(case.schedule, gpu, case.attention, **how)
    except ArithmeticError as error:
        return f"{case.schedule.name} cannot run with these sizes and switches ({error})"
    except MemoryError:
        return f"{case.attention.label} is too large for this machine's memory"
    except ValueError as error:
        return " ".join(str(error).split())
    return prediction(result, gpu, cap_mhz(gpu, case.clock))


def _predict_all(cases: Sequence[Case], jobs: int | None) -> dict[Case, Prediction | str]:
    """Each case's prediction. The first runs here, so that forked workers find the engine compiled."""
    jobs = jobs or (os.cpu_count() or 1 if len(cases) > SERIAL_UP_TO else 1)
    if jobs == 1 or len(cases) < 2:
        return dict(_shown(((case, predict(case)) for case in cases), len(cases)))
    first = {cases[0]: predict(cases[0])}
    executor = concurrent.futures.ProcessPoolExecutor(min(jobs, len(cases) - 1), initializer=_leave_interrupts)
    try:
        futures = {executor.submit(predict, case): case for case in cases[1:]}
        done = ((futures[future], _outcome(future)) for future in concurrent.futures.as_completed(futures))
        return first | dict(_shown(done, len(futures)))
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts() -> None:
    """Ctrl-C is the parent's to handle; workers end when it closes the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _outcome(future: concurrent.futures.Future[Prediction | str]) -> Prediction | str:
    try:
        return future.result()
    except BrokenProcessPool:
        return "a prediction's process died, most likely for memory: run with jobs=1 or leave the largest rows out"


def _shown(pairs: Iterable[tuple[Case, Prediction | str]], total: int) -> Iterator[tuple[Case, Prediction | str]]:
    """The same pairs; a bar on stderr once they take longer than QUIET_S, where a person looks."""
    from rich.console import Console
    from rich.progress import Progress

    start = time.monotonic()
    progress = Progress(console=Console(stderr=True), transient=True)
    task = progress.add_task("predicting", total=total)
    shown = False
    try:
        for pair in pairs:
            progress.advance(task)
            if not shown and sys.stderr.isatty() and time.monotonic() - start > QUIET_S:
                progress.start()
                shown = True
            yield pair
    finally:
        if shown:
            progress.stop()


def _report(row: Row, outcome: Prediction | str) -> dict[str, Any]:
    """One entry of ``rows``: plain values, ready for JSON."""
    attention = row.case.attention if row.case else None
    measured = row.measured or {}
    report: dict[str, Any] = {
        "line": row.line,
        "status": "skipped" if isinstance(outcome, str) else "ok",
        "gpu": row.case.gpu if row.case else row.cells.get("gpu", ""),
        "kernel": row.cells.get("kernel", ""),
        "pass": attention.pass_ if attention else row.cells.get("pass", ""),
        "dtype": attention.dtype if attention else row.cells.get("dtype", ""),
        "head_dim": attention.head_dim if attention else row.cells.get("head_dim", ""),
        "causal": int(attention.causal) if attention else row.cells.get("causal", ""),
        "label": row.label,
        "reason": outcome if isinstance(outcome, str) else "",
    }
    for name in MEASURES:
        report[f"predicted_{name}"] = None if isinstance(outcome, str) else getattr(outcome, name)
        report[f"measured_{name}"] = measured.get(name)
    report["given"] = next((name for name in ("cycles", "ms", "tflops") if row.cells.get(name)), "")
    report["error_pct"], report["verdict"], report["peak_tflops"] = None, "", None
    if not isinstance(outcome, str):
        unit = "cycles" if measured.get("cycles") else "ms"
        error = 100 * (report[f"predicted_{unit}"] / report[f"measured_{unit}"] - 1)
        report["error_pct"], report["verdict"] = error, verdict(error, outcome, report["given"])
        report["peak_tflops"] = outcome.peak_tflops
    return report
