"""A sweep's file: what it keeps, through interrupts, full disks and changed files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_sweeps import GRID, SHAPE, VARIED, answer, rows_of, run, sentence, sweep_of

from flashsim.sim.explore import Row, Sweep, evaluate
from flashsim.sim.sweep_file import SweepFile, read_record, read_rows


def test_the_file_has_rows_and_provenance(tmp_path: Path, grid: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/flashsim", "explore", "fa2", "--vary", "a=1 2"])
    out = tmp_path / "sweep.parquet"
    found = answer(*VARIED, "-o", str(out))
    table = pq.read_table(out)
    assert table.to_pylist() == grid == found["rows"]
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    identity = json.loads(metadata["flashsim.sweep"])
    assert {"flashsim", "schedule", "fields", "gpu", "gpu_numbers", "problem", "clock", "vary"} <= identity.keys()
    assert (identity["schedule"], identity["gpu"], identity["problem"]["seqlen"]) == ("fa2", "h100", 256)
    assert metadata["flashsim.complete"] == "true"
    assert metadata["flashsim.command"] == "flashsim explore fa2 --vary 'a=1 2'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", metadata["flashsim.date"])
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.parquet"]


def test_columns_keep_their_types(tmp_path: Path) -> None:
    texts = ("registers=none,168", "clock=boost,1500", "gpu.pipe.ex2=4,8", "causal", "counts=ideal")
    sweep = sweep_of(*texts)
    rows = rows_of(sweep)
    path = tmp_path / "sweep.parquet"
    assert SweepFile(path=path, sweep=sweep, planned=16).save(rows)
    schema = pq.read_schema(path)
    kinds = {name: str(schema.field(name).type) for name in ("registers", "clock", "gpu.pipe.ex2", "causal", "counts")}
    assert list(kinds.values()) == ["int64", "string", "double", "bool", "string"]
    assert list(read_rows(path, sweep).values()) == rows


def interrupt_after(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Ctrl-C when the candidate after the first ``n`` begins."""
    left = iter(range(n))

    def interrupted(sweep: Sweep, number: int) -> Row:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return evaluate(sweep, number)

    monkeypatch.setattr("flashsim.sim.workers._function", lambda payload: partial(interrupted, pickled_sweep(payload)))


def pickled_sweep(payload: bytes) -> Sweep:
    import pickle

    sweep = pickle.loads(payload).args[0]
    assert isinstance(sweep, Sweep)
    return sweep


@pytest.mark.parametrize("search", [[], ["--trials", "12", "--max-candidates", "4"]], ids=["grid", "optuna"])
def test_an_interrupt_keeps_what_is_done_and_resume_goes_on(search: list[str], tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.parquet", tmp_path / "part.parquet"
    assert run(*VARIED, *search, "-o", str(whole)).exit_code == 0
    planned_rows = pq.read_table(whole).num_rows
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 5)
        done = run(*VARIED, *search, "-o", str(part))
    assert done.exit_code == 130
    told = f"flashsim: interrupted; {part} keeps 5 of {planned_rows} candidates: go on with --resume"
    assert done.stderr.strip() == told
    assert "best by time" in done.stdout
    assert pq.read_table(part).num_rows == 5
    refused = sentence(*VARIED, *search, "-o", str(part))  # the same command again would lose the five
    assert f"{part} holds an unfinished sweep (5 of {planned_rows} candidates): go on with --resume {part}" in refused
    assert run(*VARIED, *search, "--resume", str(part)).exit_code == 0
    assert pq.read_table(part).equals(pq.read_table(whole))
    assert run(*VARIED, *search, "--resume", str(part)).exit_code == 0  # nothing is left to do
    assert pq.read_table(part).equals(pq.read_table(whole))


def test_a_finished_sweep_is_replaced_only_where_asked(tmp_path: Path) -> None:
    out = tmp_path / "sweep.parquet"
    assert run("--vary", "warps=2,4", "-o", str(out)).exit_code == 0
    before = out.read_bytes()
    said = sentence(*VARIED, "-o", str(out))
    assert said == (
        f"flashsim: {out} holds a finished sweep (2 of 2 candidates): go on with --resume {out}, or replace it with --overwrite"
    )
    assert out.read_bytes() == before
    assert run(*VARIED, "-o", str(out), "--overwrite").exit_code == 0
    assert pq.read_table(out).num_rows == 16


@pytest.mark.parametrize("how", [[], ["--overwrite"]])
def test_a_file_that_is_no_sweep_is_never_replaced(how: list[str], tmp_path: Path) -> None:
    notes, other, pipe = tmp_path / "notes.txt", tmp_path / "other.parquet", tmp_path / "pipe"
    notes.write_text("mine")
    pq.write_table(pa.table({"a": [1]}), other)
    os.mkfifo(pipe)
    for path in (notes, other, pipe):
        before = path.read_bytes() if path != pipe else b""
        said = sentence("--vary", "warps=2,4", "-o", str(path), *how)
        assert said == f"flashsim: {path} holds no sweep, and explore replaces nothing else: choose another path for -o"
        assert path.is_fifo() or path.read_bytes() == before


