"""Explore: a sweep's rows, what they say, large spaces, and where the rows are computed."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from small_sweeps import FA2, GPU, GRID, VARIED, answer, rows_of, sentence, sweep_of

from flashsim.model.schedules import get_schedule
from flashsim.sim import explore as explore_module
from flashsim.sim.explore import MAX_CANDIDATES, Row, candidate, evaluate, explore, planned
from flashsim.sim.findings import heat_map, pareto, ranked, reasons, report
from flashsim.sim.space import parse_space
from flashsim.sim.workers import ALONE, MOST_TOGETHER, Died, Inline, Workers, _size, _Source, local


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


def test_short_neighbours_share_a_call() -> None:
    """One by one until it is known how long they take, then as many as take TOGETHER_S; each is answered once."""
    calls: list[int] = []

    class Counts(Inline):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            calls.append(len(args[1]))
            return super().submit(fn, *args, **kwargs)

    workers = Workers(start=Counts, width=2)
    answers = list(workers.answers(abs, range(-1000, 0), family=abs))
    assert sorted(answers) == [(i, -i) for i in range(-1000, 0)]
    assert calls[: workers.window] == [1] * workers.window
    assert max(calls) == MOST_TOGETHER
    assert sum(calls) == 1000
    calls.clear()
    assert dict(workers.answers(abs, [-1, -2, -3])) == {-1: 1, -2: 2, -3: 3}
    assert calls == [1, 1, 1]


def test_slow_neighbours_do_not_wait_for_each_other() -> None:
    """So many as take TOGETHER_S, and no more than twice as many as the call before: that one may have been of pruned ones."""
    cases = ((1, 10), (1, 0.2), (1, 0.1), (10, 0.11), (1, 1e-9), (4, 1e-9), (30, 1e-9))
    assert [_size(*case) for case in cases] == [1, 1, 1, 9, 2, 8, MOST_TOGETHER]


def test_families_share_a_call() -> None:
    source = _Source(range(18), lambda item: item // 3)
    assert source.draw(1) == (0,)  # how long they take is not known
    assert [source.draw(2) for _ in range(3)] == [(1, 2), (3, 4, 5), (6, 7, 8)]
    assert source.draw(4) == (9, 10, 11, 12, 13, 14)
    assert [source.draw(2), source.draw(2)] == [(15, 16, 17), ()]
    endless = _Source(range(9), lambda item: 0)
    assert [endless.draw(2), endless.draw(2), endless.draw(2)] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    alone = _Source(range(3), None)
    assert [alone.draw(2), alone.draw(2)] == [(0, 1), (2,)]


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
