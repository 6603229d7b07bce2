"""One call that answers: simulate(schedule, gpu, attention) -> Result."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..model.assumed import assumptions
from ..model.attention import Attention
from ..model.gpu import GPU, KINDS
from ..model.instructions import COUNTERS, INSTRUCTIONS, counters
from ..model.program import IntArray, Program
from ..model.rows import tabulated
from ..model.schedule import Schedule, lowered
from ..model.tiling import Occupancy, occupancy
from . import fast_engine
from .bounds import initiation_interval, unit_bounds
from .chip import Dispatch, Issued, chip_notes, dispatch, issued_bundles, strided, tile_work
from .clock import Clock, sustained
from .engine import GAP, PORT, STALLS, TICKS_PER_CYCLE, Engine, Job, Run
from .fast_lru import HBM_READ, HBM_WRITE, L2_READ, L2_WRITE
from .limiter import HOST_BOUND, limiter
from .pricing import at_clock, bundle_table, make_job
from .residency import Residency, Traffic


def _reference(job: Job) -> Run:
    from . import reference_engine  # SimPy is imported only where it runs

    return reference_engine.run(job)


ENGINES: dict[str, Engine] = {"fast": fast_engine.run, "simpy": _reference}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel of the schedule: its Program, what fits, how it was dispatched, its job and run, counts and bytes."""

    program: Program
    occupancy: Occupancy
    dispatch: Dispatch
    job: Job
    run: Run
    cycles: float
    counts: dict[str, int]
    traffic: Traffic
    clock: Clock
    bounds: dict[str, float]
    interval: dict[str, float]
    notes: tuple[str, ...] = ()

    @property
    def smem_bytes(self) -> int:
        return sum(n * INSTRUCTIONS[name].smem_bytes for name, n in self.counts.items())


@dataclass(frozen=True, kw_only=True)
class Result:
    """What happened. Cycles first; times carry the clock used. ``units``: busy share of the whole chip; ``stalls``: share of a
    warp's life by what it waited for; ``bytes``: the ledger; ``limiter``: what binds, in words. ``notes``: what the schedule
    assumes, and of chip scope why it may differ from SM scope."""

    schedule: str
    gpu: str
    attention: Attention
    launches: tuple[Launch, ...]
    cycles: float
    ms: float
    clock_mhz: float
    clock_rule: str
    tflops: float
    tflops_exact: float
    utilization: float
    units: dict[str, float]
    stalls: dict[str, float]
    bytes: dict[str, int]
    instructions: dict[str, int]
    bounds: dict[str, float]
    limiter: str
    provenance: dict[str, int]
    host_bound: bool
    counts_from: tuple[str, ...] = field(default=())
    scope: str = "sm"
    notes: tuple[str, ...] = ()

    @property
    def kernel_ms(self) -> float:
        """Of the kernels alone: without the host's launch path and the gaps between them, which ``ms`` has."""
        return self.cycles / self.clock_mhz / 1e3


SCOPES = ("sm", "chip")


@dataclass(frozen=True, kw_only=True)
class How:
    """How a launch is run: ``cap`` in MHz, whether power limits the clock below it, whether its numbers are FP16, and what
    :func:`simulate` was given."""

    engine: str
    scope: str
    cap: float
    limited: bool
    fp16: bool
    repeats: int
    flush_bytes: int
    record_limit: int