def test_an_empty_file_and_a_link_to_a_sweep_are_written(tmp_path: Path) -> None:
    empty, link = tmp_path / "empty", tmp_path / "link"
    empty.touch()
    link.symlink_to(empty)
    assert run("--vary", "warps=2,4", "-o", str(link)).exit_code == 0
    assert link.is_symlink()
    assert pq.read_table(empty).num_rows == 2
    assert "holds a finished sweep" in sentence("--vary", "warps=2,4", "-o", str(link))


def test_a_file_without_a_column_of_today_says_why(tmp_path: Path) -> None:
    path, sweep = tmp_path / "sweep.parquet", sweep_of("warps=2,4")
    assert SweepFile(path=path, sweep=sweep, planned=2).save(rows_of(sweep))
    pq.write_table(pq.read_table(path).drop_columns("counts_from"), path)
    with pytest.raises(ValueError, match=r"has other columns than this sweep: an older flashsim wrote it, or it was changed$"):
        read_rows(path, sweep)
    with pytest.raises(ValueError, match=r"lacks a part of its sweep: an older flashsim wrote it, or it was changed$"):
        read_record(path)


def test_ctrl_c_at_a_terminal_keeps_the_rows(tmp_path: Path) -> None:
    out = tmp_path / "sweep.parquet"
    texts = ["block_kv=16:256:16", "registers=128:248:2", "warps=4"]
    command = [sys.executable, "-m", "flashsim.cli", "explore", "fa2", *SHAPE, "--jobs", "2", "-o", str(out)]
    process = subprocess.Popen(
        [*command, "--vary", *texts], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for _ in range(600):
        if out.exists():
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert re.fullmatch(rf"flashsim: interrupted; {out} keeps \d+ of 976 candidates: go on with --resume", stderr.strip())
    assert 0 < pq.read_table(out).num_rows < 976


def test_resume_refuses_other_files_and_leaves_them(tmp_path: Path) -> None:
    other, text, plain = tmp_path / "other.parquet", tmp_path / "text.parquet", tmp_path / "plain.parquet"
    assert run("--vary", "warps=2,4", "-o", str(other)).exit_code == 0
    text.write_bytes(b"PAR1 this is not a table")
    pq.write_table(pa.table({"candidate": [1, 2]}), plain)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(other.read_bytes()[:-20])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = sentence(*VARIED, "--resume", str(other))
    assert said.startswith(f"flashsim: {other} holds another sweep (vary warps=2,4, not block_kv=32:128:32")
    same = ["--vary", "warps=2,4", "--resume", str(other)]
    assert "holds another sweep (clock boost, not 1500.0)" in sentence(*same, "--clock", "1500")
    assert "holds another sweep (gpu_numbers" in sentence(*same, "--set-gpu", "pipe.ex2=4")
    for path in (text, cut):
        assert sentence(*VARIED, "--resume", str(path)).startswith(f"flashsim: cannot read {path}: not a Parquet file")
    assert f"{plain} is no sweep of flashsim" in sentence(*VARIED, "--resume", str(plain))
    assert "missing.parquet: no such file" in sentence(*VARIED, "--resume", str(tmp_path / "missing.parquet"))
    assert "cannot read" in sentence(*VARIED, "--resume", str(tmp_path))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path, sweep = tmp_path / "sweep.parquet", sweep_of(*GRID)
    SweepFile(path=path, sweep=sweep, planned=16).save(rows_of(sweep))
    table = pq.read_table(path)
    for changed in (pa.concat_tables([table, table]), table.set_column(0, "candidate", pa.array([99, *range(1, 16)]))):
        pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
        with pytest.raises(ValueError, match=r"has a candidate \d+ that cannot be: it was changed after explore wrote it$"):
            read_rows(path, sweep)


def test_a_file_that_cannot_be_written_is_refused_before_the_sweep(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "sweep.parquet"
    done = run(*VARIED, "-o", str(out))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.strip() == f"flashsim: cannot write {out}: no such file or directory; choose another path for -o"
    assert f"cannot write {tmp_path}: is a directory" in sentence(*VARIED, "-o", str(tmp_path))


def test_a_full_disk_costs_the_file_not_the_table(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk; the file of before stays whole."""
    out = tmp_path / "sweep.parquet"
    assert run("--vary", "warps=4", "-o", str(out)).exit_code == 0
    before = out.read_bytes()
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); from flashsim.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "explore", "fa2", *SHAPE, "--jobs", "1", *VARIED, "-o", str(out), "--overwrite"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "best by time" in done.stdout
    assert done.stderr.strip() == (
        f"flashsim: cannot write {out}: file too large; rows are in the table only: choose another path for -o"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.parquet"]
    assert out.read_bytes() == before


def test_two_sweeps_that_begin_at_once_on_one_file_both_keep_their_rows(
    tmp_path: Path, grid: list[Row], caplog: pytest.LogCaptureFixture
) -> None:
    path, sweep = tmp_path / "sweep.parquet", sweep_of(*GRID)
    first, second = (SweepFile(path=path, sweep=sweep, planned=len(grid)) for _ in range(2))
    assert first.save(grid)
    assert second.save(grid[:1])
    assert second.path != path
    assert f"rows go to {second.path}" in caplog.text
    assert first.save(grid[:2])
    assert second.save(grid)
    assert [len(read_rows(file.path, sweep)) for file in (first, second)] == [2, len(grid)]
