"""The clock: caps are respected, power only ever lowers it, and more work per cycle never raises it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashsim.model.gpu import GPU, GPUS, load_gpu
from flashsim.model.instructions import INSTRUCTIONS, Path
from flashsim.sim.clock import Clock, picojoules, sustained, voltage

ALL_GPUS = list(GPUS)
CYCLES = 1e6
PER_SM_CYCLE = {"hmma": 0.6, "ffma": 2.0, "ex2": 0.4, "ldsm": 0.2}  # a busy kernel
AS_BUSY_AS_IT_GETS = 1.6  # times that: a chip cannot issue more


def work(gpu: GPU, factor: float = 1.0, **per_sm_cycle: float) -> dict[str, Any]:
    """Counts and bytes of a launch of CYCLES cycles that issues so many instructions an SM and cycle."""
    mix = per_sm_cycle or PER_SM_CYCLE
    cycles_of_all = CYCLES * float(gpu.sm.count)
    tensor = float(gpu.sm.tensor_flop_per_clk) / 4096  # a chip with half the tensor rate issues half the HMMA
    counts = {name: int(n * factor * cycles_of_all * (tensor if name == "hmma" else 1)) for name, n in mix.items()}
    moved = int(factor * cycles_of_all)
    return {"cycles": CYCLES, "counts": counts, "bytes_": {"smem": 60 * moved, "l2_sm": 8 * moved, "hbm": moved}}


def at(gpu: GPU, cap: float, factor: float = 1.0, **mix: float) -> Clock:
    return sustained(gpu, **work(gpu, factor, **mix), cap_mhz=cap)


@pytest.mark.parametrize("name", ALL_GPUS)
@given(factors=st.tuples(st.floats(0, AS_BUSY_AS_IT_GETS), st.floats(0, AS_BUSY_AS_IT_GETS)), cap=st.floats(300, 2000))
def test_more_work_per_cycle_never_raises_the_clock(name: str, factors: tuple[float, float], cap: float) -> None:
    gpu = load_gpu(name)
    less, more = (at(gpu, cap, factor).mhz for factor in sorted(factors))
    assert more <= less * (1 + 1e-9)


@pytest.mark.parametrize("kind", [name for name, row in INSTRUCTIONS.items() if row.counter != "none"])
def test_each_kind_of_instruction_costs_power(kind: str) -> None:
    gpu = load_gpu("b200" if INSTRUCTIONS[kind].path == Path.TCGEN05 else "h200")
    idle, busy = (picojoules(gpu, {kind: n}, {}) for n in (0, 1000))
    assert (idle, busy > 0) == (0, True)


def test_a_stall_costs_nothing() -> None:
    """Nothing is executed in it: it is the one row that no pipe counts."""
    assert [name for name, row in INSTRUCTIONS.items() if row.counter == "none"] == ["stall"]
    assert all(picojoules(load_gpu(name), {"stall": 1000}, {}) == 0 for name in ALL_GPUS)


@pytest.mark.parametrize("kind", [name for name, row in INSTRUCTIONS.items() if row.columns])
def test_a_product_costs_its_columns(kind: str) -> None:
    row = INSTRUCTIONS[kind]
    gpu = load_gpu("b200" if row.path == Path.TCGEN05 else "h200")
    section = gpu.tcgen05 or gpu.wgmma
    assert section is not None
    assert picojoules(gpu, {kind: 10}, {}) == pytest.approx(10 * row.columns * float(section.pj_per_column))


@pytest.mark.parametrize("kind", ["smem", "l2_sm", "hbm"])
def test_each_byte_costs_power(kind: str) -> None:
    gpu = load_gpu("h200")
    energy = float(getattr(gpu.power, {"smem": "smem", "l2_sm": "l2", "hbm": "hbm"}[kind] + "_pj_per_byte"))
    assert picojoules(gpu, {}, {kind: 1000}) == pytest.approx(1000 * energy)


@pytest.mark.parametrize("name", ALL_GPUS)
@given(factor=st.floats(0, AS_BUSY_AS_IT_GETS), cap=st.floats(100, 2000))
def test_cap_and_limit_are_respected(name: str, factor: float, cap: float) -> None:
    gpu = load_gpu(name)
    clock = at(gpu, cap, factor)
    assert 0 < clock.mhz <= cap
    limit = float(gpu.power.limit_w * gpu.power.regulated_share)
    assert clock.watts <= limit * (1 + 1e-6)
    assert clock.watts >= gpu.power.idle_w


@pytest.mark.parametrize("name", ALL_GPUS)
def test_below_the_limit_the_cap_holds(name: str) -> None:
    gpu = load_gpu(name)
    for cap in (400.0, 1000.0, float(gpu.clock.boost_mhz)):
        clock = at(gpu, cap, 1e-3)
        assert clock.mhz == cap
        held = "the boost clock" if cap == gpu.clock.boost_mhz else "as capped"
        assert clock.rule == f"{held}; {clock.watts:.0f} of {gpu.power.limit_w:.0f} W"


@pytest.mark.parametrize("name", ALL_GPUS)
def test_the_power_limit_binds_and_says_so(name: str) -> None:
    gpu = load_gpu(name)
    boost = float(gpu.clock.boost_mhz)
    for cap, told in ((boost - 20, f"; cap {boost - 20:.0f}"), (boost, "")):
        clock = at(gpu, cap, 4.5, ffma=4.0, ex2=1.0)
        assert clock.mhz < cap
        assert clock.rule == f"power limit {gpu.power.limit_w:.0f} W{told}"
    assert clock.watts == pytest.approx(float(gpu.power.limit_w * gpu.power.regulated_share), rel=1e-3)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_busy_tensor_cores_hold_a_free_clock_below_boost(name: str) -> None:
    """A set clock at or under the tensor clock is left alone; a free one drops below it, the more the busier they are."""
    gpu = load_gpu(name).replace_number("power.limit_w", 1e5)  # power never binds
    boost, tensor = float(gpu.clock.boost_mhz), float(gpu.clock.tensor_peak_mhz)
    quiet, busy, busier = (at(gpu, boost, hmma=n) for n in (0.01, 0.3, 0.6))
    assert quiet.mhz == boost
    assert busier.mhz <= busy.mhz <= tensor < boost
    assert re.fullmatch(r"tensor cores at \d+ % of peak lower a free clock; \d+ of 100000 W", busy.rule)
    assert at(gpu, tensor, hmma=0.6).mhz == tensor


@pytest.mark.parametrize("name", ALL_GPUS)
@given(mhz=st.tuples(st.floats(1, 3000), st.floats(1, 3000)))
def test_voltage_rises_with_the_clock_between_its_bounds(name: str, mhz: tuple[float, float]) -> None:
    gpu = load_gpu(name)
    boost, floor = float(gpu.clock.boost_mhz), float(gpu.power.voltage_floor)
    low, high = sorted(mhz)
    assert floor <= voltage(gpu, low) <= voltage(gpu, high)
    assert high > boost or voltage(gpu, high) <= 1 + 1e-12


@pytest.mark.parametrize("name", ALL_GPUS)
def test_voltage_at_its_corners(name: str) -> None:
    gpu = load_gpu(name)
    boost, floor = float(gpu.clock.boost_mhz), float(gpu.power.voltage_floor)
    assert voltage(gpu, boost) == pytest.approx(1)
    assert voltage(gpu, boost / 2) == pytest.approx(floor)
    assert voltage(gpu, boost / 4) == floor
    assert voltage(gpu, 0.75 * boost) == pytest.approx((1 + floor) / 2)
