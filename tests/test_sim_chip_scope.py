"""Chip scope: both engines agree on it, it agrees with SM scope where all SMs are alike, and says why where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from machines import chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim import fast_engine, reference_engine
from flashsim.sim.engine import CHIP_RATE, HBM_RATE, Job, make_job
from flashsim.sim.fast_lru import HBM_READ, HBM_WRITE, L2_READ, RESIDENT
from flashsim.sim.predict import Result, simulate
from flashsim.sim.residency import Residency

ALL_SCHEDULES = list(SCHEDULES)
SMALL = 200_000  # bytes of L2, so that tiles have to leave


def jobs(name: str, *, causal: bool, capacity: int | None, sms: int = 4) -> list[Job]:
    """The schedule's kernels on ``sms`` SMs that share an L2 of ``capacity`` bytes, each as the one before left L2."""
    gpu = load_gpu(chip_for(name))
    attention = Attention(batch=1, heads_q=6, heads_kv=3, seqlen_q=300, seqlen_kv=260, head_dim=64, causal=causal)
    programs = get_schedule(name).lower(gpu, attention)
    residency = Residency(programs, capacity or int(gpu.l2.resident_bytes))
    out = []
    for program in programs:
        job = make_job(
            program, gpu, clock_mhz=1500.0, slots=1, queue=np.arange(len(program.tiles)), shares=sms,
            miss_ppm=np.zeros(len(program.tensors)), hbm_bytes_per_s=2e12, l2=residency.shared(program),
        )  # fmt: skip
        out.append(replace(job, sms=sms))
        residency.leave(fast_engine.run(out[-1]).l2)
    return out


@pytest.mark.parametrize("capacity", [None, SMALL])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_engines_agree_on_a_chip(name: str, capacity: int | None) -> None:
    """Event by event (records), and in every total with the memo at work."""
    for job in jobs(name, causal=name in ("fa3", "triton"), capacity=capacity):
        for limit in (0, 10_000):
            each = replace(job, record_limit=limit)
            assert fast_engine.run(each).differences(reference_engine.run(each)) == []


def test_what_l2_cannot_hold_is_read_again() -> None:
    large, small = (fast_engine.run(jobs("fa2", causal=False, capacity=capacity)[0]) for capacity in (None, SMALL))
    assert small.traffic[:, HBM_READ].sum() > large.traffic[:, HBM_READ].sum()
    assert small.traffic[:, HBM_WRITE].sum() > large.traffic[:, HBM_WRITE].sum() == 0
    assert (small.traffic[:, L2_READ] == large.traffic[:, L2_READ]).all()
    assert small.l2[:, RESIDENT].sum() <= SMALL


@pytest.mark.parametrize("rate", [CHIP_RATE, HBM_RATE])
def test_sms_wait_for_each_other_at_l2_and_hbm(rate: int) -> None:
    (job,) = jobs("fa2", causal=False, capacity=SMALL)
    slower = job.rate.copy()
    slower[rate, 0] *= 1000
    assert fast_engine.run(replace(job, rate=slower)).ticks > 1.2 * fast_engine.run(job).ticks


def test_dynamic_ctas_take_the_next_tile_and_static_ones_their_own() -> None:
    (job,) = jobs("fa3", causal=True, capacity=None)
    assert job.persistent
    assert job.dynamic
    static = fast_engine.run(replace(job, dynamic=False)).ctas
    assert (static[:, 1] == np.arange(len(job.queue)) % job.sms).all()
    dynamic = fast_engine.run(job).ctas
    assert sorted(dynamic[:, 0]) == sorted(job.queue)
    assert dynamic[:, 4].max() <= static[:, 4].max()


SHAPES: dict[str, dict[str, Any]] = {
    "fa3": {"batch": 1, "heads_q": 33, "seqlen_q": 8192, "head_dim": 128},  # 2112 tiles: 16 a SM
    "fa2": {"batch": 1, "heads_q": 33, "seqlen_q": 2048, "head_dim": 128},  # 528 tiles: two waves of two CTAs an SM
}


def scopes(name: str, **shape: Any) -> tuple[Result, Result]:
    schedule, gpu, attention = get_schedule(name), load_gpu("h100"), Attention(**shape)
    sm, chip = (simulate(schedule, gpu, attention, scope=scope, clock="boost") for scope in ("sm", "chip"))
    return sm, chip


@pytest.mark.parametrize("name", list(SHAPES))
def test_scopes_agree_where_waves_are_full(name: str) -> None:
    sm, chip = scopes(name, **SHAPES[name])
    assert chip.cycles == pytest.approx(sm.cycles, rel=0.02)
    assert chip.scope == "chip"
    assert not any(note.startswith("tail") for note in chip.notes)
    assert chip.instructions == sm.instructions


def test_131_132_and_133_ctas() -> None:
    """One CTA more than SMs needs a second wave, in which 131 SMs are idle; one less leaves one idle. The result says so.

    The second wave takes what the first does but for the launch and its start (H200: 83,400 cycles after 92,300).
    """
    chips = {}
    for ctas in (131, 132, 133):
        _, chips[ctas] = scopes("fa3", batch=1, heads_q=ctas, heads_kv=1, seqlen_q=128, seqlen_kv=4096, head_dim=128)
        assert len(chips[ctas].launches[0].run.ctas) == ctas
    assert chips[131].cycles == pytest.approx(chips[132].cycles, rel=0.02)
    assert 1.85 * chips[132].cycles < chips[133].cycles < 1.95 * chips[132].cycles
    assert any("133 CTAs, 1.01 waves" in note and note.startswith("tail: SMs have ended 4") for note in chips[133].notes)
    assert not any(note.startswith("tail") for note in (*chips[131].notes, *chips[132].notes))


def test_short_tiles_gain_from_bursts_and_the_result_says_so() -> None:
    """A tile's first loads find L2 less busy than its fair share supposes, and with 16 K/V blocks a tile they tell."""
    sm, chip = scopes("fa3", batch=1, heads_q=33, seqlen_q=2048, head_dim=128)
    assert chip.cycles < 0.98 * sm.cycles
    gained = 100 * (1 - chip.launches[0].run.ticks / sm.launches[0].run.ticks)
    assert any(note.startswith(f"bursts: {gained:.0f} % faster") for note in chip.notes)


def test_the_last_wave_has_memory_for_itself() -> None:
    """133 CTAs that each read their own K and V: SM scope gives the last one a 132nd of HBM, on the chip it has all of it."""
    sm, chip = scopes("fa3", batch=1, heads_q=133, seqlen_q=128, seqlen_kv=4096, head_dim=128)
    assert chip.cycles < 0.8 * sm.cycles
    assert {note.split(":")[0] for note in chip.notes} >= {"tail", "bursts"}


def test_a_chip_says_what_l2_did_not_hold() -> None:
    gpu = load_gpu("h100").replace_number("l2.resident_bytes", 2e6)
    attention = Attention(batch=1, heads_q=33, seqlen_q=1024, head_dim=128)
    result = simulate(get_schedule("fa2"), gpu, attention, scope="chip", clock="boost")
    assert any(note.startswith("L2 overflow: HBM is read") for note in result.notes)


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="scope 'gpc' is unknown; choose one of sm, chip"):
        simulate(get_schedule("fa2"), load_gpu("h100"), Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=64), scope="gpc")
