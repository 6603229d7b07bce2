"""Explore: the space of a sweep, its rows, where they are computed, how they are kept, and what the command says."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import command_line
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim import explore as explore_module
from flashsim.sim.explore import MAX_CANDIDATES, Row, Sweep, candidate, evaluate, explore, planned
from flashsim.sim.findings import heat_map, pareto, ranked, reasons, report
from flashsim.sim.space import Steps, knobs, parse_space, usual_space
from flashsim.sim.sweep_file import SweepFile, read_rows
from flashsim.sim.workers import ALONE, Died, Workers, local

GPU, FA2 = load_gpu("h100"), get_schedule("fa2")
PROBLEM = {"batch": 1, "heads": 2, "seqlen": 256, "head_dim": 64}
SHAPE = ["--gpu", "h100", "--batch", "1", "--heads", "2", "--seqlen", "256", "--head-dim", "64"]
GRID = ("block_kv=32:128:32", "warps=2,4", "block_q=64,100")
VARIED = [word for text in GRID for word in ("--vary", text)]


def sweep_of(*texts: str, **problem: Any) -> Sweep:
    return Sweep(schedule=FA2, gpu=GPU, problem=PROBLEM | problem, space=parse_space(texts, FA2, GPU), clock="boost")


def rows_of(sweep: Sweep, jobs: int = 1, **how: Any) -> list[Row]:
    with local(jobs) as workers:
        return sorted(explore(sweep, workers, **how), key=candidate)


EXPLORE = ("explore", "fa2", *SHAPE, "--clock", "boost", "--jobs", "1")
run, sentence = (partial(each, *EXPLORE) for each in (command_line.run, command_line.sentence))


def answer(*args: str) -> Any:
    done = run(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# --- the space ---


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("block_q=64,128", "block_q", [64, 128]),
        ("warps=none,4", "warps", [None, 4]),
        ("block_kv=2:4", "block_kv", [2, 3, 4]),
        ("block_kv=64:256:64", "block_kv", [64, 128, 192, 256]),
        ("block_kv=64:200:64", "block_kv", [64, 128, 192]),
        ("block_kv=16,64:128:32", "block_kv", [16, 64, 96, 128]),
        ("counts=binary,ideal", "counts", ["binary", "ideal"]),
        ("causal", "causal", [False, True]),
        ("causal=true,false", "causal", [True, False]),
        ("clock=1000:1400:200", "clock", [1000.0, 1200.0, 1400.0]),
        ("clock=boost,1500", "clock", ["boost", 1500.0]),
        ("gpu.pipe.ex2=4,8", "gpu.pipe.ex2", [4.0, 8.0]),
        ("pipe.ex2=0.1:0.3:0.1", "gpu.pipe.ex2", [0.1, 0.2, 0.3]),
        ("seqlen=512,1024", "seqlen", [512, 1024]),
    ],
)
def test_values_are_lists_ranges_and_switches(text: str, name: str, values: list[Any]) -> None:
    (axis,) = parse_space([text], FA2, GPU).axes
    assert axis.name == name
    assert [axis.values[i] for i in range(len(axis.values))] == values


def test_candidates_are_numbered_like_digits() -> None:
    space = parse_space(GRID, FA2, GPU)
    assert space.size == 16
    assert [space.at(n)["block_q"] for n in range(4)] == [64, 100, 64, 100]
    assert [space.number(space.places(n)) for n in range(16)] == list(range(16))
    assert len({tuple(space.at(n).values()) for n in range(16)}) == 16
    with pytest.raises(IndexError):
        space.at(16)


def test_a_huge_range_takes_no_memory() -> None:
    space = parse_space(["block_q=1:1000000000", "block_kv=1:1000000000"], FA2, GPU)
    assert space.size == 10**18
    assert space.at(10**18 - 1) == {"block_q": 10**9, "block_kv": 10**9}
    assert isinstance(space.axes[0].values, Steps)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_field_of_every_schedule_can_be_varied(name: str) -> None:
    schedule = get_schedule(name)
    known = knobs(schedule, GPU)
    assert set(SCHEDULES[name].__dataclass_fields__) <= known.keys()
    assert {f"gpu.{number}" for number, _ in GPU.numbers()} <= known.keys()
    assert parse_space(usual_space(schedule), schedule, GPU).size > 1


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A schedule as they may come: switches, choices and stages."""

    stages: int = 2
    pingpong: bool = True
    order: Literal["lpt", "linear"] = "lpt"
    tile_n: int | None = None
    share: float = 0.1

    @property
    def name(self) -> str:
        return "pipelined"

    def lower(self, gpu: Any, attention: Any) -> Any:
        return FA2.lower(gpu, attention)