def simulate(
    schedule: Schedule,
    gpu: GPU,
    attention: Attention,
    *,
    engine: str = "fast",
    scope: str = "sm",
    clock: float | str = "power",
    repeats: int = 0,
    flush_bytes: int = 0,
    record_limit: int = 0,
) -> Result:
    """Predict ``schedule`` on ``gpu`` for ``attention``.

    ``engine``: "fast" or "simpy". ``scope``: "sm", the SM that ends last with its fair share of L2 and HBM, or "chip", every SM
    and what they share. ``clock``: MHz (a cap; the power limit still applies), "boost" (the boost clock whatever the power) or
    "power" (boost as the cap). ``repeats``: how many launches follow a rest and are averaged, as benchmarks do, the first of
    them before the power limit holds; 0: it holds. ``flush_bytes``: written before each launch to empty L2, as do_bench does,
    with events around each call (in ``ms``). ``record_limit``: events of a timeline. Raises ValueError with a sentence.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is unknown; choose one of {', '.join(ENGINES)}")
    if scope not in SCOPES:
        raise ValueError(f"scope {scope!r} is unknown; choose one of {', '.join(SCOPES)}")
    if flush_bytes < 0:
        raise ValueError(f"flush_bytes is {flush_bytes}; give what is written before each launch, or 0")
    if repeats < 0:
        raise ValueError(f"repeats is {repeats}; give how many launches follow a rest, or 0 for a load that has settled")
    how = How(
        engine=engine,
        scope=scope,
        cap=cap_mhz(gpu, clock),
        limited=clock != "boost",
        fp16=attention.dtype == "fp16",
        repeats=repeats,
        flush_bytes=flush_bytes,
        record_limit=record_limit,
    )
    programs = lowered(schedule, gpu, attention)
    residency = Residency(programs, int(gpu.l2.resident_bytes))
    chip = Residency(programs, int(gpu.l2.resident_bytes)) if scope == "chip" else None
    launches, dirty = [], 0
    for program in programs:
        fits = occupancy(gpu, program)
        slots = int(gpu.sm.count) * fits.ctas_per_sm
        traffic = residency.launch(program, slots)
        if program is programs[-1]:  # what is still dirty leaves for HBM after the kernel, and is its doing
            left = residency.flush()
            traffic, dirty = traffic + left, left.total(HBM_WRITE)
        launches.append(_launch(program, gpu, fits, traffic, how, chip))
    if chip is not None:
        left = chip.flush()
        launches[-1] = replace(launches[-1], traffic=launches[-1].traffic + left)
        dirty = left.total(HBM_WRITE)
    return _result(schedule, gpu, attention, tuple(launches), dirty, how)


def cap_mhz(gpu: GPU, clock: float | str) -> float:
    """The clock cap in MHz that ``clock`` asks for, at most the boost clock. Raises ValueError with what is allowed."""
    boost = float(gpu.clock.boost_mhz)
    if clock in ("boost", "power"):
        return boost
    if isinstance(clock, str) or not 100 <= clock <= boost:
        most = f"{boost:g} ({gpu.name}'s clock.boost_mhz)"
        raise ValueError(f"clock is {clock!r}; give MHz between 100 and {most}, boost or power")
    return float(clock)


def _launch(program: Program, gpu: GPU, fits: Occupancy, traffic: Traffic, how: How, chip: Residency | None) -> Launch:
    """Time one kernel. ``traffic``: what a replay found; with ``chip``, the L2 of chip scope, the run finds its own."""
    table = bundle_table(program, gpu)
    bundles = issued_bundles(program)
    counts = _instructions(program, bundles.total)
    issued = {name: n for name, n in counts.items() if n}
    order = _dispatched(program, gpu, fits, table, bundles)
    planned, hbm_rate = traffic, hbm_mix(gpu, traffic)
    mhz, mark = how.cap, Clock(mhz=how.cap, rule="", watts=0.0)

    rates = {"shares": order.shares(fits.ctas_per_sm), "hbm_bytes_per_s": hbm_rate}
    jobs: dict[str, Job] = {}

    def job_in(scope: str) -> Job:
        if scope in jobs:
            return at_clock(jobs[scope], program, gpu, clock_mhz=mhz, **rates)
        jobs[scope] = make_job(
            program, gpu, bundles=table, clock_mhz=mhz, slots=fits.ctas_per_sm,
            queue=order.queue if scope == "sm" else np.arange(len(program.tiles)), miss_ppm=planned.miss_ppm(program),
            l2=None if chip is None or scope == "sm" else chip.shared(program), record_limit=how.record_limit, **rates,
        )  # fmt: skip
        return jobs[scope]

    for scope in ("sm", how.scope):  # memory is in ns, SMs in cycles: the clock moves one against the other, so look twice
        job = job_in(scope)
        run = fast_engine.kept_run(job)
        notes: tuple[str, ...] = ()
        if chip is not None and scope == "chip":
            traffic, expected = chip.traffic(run.traffic).with_local(planned), fast_engine.kept_run(job_in("sm")).ticks
            notes = chip_notes(program, run, planned, traffic, slots=fits.ctas_per_sm, expected=expected)
        cycles = run.ticks / TICKS_PER_CYCLE + gpu.launch.ramp_cycles
        moved = _ledger(program, issued, traffic)
        mark = sustained(
            gpu, cycles=cycles, counts=issued, bytes_=moved, cap_mhz=how.cap, repeats=how.repeats, flush_bytes=how.flush_bytes,
            fp16=how.fp16,
        )  # fmt: skip
        if not how.limited:
            mark = Clock(mhz=how.cap, rule="the boost clock; power limit ignored", watts=mark.watts)
        if scope == how.scope and abs(mark.mhz - mhz) < 0.02 * mhz:
            break
        mhz = mark.mhz
    if how.engine != "fast":  # the clock was found with the fast engine; both give the same run
        run = ENGINES[how.engine](job)
    if chip is not None:
        chip.leave(run.l2)
    return Launch(
        program=program,
        occupancy=fits,
        dispatch=order,
        job=job,
        run=run,
        cycles=cycles,
        counts=counts,
        traffic=traffic,
        clock=mark,
        bounds=unit_bounds(table, bundles.total, gpu, mark.mhz, traffic, hbm_rate),
        interval=initiation_interval(program, table, fits.ctas_per_sm),
        notes=notes,
    )


def _dispatched(program: Program, gpu: GPU, fits: Occupancy, table: IntArray, bundles: Issued) -> Dispatch:
    """Who gets which tile, where CTAs share an SM's port: how much of it one uses when alone decides."""
    work = tile_work(bundles.kinds, table)[bundles.kind_of]
    if program.strided:
        return strided(work, sms=int(gpu.sm.count))
    gaps = (bundles.kinds @ table[:, GAP]) / max(1, program.warps)
    ports = (bundles.kinds @ table[:, PORT]) / 4
    alone = float(np.clip((ports / np.maximum(gaps, 1))[bundles.kind_of].mean(), 0.05, 1.0))
    return dispatch(work, sms=int(gpu.sm.count), slots=fits.ctas_per_sm, alone=alone)


