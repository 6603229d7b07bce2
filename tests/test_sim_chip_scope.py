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
from flashsim.sim.engine import CHIP_RATE, HBM_RATE, Job
from flashsim.sim.fast_lru import DIRTY, HBM_READ, HBM_WRITE, L2_READ, RESIDENT
from flashsim.sim.fast_share import SM_BITS
from flashsim.sim.predict import Result, simulate
from flashsim.sim.pricing import MOST_SMS, make_job
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


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_hbm_serves_what_is_counted(name: str) -> None:
    """However many SMs ask for parts of a tile, whole tiles are moved, once."""
    for job in jobs(name, causal=name in ("fa3", "triton"), capacity=None):
        run = fast_engine.run(job)
        assert job.l2 is not None
        written = run.l2[:, RESIDENT] * (run.l2[:, DIRTY] - job.l2.tiles[:, DIRTY])
        moved = run.traffic[:, HBM_READ].sum() + written.sum()
        served = run.shared[:, 2].sum() * job.rate[HBM_RATE, 1] / job.rate[HBM_RATE, 0]
        assert run.traffic[:, HBM_WRITE].sum() == 0
        assert served == pytest.approx(moved, rel=0.01)


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


#: Full waves of tiles of one size: schedule, chip, head_dim, keys, heads, number of waves.
FULL = [
    ("fa3", "h200", 128, 256, 66, 1),
    ("fa3", "h200", 128, 256, 264, 4),
    ("fa3", "h200", 128, 512, 33, 1),
    ("fa3", "h200", 128, 512, 132, 4),
    ("fa3", "h200", 128, 1024, 33, 2),
    ("fa3", "h200", 128, 2048, 33, 4),
    ("fa3", "h200", 64, 768, 33, 1),
    ("fa3", "h200", 64, 1536, 33, 2),
    ("fa3", "h200", 64, 3072, 33, 4),
    ("fa3", "h200", 256, 256, 66, 1),
    ("fa3", "h200", 256, 512, 132, 4),
    ("fa3", "h200", 256, 1024, 33, 2),
    ("fa3", "h100", 128, 4096, 33, 8),
    ("fa2", "h200", 128, 256, 132, 1),
    ("fa2", "h200", 128, 256, 264, 2),
    ("fa2", "h200", 128, 512, 66, 1),
    ("fa2", "h200", 128, 512, 132, 2),
    ("fa2", "h200", 128, 1024, 33, 1),
    ("fa2", "h200", 128, 2048, 33, 2),
    ("fa3", "h200", 64, 384, 66, 1),
    ("fa3", "h200", 64, 384, 264, 4),
    ("fa2", "h200", 64, 256, 132, 1),
    ("fa2", "h200", 64, 384, 176, 2),
    ("fa2", "h200", 64, 512, 264, 4),
    ("fa2", "h200", 64, 1024, 66, 2),
    ("fa2", "h200", 256, 256, 66, 1),
    ("fa2", "h200", 256, 512, 66, 2),
    ("fa2", "h200", 256, 512, 132, 4),
    ("fa2", "h200", 256, 1024, 33, 2),
    ("fa2", "a100-80gb", 64, 1024, 54, 2),
    ("triton", "h200", 64, 512, 132, 4),
    ("triton", "h200", 128, 1024, 66, 4),
    ("fa4", "b200", 128, 256, 148, 1),
    ("fa4", "b200", 128, 256, 592, 4),
    ("fa4", "b200", 128, 1024, 148, 4),
    ("fa4", "b200", 64, 1024, 148, 4),
    ("gluon", "b200", 128, 512, 148, 2),
    ("gluon", "b200", 128, 1024, 148, 4),
    ("gluon", "b200", 64, 2048, 37, 2),
]

#: Waves in which every head's last tile has fewer rows: its SMs end early and leave memory to the others, which are faster by it
#: ("bursts") or take other turns ("phases"). The last number: chip scope against SM scope in per cent, of which sign and at most.
UNEVEN = [
    ("fa3", "h200", 64, 256, 132, 2, -5),
    ("gluon", "b200", 64, 384, 74, 1, 4),
]


def scopes(name: str, chip: str = "h100", **shape: Any) -> tuple[Result, Result]:
    schedule, gpu, attention = get_schedule(name), load_gpu(chip), Attention(batch=1, **shape)
    sm, whole = (simulate(schedule, gpu, attention, scope=scope, clock="boost") for scope in ("sm", "chip"))
    return sm, whole