def test_fields_of_a_schedule_not_known_here() -> None:
    texts = ["stages=2:4", "pingpong", "order", "tile_n=none,64", "share=0:0.5:0.25"]
    space = parse_space(texts, Pipelined(), GPU)
    assert space.size == 3 * 2 * 2 * 2 * 3
    assert space.at(space.size - 1) == {"stages": 4, "pingpong": True, "order": "linear", "tile_n": 64, "share": 0.5}
    sweep = Sweep(schedule=Pipelined(), gpu=GPU, problem=PROBLEM, space=space)
    assert sweep.candidate(space.size - 1)[0] == Pipelined(stages=4, order="linear", tile_n=64, share=0.5)
    assert usual_space(Pipelined(), ["tile_n"]) == ["stages=1:4", "pingpong"]
    with pytest.raises(ValueError, match=r"^--vary order got 'lifo'; it takes lpt or linear$"):
        parse_space(["order=lifo"], Pipelined(), GPU)


# --- rows ---


@pytest.fixture(scope="module")
def grid() -> list[Row]:
    return rows_of(sweep_of(*GRID))


def test_a_grid_has_a_row_a_candidate(grid: list[Row]) -> None:
    """Its results are simulate's own; whoever cannot run says why."""
    from flashsim import Attention, simulate

    sweep = sweep_of(*GRID)
    assert [row["candidate"] for row in grid] == list(range(16))
    row = next(row for row in grid if (row["block_q"], row["block_kv"], row["warps"]) == (64, 96, 4))
    attention = Attention(batch=1, heads_q=2, seqlen_q=256, head_dim=64)
    result = simulate(get_schedule("fa2", block_q=64, block_kv=96, warps=4), GPU, attention, clock="boost")
    assert (row["cycles"], row["ms"], row["limiter"]) == (result.cycles, result.ms, result.limiter)
    assert row["smem_bytes_per_cta"] == result.launches[0].program.smem_bytes
    assert row["ctas_per_sm"] == result.launches[0].occupancy.ctas_per_sm
    refused = [row for row in grid if row["block_q"] == 100]
    assert {row["status"] for row in refused} == {"pruned"}
    assert refused[0]["reason"].startswith("fa2 tile 100x32 with 2 warps: block_q must be a multiple of 16 x warps = 32")
    assert refused[0]["cycles"] is None
    assert row == evaluate(sweep, row["candidate"])


def test_clock_chip_and_problem_reach_the_simulation() -> None:
    rows = rows_of(sweep_of("clock=1000,boost", "gpu.pipe.ex2=8,40", "seqlen=256,512"))
    by_place = {(row["clock"], row["gpu.pipe.ex2"], row["seqlen"]): row for row in rows}
    assert by_place[1000.0, 8.0, 256]["clock_mhz"] == pytest.approx(1000)
    assert by_place["boost", 8.0, 256]["clock_mhz"] == pytest.approx(1980)
    assert by_place["boost", 40.0, 512]["cycles"] > by_place["boost", 8.0, 512]["cycles"] > by_place["boost", 8.0, 256]["cycles"]


def test_reasons_are_counted(grid: list[Row]) -> None:
    (group,) = reasons(grid)
    assert (group["status"], group["count"], group["first"]) == ("pruned", 8, 1)
    rows = rows_of(sweep_of("block_kv=64,4096", "registers=255,300"))
    text = " / ".join(group["reason"] for group in reasons(rows))
    assert "needs 300 registers per thread; h100 has at most 255" in text
    assert "B of shared memory; h100 gives a CTA at most 232448 B" in text


def test_a_defect_of_one_candidate_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("stage")

    monkeypatch.setattr(explore_module, "simulate", broken)
    row = evaluate(sweep_of("warps=4"), 0)
    assert (row["status"], row["reason"]) == ("failed", "KeyError: 'stage'")