def _instructions(program: Program, issued: Any) -> dict[str, int]:
    names, counts = tabulated(program.bundles)
    return dict.fromkeys(INSTRUCTIONS, 0) | dict(zip(names, (issued @ counts).tolist(), strict=True))


def hbm_mix(gpu: GPU, traffic: Traffic) -> float:
    """Achieved HBM bytes/s for this share of writes: read, copy and write rates, straight lines between."""
    read, written = traffic.total(HBM_READ), traffic.total(HBM_WRITE)
    share = written / max(1, read + written)
    hbm = gpu.hbm
    points = [float(hbm.read_bytes_per_s), float(hbm.copy_bytes_per_s), float(hbm.write_bytes_per_s)]
    return float(np.interp(share, [0.0, 0.5, 1.0], points))


def _ledger(program: Program, counts: dict[str, int], traffic: Traffic) -> dict[str, int]:
    read, written = traffic.total(HBM_READ), traffic.total(HBM_WRITE)
    issued = [(INSTRUCTIONS[name], n) for name, n in counts.items() if n]
    spilled = sum(n * kind.spill_bytes for kind, n in issued)
    from_sms = traffic.total(L2_READ) + traffic.total(L2_WRITE) + spilled
    return {
        "hbm_read": read,
        "hbm_write": written,
        "hbm": read + written,
        "l2_sm": from_sms,
        "l2": from_sms + read + written,  # what the profiler counts: the SMs' side and the fills and write-backs of HBM
        "smem": sum(n * kind.smem_bytes for kind, n in issued),
    }


