"""A sweep's rows as Parquet, with the provenance that says what they are rows of.

The file is replaced whole and at once, now and then while the sweep goes on, so that whatever happens a readable file with the
rows of a moment ago is there. Metadata (keys that begin with ``flashsim.``): the sweep's identity and digest, the command, the
date, how many candidates were planned, and whether all of them are there.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .explore import RESULTS, STATUSES, Row, Sweep, candidate, column, row_of
from .extras import extra
from .space import PROBLEM, Axis, Steps, word

LOG = logging.getLogger(__name__)

SAVE_EVERY_S = 2.0
SAVE_SHARE = 20  # at most about 1/20 of the time goes into saving
ROWS_PER_GROUP = 65_536
NOTHING = "no rows"  # an empty file, or a sweep that has not begun


def _arrow() -> tuple[Any, Any]:
    return extra("pyarrow", "explore", "a sweep file"), extra("pyarrow.parquet", "explore", "a sweep file")


@dataclass(kw_only=True)
class SweepFile:
    """Where the rows of ``sweep`` go. ``command`` is kept for the record; ``planned``: candidates that make it complete.

    Making one raises ValueError where pyarrow is missing, where nothing can be written, or where ``path`` holds a sweep that this
    would replace (``replace``: whether it may, since it is gone on with or the user said so), or anything that is no sweep,
    whatever the user said.
    """

    path: Path
    sweep: Sweep
    planned: int
    command: str = ""
    replace: bool = False
    trouble: str = field(default="", init=False)
    _next: float = field(default=0.0, init=False)
    _seen: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        _arrow()
        self._seen = self._there()
        if trouble := self._refused():
            raise ValueError(f"cannot write {self.path}: {trouble}; choose another path for -o")
        if not self.path.exists():
            return
        held = contents(self.path)
        if not held:
            raise ValueError(f"{self.path} holds no sweep, and explore replaces nothing else: choose another path for -o")
        if not self.replace and held != NOTHING:
            raise ValueError(f"{self.path} holds {held}: go on with --resume {self.path}, or replace it with --overwrite")

    def _refused(self) -> str:
        """Why nothing can be written there; empty where something can."""
        if self.path.is_dir():
            return os.strerror(errno.EISDIR).lower()
        try:
            self._temporary.write_bytes(b"")
            self._temporary.unlink()
        except OSError as error:
            return (error.strerror or str(error)).lower()
        return ""

    def _there(self) -> tuple[int, int] | None:
        """What tells the file on disk from another at the same path; None where there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    @property
    def _temporary(self) -> Path:
        return self._target.with_name(f".{self._target.name}.{os.getpid()}.tmp")

    @property
    def _target(self) -> Path:
        """The file itself where ``path`` is a link to it: the link stays."""
        return self.path.resolve()

    def save(self, rows: Iterable[Row]) -> bool:
        """Replace the file by ``rows``. False where that failed: ``trouble`` says why, and the old file is as it was.

        Where another process has written the file meanwhile, rows go to one beside it from now on, and ``path`` names that.
        """
        began = time.monotonic()
        if self._there() not in (None, self._seen):
            taken, self.path = self.path, self.path.with_stem(f"{self.path.stem}-{os.getpid()}")
            LOG.warning("another process has written %s meanwhile; rows go to %s", taken, self.path)
        temporary = self._temporary
        try:
            content = self._content(sorted(rows, key=candidate))
            with temporary.open("wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, self._target)
            self.trouble, self._seen = "", self._there()
        except OSError as error:
            self.trouble = (error.strerror or str(error)).lower()
        finally:
            with contextlib.suppress(OSError):  # its folder is not there, or not ours: nothing was written
                temporary.unlink(missing_ok=True)
        ended = time.monotonic()
        self._next = ended + max(SAVE_EVERY_S, SAVE_SHARE * (ended - began))
        return not self.trouble

    def save_if_due(self, rows: Iterable[Row]) -> None:
        """:meth:`save`, but not more often than every SAVE_EVERY_S seconds."""
        if time.monotonic() >= self._next:
            self.save(rows)

    def _content(self, rows: list[Row]) -> bytes:
        pa, parquet = _arrow()
        done = {
            "flashsim.sweep": json.dumps(self.sweep.identity()),
            "flashsim.digest": self.sweep.digest(),
            "flashsim.command": self.command,
            "flashsim.date": datetime.now(UTC).isoformat(timespec="seconds"),
            "flashsim.space": str(self.sweep.size),
            "flashsim.planned": str(self.planned),
            "flashsim.complete": str(len(rows) >= self.planned).lower(),
        }
        table = pa.Table.from_pylist(_plain(self.sweep, rows), schema=_schema(pa, self.sweep)).replace_schema_metadata(done)
        out = io.BytesIO()
        parquet.write_table(table, out, row_group_size=ROWS_PER_GROUP)
        return out.getvalue()


def _schema(pa: Any, sweep: Sweep) -> Any:
    kinds = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
    axes = [(column(axis.name), kinds[_kind(axis)]) for axis in sweep.space.axes]
    return pa.schema([("candidate", pa.int64()), *axes, *((name, kinds[kind]) for name, kind in RESULTS.items())])


def _kind(axis: Axis) -> type:
    """The type of a column that holds an axis' values beside nulls; text where they are of several types."""
    if isinstance(axis.values, Steps):
        return int if axis.values.whole else float
    kinds = {type(value) for value in axis.values if value is not None}
    if kinds == {int, float}:
        return float
    return kinds.pop() if len(kinds) == 1 else str


def _plain(sweep: Sweep, rows: list[Row]) -> list[Row]:
    texts = [column(axis.name) for axis in sweep.space.axes if _kind(axis) is str]
    if not texts:
        return rows
    return [{**row, **{name: None if row[name] is None else word(row[name]) for name in texts}} for row in rows]


def read_rows(path: Path, sweep: Sweep) -> dict[int, Row]:
    """Rows of ``sweep`` kept in ``path``: candidate -> row.

    Raises ValueError, in one sentence, where the file cannot be read or holds another sweep; it is never written to.
    """
    table, metadata = _read(path, "--resume")
    if metadata["flashsim.digest"] != sweep.digest():
        raise ValueError(f"{path} holds another sweep ({_difference(metadata, sweep)}): give its options, or another file")
    pa, _ = _arrow()
    if not table.schema.equals(_schema(pa, sweep)):
        raise ValueError(f"{path} has other columns than this sweep: an older flashsim wrote it, or it was changed")
    rows = _checked(path, table.select(["candidate", *RESULTS]).to_pylist(), sweep.space.size)
    return {number: row_of(sweep, number, row) for number, row in rows.items()}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A sweep as its file tells it, without the schedule and the chip. ``rows`` in the order of their numbers; ``complete``:
    whether all that were planned are there; ``command`` and ``date``: what wrote it, and when."""

    sweep: dict[str, Any]
    rows: tuple[Row, ...]
    size: int
    planned: int
    complete: bool
    command: str
    date: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sweep["vary"])

    @property
    def objective(self) -> str:
        """As :attr:`Sweep.objective`: a field of the schedule hides a size of the problem of that name."""
        return "tflops" if any(name in PROBLEM and name not in self.sweep["fields"] for name in self.names) else "ms"

    def identity(self) -> dict[str, Any]:
        return self.sweep


def read_record(path: Path) -> Record:
    """The sweep in ``path``, whatever it is of. Raises ValueError, in one sentence, where it cannot be read."""
    table, metadata = _read(path, "--sweep")
    try:
        sweep, size = json.loads(metadata["flashsim.sweep"]), int(metadata["flashsim.space"])
        known = {"schedule": str, "gpu": str, "gpu_numbers": str, "fields": dict, "problem": dict, "vary": dict}
        if not all(isinstance(sweep[name], kind) for name, kind in known.items()):
            raise KeyError
        table = table.select(["candidate", *(column(name) for name in sweep["vary"]), *RESULTS])
        planned = int(metadata["flashsim.planned"])
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"{path} lacks a part of its sweep: an older flashsim wrote it, or it was changed") from None
    rows = _checked(path, table.to_pylist(), size)
    return Record(
        sweep=sweep, rows=tuple(rows[number] for number in sorted(rows)), size=size, planned=planned,
        complete=len(rows) >= planned, command=metadata.get("flashsim.command", ""), date=metadata.get("flashsim.date", ""),
    )  # fmt: skip


def _checked(path: Path, rows: Iterable[Row], size: int) -> dict[int, Row]:
    """Rows by their candidate. Raises ValueError where one has no number of the space, another's, no status, or no results."""
    out: dict[int, Row] = {}
    for row in rows:
        number, ran = row["candidate"], row["status"] == "ok"
        lacks = ran and any(row[name] is None for name in RESULTS if name != "reason")
        if number is None or not 0 <= number < size or number in out or row["status"] not in STATUSES or lacks:
            raise ValueError(f"{path} has a candidate {number} that cannot be: it was changed after explore wrote it")
        out[number] = row
    return out


def contents(path: Path) -> str:
    """"an unfinished sweep (40 of 64 candidates)", "a finished sweep (...)", NOTHING; empty for what is no sweep."""
    pa, parquet = _arrow()
    try:
        if not path.is_file():
            return ""  # a device or a pipe
        if not path.stat().st_size:
            return NOTHING
        file = parquet.ParquetFile(path)
        metadata = file.schema_arrow.metadata or {}
    except (OSError, pa.ArrowException):
        return ""
    if b"flashsim.complete" not in metadata:
        return ""
    if not file.metadata.num_rows:
        return NOTHING
    state = "an unfinished" if metadata[b"flashsim.complete"] == b"false" else "a finished"
    return f"{state} sweep ({file.metadata.num_rows} of {metadata.get(b'flashsim.planned', b'?').decode()} candidates)"


def _read(path: Path, option: str) -> tuple[Any, dict[str, str]]:
    """The table and its metadata. Raises ValueError where it is no sweep."""
    pa, parquet = _arrow()
    advice = f"give {option} a file that explore -o wrote"
    try:
        # without threads: one that still ends while the process exits would abort it
        table = parquet.read_table(io.BytesIO(path.read_bytes()), use_threads=False, pre_buffer=False)
    except OSError as error:
        reason = (error.strerror or "not a Parquet file").lower()
        raise ValueError(f"cannot read {path}: {reason}; {advice}") from None
    except (pa.ArrowException, MemoryError):
        raise ValueError(f"cannot read {path}: not a Parquet file; {advice}") from None
    metadata = {key.decode(): value.decode(errors="replace") for key, value in (table.schema.metadata or {}).items()}
    if "flashsim.digest" not in metadata:
        raise ValueError(f"{path} is no sweep of flashsim: {advice}")
    return table, metadata


def _difference(metadata: dict[str, str], sweep: Sweep) -> str:
    """What differs first between the file's sweep and this one, in words."""
    mine = sweep.identity()
    try:
        theirs = json.loads(metadata["flashsim.sweep"])
        for name, value in mine.items():
            if theirs.get(name) != value:
                return f"{name} {_short(theirs.get(name))}, not {_short(value)}"
    except (KeyError, ValueError, AttributeError):
        pass  # the digest differs; how is not told
    return "its digest differs"


def _short(value: Any) -> str:
    text = " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