def test_the_best_the_front_and_what_matters(grid: list[Row]) -> None:
    sweep = sweep_of(*GRID)
    found = report(sweep, grid, planned=16)
    good = ranked("ms", grid)
    assert found["best"] == good[0]
    assert (found["ok"], found["pruned"], found["failed"]) == (8, 8, 0)
    front = pareto("ms", grid)
    for row in good:  # every row is on the front or beaten by one that is
        assert any(k["ms"] <= row["ms"] and k["registers_per_thread"] <= row["registers_per_thread"]
                   and k["smem_bytes_per_cta"] <= row["smem_bytes_per_cta"] for k in front)  # fmt: skip
    for a, b in pairwise(front):
        assert a["registers_per_thread"] > b["registers_per_thread"] or a["smem_bytes_per_cta"] > b["smem_bytes_per_cta"]
    spreads = [entry["spread_pct"] for entry in found["sensitivity"]]
    assert spreads == sorted(spreads, reverse=True)
    heat = heat_map(sweep, grid, "block_q", "block_kv")
    assert (heat["xs"], heat["ys"]) == ([64, 100], [32, 64, 96, 128])
    assert all(cells[1] is None for cells in heat["cells"])
    assert min(cells[0] for cells in heat["cells"]) == 0


def test_problems_of_other_sizes_are_ranked_by_rate() -> None:
    sweep = sweep_of("seqlen=256,2048")
    rows = rows_of(sweep)
    assert sweep.objective == "tflops"
    assert ranked(sweep.objective, rows)[0]["seqlen"] == 2048


# --- large spaces ---


LARGE = ("block_q=16:512:16", "block_kv=16:512:16", "registers=1:255", "warps=2,8,4", "gpu.pipe.ex2=1:1000")


def test_a_large_space_needs_trials() -> None:
    space = parse_space(LARGE, FA2, GPU)
    assert space.size == 32 * 32 * 255 * 3 * 1000
    with pytest.raises(ValueError, match=r"^the space has 783,360,000 combinations, more than --max-candidates 2,000: give "):
        planned(space, None)
    assert planned(space, 30) == 30
    assert planned(parse_space(GRID, FA2, GPU), None) == 16 <= MAX_CANDIDATES


def test_optuna_searches_and_any_interruption_changes_nothing() -> None:
    """The same candidates and rows when part of them is known already; another seed takes others."""
    sweep = sweep_of(*LARGE)
    rows = rows_of(sweep, trials=18)
    assert len(rows) == 18 == len({candidate(row) for row in rows})
    assert any(row["status"] == "ok" for row in rows)
    known = {candidate(row): row for row in rows[::2]}
    rest = rows_of(sweep, trials=18, known=known)
    assert sorted([*known.values(), *rest], key=candidate) == rows
    assert [candidate(row) for row in rows_of(sweep, trials=3, seed=1)] != [candidate(row) for row in rows_of(sweep, trials=3)]


def test_optuna_takes_every_candidate_once_in_a_small_space() -> None:
    rows = rows_of(sweep_of("registers=128:147"), trials=19)
    assert len({candidate(row) for row in rows}) == len(rows) == 19


# --- workers ---


def test_processes_give_the_same_rows_and_a_killed_one_loses_nothing(grid: list[Row]) -> None:
    rows, killed = [], 0
    with local(2) as workers:
        for row in explore(sweep_of(*GRID), workers):
            rows.append(row)
            if len(rows) == 2:
                for child in multiprocessing.active_children():
                    child.kill()
                    killed += 1
    assert killed == 2
    assert sorted(rows, key=candidate) == grid


def test_an_item_that_kills_its_worker_is_told_apart() -> None:
    items = [signal.SIGCHLD, signal.SIGCHLD, signal.SIGKILL, signal.SIGCHLD]  # SIGCHLD is ignored
    pool = partial(ProcessPoolExecutor, 2, mp_context=multiprocessing.get_context("spawn"))
    workers = Workers(start=pool, width=2)
    answers = sorted((int(item), got) for item, got in workers.answers(signal.raise_signal, items))
    workers.close()
    assert answers == [(9, Died(ALONE + 1)), (17, None), (17, None), (17, None)]


def test_workers_that_never_answer_end_the_sweep() -> None:
    class Fails(Workers):
        def _alone(self, payload: bytes, item: Any) -> Any:
            return Died(3)

    workers = Fails(start=partial(_broken_pool), width=2)
    with pytest.raises(ValueError, match=r"^3 workers died before any gave an answer: free memory, or use --jobs 1"):
        list(workers.answers(abs, [1, 2, 3, 4, 5]))


def _broken_pool() -> Any:
    from concurrent.futures import BrokenExecutor
    from types import SimpleNamespace

    from flashsim.sim.workers import Inline

    def raises(*args: Any) -> None:
        raise BrokenExecutor

    return SimpleNamespace(submit=lambda fn, *args: Inline().submit(raises), shutdown=lambda **kwargs: None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50) as cluster:
        yield cluster