def _result(schedule: Schedule, gpu: GPU, attention: Attention, launches: tuple[Launch, ...], dirty: int, how: How) -> Result:
    cycles = sum(x.cycles for x in launches)
    busy_ms = sum(x.cycles / x.clock.mhz / 1e3 for x in launches)
    gap_ms = max(0, len(launches) - 1) * gpu.launch.stream_us / 1e3 + (gpu.launch.events_us / 1e3 if how.flush_bytes else 0.0)
    host_ms = float(getattr(schedule, "host_ops", len(launches))) * gpu.launch.host_op_us / 1e3
    host_bound = host_ms > busy_ms + gap_ms
    ms = max(busy_ms + gap_ms, host_ms)
    mhz = cycles / busy_ms / 1e3
    bounds: dict[str, float] = {}
    bytes_ = dict.fromkeys(("hbm_read", "hbm_write", "l2", "l2_sm", "smem"), 0)
    instructions = dict.fromkeys((*COUNTERS, "total"), 0)
    stalls = dict.fromkeys(STALLS, 0.0)
    for x in launches:
        ledger = _ledger(x.program, x.counts, x.traffic)
        for name in bytes_:
            bytes_[name] += ledger[name]
        for name, n in counters(x.counts).items():
            instructions[name] += n
        for name, bound in x.bounds.items():
            bounds[name] = bounds.get(name, 0.0) + bound
        life = x.run.stalls[:, _working(x.program)].mean(axis=(0, 1)) / max(1, x.run.ticks * x.job.slots)
        for name, share in zip(STALLS, life, strict=True):
            stalls[name] += float(share) * x.cycles / cycles
    bytes_["dirty_left"] = dirty  # part of hbm_write that is still in L2 at the end: a profiler's counter has not seen it leave
    units = {name: bound / cycles for name, bound in bounds.items()}
    summary = {"max_of_units": max(bounds.values()), "sum_of_units": sum(v for k, v in bounds.items() if k != "port"), **bounds}
    summary |= max(launches, key=lambda x: x.cycles).interval
    peak = peak_flops(gpu, mhz)
    return Result(
        schedule=schedule.name,
        gpu=gpu.name,
        attention=attention,
        launches=launches,
        cycles=cycles,
        ms=ms,
        clock_mhz=mhz,
        clock_rule=_clock_rule(launches),
        tflops=attention.flops() / ms / 1e9,
        tflops_exact=attention.flops("exact") / ms / 1e9,
        utilization=attention.flops() / ms * 1e3 / peak,
        units=units,
        stalls=stalls,
        bytes=bytes_,
        instructions=instructions,
        bounds=summary,
        limiter=HOST_BOUND if host_bound else limiter(units, stalls, launches, gpu),
        provenance=provenance(gpu),
        host_bound=host_bound,
        scope=how.scope,
        notes=(*assumptions(schedule, gpu, attention), *(note for x in launches for note in x.notes)),
        counts_from=tuple(dict.fromkeys(x.program.profile for x in launches)),
    )


def _clock_rule(launches: tuple[Launch, ...]) -> str:
    """The rule behind the one clock that is told; where kernels run at several, whose it is."""
    rule = max(launches, key=lambda x: x.cycles).clock.rule
    alike = all(x.clock.rule == rule for x in launches)
    return rule if alike else f"mean of {len(launches)} kernels; the longest: {rule}"


def _working(program: Program) -> list[int]:
    """The CTA's warps that compute; those that only fetch for them wait most of their life, and that tells nothing."""
    working = {s.role for s in program.statements if s.kind in ("exp2", "lane_exp2", "mma", "wgmma", "umma", "row_max")}
    roles = [i for i, role in enumerate(program.roles) for _ in range(role.warps)]
    return [warp for warp, role in enumerate(roles) if role in working or not working]


def peak_flops(gpu: GPU, mhz: float) -> float:
    """Dense 16-bit tensor peak of the datasheet, scaled from its clock to ``mhz``."""
    return float(gpu.sm.count * gpu.sm.tensor_flop_per_clk * mhz * 1e6)


def provenance(gpu: GPU) -> dict[str, int]:
    """How many of the chip's numbers are of each kind."""
    kinds = Counter(number.kind for _, number in gpu.numbers())
    return {kind: kinds[kind] for kind in KINDS}