@pytest.mark.parametrize(("name", "chip", "head_dim", "seqlen", "heads", "waves"), FULL)
def test_scopes_agree_where_waves_are_full(name: str, chip: str, head_dim: int, seqlen: int, heads: int, waves: int) -> None:
    """For tiles of two K/V blocks as for long ones: what all SMs ask for at once they get evenly."""
    sm, whole = scopes(name, chip, heads_q=heads, seqlen_q=seqlen, head_dim=head_dim)
    assert sm.launches[0].dispatch.waves == waves
    assert whole.cycles == pytest.approx(sm.cycles, rel=0.02)
    assert whole.scope == "chip"
    assert {note.split(":")[0] for note in whole.notes} <= {"full waves", "tail"}
    assert whole.instructions == sm.instructions


@pytest.mark.parametrize(("name", "chip", "head_dim", "seqlen", "heads", "waves", "most"), UNEVEN)
def test_where_scopes_do_not_agree_the_result_says_so(
    name: str, chip: str, head_dim: int, seqlen: int, heads: int, waves: int, most: int
) -> None:
    sm, whole = scopes(name, chip, heads_q=heads, seqlen_q=seqlen, head_dim=head_dim)
    assert sm.launches[0].dispatch.waves == waves
    differs = 100 * (whole.cycles / sm.cycles - 1)
    assert 2 < abs(differs) < abs(most)
    assert differs * most > 0
    longer = whole.launches[0].run.ticks / sm.launches[0].run.ticks - 1
    said = f"bursts: {-100 * longer:.0f} % faster" if most < 0 else f"phases: {100 * longer:.0f} % slower"
    assert any(note.startswith(f"{said} than SM scope") for note in whole.notes)
    assert any(note.startswith("tail: SMs have ended") for note in whole.notes)


def test_131_132_and_133_ctas() -> None:
    """One CTA more than SMs needs a second wave, in which 131 SMs are idle; one less leaves one idle. The result says so.

    The second wave takes what the first does but for the launch and its start (H200: 83,400 cycles after 92,300).
    """
    chips = {}
    for ctas in (131, 132, 133):
        _, chips[ctas] = scopes("fa3", heads_q=ctas, heads_kv=1, seqlen_q=128, seqlen_kv=4096, head_dim=128)
        assert len(chips[ctas].launches[0].run.ctas) == ctas
    assert chips[131].cycles == pytest.approx(chips[132].cycles, rel=0.02)
    assert 1.85 * chips[132].cycles < chips[133].cycles < 1.95 * chips[132].cycles
    assert any("133 CTAs, 1.01 waves" in note and note.startswith("tail: SMs have ended 4") for note in chips[133].notes)
    assert not any(note.startswith("tail") for note in (*chips[131].notes, *chips[132].notes))


def test_the_last_wave_has_memory_for_itself() -> None:
    """133 CTAs that each read their own K and V: SM scope gives the last one a 132nd of HBM, on the chip it has all of it."""
    sm, chip = scopes("fa3", heads_q=133, seqlen_q=128, seqlen_kv=4096, head_dim=128)
    assert chip.cycles < 0.9 * sm.cycles
    gained = 100 * (1 - chip.launches[0].run.ticks / sm.launches[0].run.ticks)
    assert any(note.startswith(f"bursts: {gained:.0f} % faster") for note in chip.notes)
    assert {note.split(":")[0] for note in chip.notes} >= {"tail", "bursts"}


def test_a_chip_says_what_l2_did_not_hold() -> None:
    gpu = load_gpu("h100").replace_number("l2.resident_bytes", 2e6)
    attention = Attention(batch=1, heads_q=33, seqlen_q=1024, head_dim=128)
    result = simulate(get_schedule("fa2"), gpu, attention, scope="chip", clock="boost")
    assert any(note.startswith("L2 overflow: HBM is read") for note in result.notes)


def test_an_unknown_scope_is_refused() -> None:
    with pytest.raises(ValueError, match="scope 'gpc' is unknown; choose one of sm, chip"):
        simulate(get_schedule("fa2"), load_gpu("h100"), Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=64), scope="gpc")


def test_more_sms_than_the_engine_tells_apart_are_refused() -> None:
    assert MOST_SMS == 1 << SM_BITS
    gpu = load_gpu("h200")
    more = gpu.model_copy(update={"sm": gpu.sm.model_copy(update={"count": MOST_SMS + 1})})
    with pytest.raises(ValueError, match=r"chip scope runs at most 4096 SMs, and sm\.count is 4097: lower it"):
        simulate(get_schedule("fa2"), more, Attention(batch=1, heads_q=1, seqlen_q=256, head_dim=64), scope="chip")