def test_dask_gives_the_same_rows(cluster: Any) -> None:
    here = answer(*VARIED)
    there = answer(*VARIED, "--dask", cluster.scheduler_address)
    assert there == here


def test_a_dask_scheduler_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashsim.sim.workers.ANSWER_S", 0.2)
    assert "no Dask scheduler answers at 'tcp://127.0.0.1:1'" in sentence(*VARIED, "--dask", "tcp://127.0.0.1:1")
    assert "no Dask scheduler answers at 'nonsense://x'" in sentence(*VARIED, "--dask", "nonsense://x")


# --- files ---


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


def test_a_folder_that_is_not_there_costs_the_file_not_the_table(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "sweep.parquet"
    done = run(*VARIED, "-o", str(out))
    assert done.exit_code == 2
    assert "best by time" in done.stdout
    assert done.stderr.strip() == (
        f"flashsim: cannot write {out}: no such file or directory; rows are in the table only: choose another path for -o"
    )


def test_a_full_disk_costs_the_file_not_the_table(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk; the file of before stays whole."""
    out = tmp_path / "sweep.parquet"
    assert run("--vary", "warps=4", "-o", str(out)).exit_code == 0
    before = out.read_bytes()
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); from flashsim.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "explore", "fa2", *SHAPE, "--jobs", "1", *VARIED, "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "best by time" in done.stdout
    assert done.stderr.strip() == (
        f"flashsim: cannot write {out}: file too large; rows are in the table only: choose another path for -o"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["sweep.parquet"]
    assert out.read_bytes() == before


# --- the command ---


def test_the_command_prints_its_parts(tmp_path: Path) -> None:
    png = tmp_path / "heat.png"
    done = run(*VARIED, "--heatmap", "block_q,block_kv", str(png))
    assert done.exit_code == 0, done.output
    for part in ("16 candidates: 8 ran, 8 cannot run", "best by time", "Pareto front", "how much each field matters", "heat map"):
        assert part in done.stdout
    assert "fa2 tile 100x32 with 2 warps" in done.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""


def test_values_may_follow_one_vary_and_sizes_need_no_option() -> None:
    found = answer("--vary", "block_kv=32,64", "warps=2,4")
    assert found["vary"] == {"block_kv": "32,64", "warps": "2,4"}
    bare = [word for word in SHAPE if word not in ("--seqlen", "256")]
    done = command_line.run("explore", "fa2", *bare, "--vary", "seqlen=128,256", "--jobs", "1", "--json")
    assert [row["seqlen"] for row in json.loads(done.stdout)["rows"]] == [128, 256]
    missing = command_line.run("explore", "fa2", *bare, "--vary", "warps=4")
    assert "seqlen is neither given nor varied: give --seqlen, or --vary seqlen=a,b,c" in missing.stderr


def test_nothing_varied_means_the_usual_tiles() -> None:
    found = answer("--set", "block_kv=64")
    assert found["vary"] == {"block_q": "32,64,128,256", "warps": "4,8"}


def test_a_sweep_in_which_nothing_runs_says_so(tmp_path: Path) -> None:
    done = run("--vary", "block_q=100,200", "-o", str(tmp_path / "sweep.parquet"))
    assert done.exit_code == 2
    assert "none of the 2 candidates can run" in done.stderr
    assert "why candidates did not run" in done.stdout
    assert pq.read_table(tmp_path / "sweep.parquet").num_rows == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--vary", "blok_q=64"], "'blok_q' cannot be varied; did you mean block_q? fa2 varies batch, heads"),
        (["--vary", "gpu.pipe.exp=4"], "'gpu.pipe.exp' cannot be varied; did you mean gpu.pipe.ex2?"),
        (["--vary", "=4"], "'a name' cannot be varied; did you mean"),
        (["--vary", "block_q="], "--vary block_q got '', which has an empty value"),
        (["--vary", "block_q=64,,128"], "--vary block_q got '64,,128', which has an empty value"),
        (["--vary", "block_q=128:64"], "--vary block_q got '128:64', an empty range: its stop is below its start"),
        (["--vary", "block_q=64:128:0"], "--vary block_q got the range '64:128:0'; write start:stop or start:stop:step"),
        (["--vary", "block_q=64:128:-8"], "--vary block_q got the range '64:128:-8'; write start:stop"),
        (["--vary", "block_q=a:b"], "--vary block_q got the range 'a:b'; write start:stop"),
        (["--vary", "block_q=1:2:3:4"], "--vary block_q got the range '1:2:3:4'; write start:stop"),
        (["--vary", "clock=nan:inf"], "--vary clock got the range 'nan:inf'"),
        (["--vary", "block_q=1:2:0.5"], "--vary block_q got '1:2:0.5'; it takes whole numbers"),
        (["--vary", "block_q=0:64:16"], "--vary block_q got 0; it must be at least 1, or none"),
        (["--vary", "block_q=64,64"], "--vary block_q has 64 twice: write each value once"),
        (["--vary", "block_q=" + "9" * 5000], "it takes a whole number or none"),
        (["--vary", "gpu.pipe.ex2=1:1e30"], "a range of more than 9.2e+18 values: use a larger step"),
        (["--vary", "block_q=1:999999999", "--vary", "block_kv=1:999999999", "--vary", "warps=1:999"], "about 1e20 combinations"),
        (["--vary", "block_q=1:1000", "--vary", "block_kv=1:1000000"], "the space has 1,000,000,000 combinations"),
        (["--vary", "warps=four"], "--vary warps got 'four'; it takes a whole number or none"),
        (["--vary", "warps=-4"], "--vary warps got -4; it must be zero or more"),
        (["--vary", "warps"], "--vary got 'warps' without values: write warps=a,b,c"),
        (["--vary", "causal=maybe"], "--vary causal got 'maybe'; it takes true or false"),
        (["--vary", "clock=1"], "clock is 1.0; give MHz between 100 and 10000"),
        (["--vary", "gpu.pipe.ex2=-1"], "--vary gpu.pipe.ex2 got -1; it must be zero or more"),
        (["--vary", "gpu.hbm.latency_ns=0"], "hbm.latency_ns has the value 0.0; it must be more than zero"),
        (["--vary", "seqlen=99999999999"], "--vary seqlen got 99999999999; it must be at most 2147483647"),
        (["--vary", "warps=2", "--vary", "warps=4"], "warps is varied twice: write all its values in one list"),
        (["--vary", "warps=2", "--set", "warps=4"], "warps is also set to one value: drop either"),
        (["--vary", "pipe.ex2=2", "--set-gpu", "pipe.ex2=4"], "gpu.pipe.ex2 is also set to one value"),
        (["--vary", "warps=2,4", "--trials", "0"], "trials is 0; it must be a whole number of at least 1"),
        (["--vary", "warps=2,4", "--max-candidates", "0"], "max-candidates is 0; it must be a whole number"),
        (["--vary", "warps=2,4", "--top", "0"], "top is 0; it must be a whole number of at least 1"),
        (["--vary", "warps=2,4", "--seed", "-1"], "seed is -1; it must be from 0 to"),
        (["--vary", "warps=2,4", "--jobs", "0"], "jobs is 0; it must be a whole number of at least 1"),
        (["--vary", "warps=2,4", "--engine", "slow"], "engine 'slow' is unknown"),
        (["--vary", "warps=2,4", "--clock", "fast"], "clock is 'fast'; give MHz"),
        (["--vary", "warps=2,4", "--heatmap", "warps", "x.png"], "--heatmap got 'warps'; it takes two of the varied fields"),
        (["--vary", "warps=2,4", "--heatmap", "warps,block_q", "x.png"], "--heatmap got 'warps,block_q'; it takes two of"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    assert words in sentence(*args)


def test_an_unwritable_picture_costs_the_picture_not_the_table(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "heat.png"
    done = run(*VARIED, "--heatmap", "block_kv,warps", str(path))
    assert done.exit_code == 2
    assert "best by time" in done.stdout
    assert done.stderr.strip() == f"flashsim: cannot write {path}: no such file or directory; choose another path for --heatmap"


@pytest.mark.parametrize(
    ("library", "args", "words"),
    [
        ("pyarrow", ["-o", "x.parquet"], "a sweep file needs pyarrow, which is not installed: pip install 'flashsim[explore]'"),
        ("optuna", ["--trials", "1"], "--trials needs optuna, which is not installed: pip install 'flashsim[explore]'"),
        ("distributed", ["--dask", "tcp://127.0.0.1:1"], "--dask needs distributed, which is not installed"),
        ("matplotlib", ["--heatmap", "block_q,warps", "x.png"], "--heatmap needs matplotlib, which is not installed"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    library: str, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without(library), *sys.meta_path])
    assert words in sentence(*VARIED, *args)


class _Without:
    """An import system in which one library is not installed."""

    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.library)
