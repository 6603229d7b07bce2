"""What an error means in words: a measurement against its prediction, and against the most that the chip could do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..model.gpu import GPU
from ..sim.clock import TENSOR_ACTIVE, highest_mhz, tensor_share
from ..sim.limiter import UNIT_WORDS
from ..sim.predict import Result, peak_flops

CLOSE_PCT = 10.0
#: A word of ``Result.limiter`` -> what would make the measured kernel slower than that limit.
LOOK_FOR = (
    ("parallelism", "a smaller grid, or CTAs that start late"),
    ("launch path", "host time between kernels: more framework calls, no CUDA graph"),
    ("latency", "exposed waits: fewer loads in flight, more barriers, fewer CTAs per SM"),
    ("HBM", "more HBM bytes than the ledger's: spills, an L2 that does not hold K and V"),
    ("L2", "more L2 bytes than the ledger's, or tiles smaller than modelled"),
    ("shared-memory", "bank conflicts, or tiles loaded more often"),
    ("", "instructions beside the modelled ones, register spills, or a lower clock"),
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What one unit alone needs of a launch, in ms or cycles; ``mhz``: the highest clock that the SMs can have."""

    least: float
    unit: str
    mhz: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What of a ``Result`` is compared: small, so that it travels between processes. ``bounds``: by "ms" and "cycles";
    ``peak_tflops``: of the datasheet's tensor cores for this type."""

    ms: float
    cycles: float
    tflops: float
    limiter: str
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    peak_tflops: float = 0.0


def prediction(result: Result, gpu: GPU, cap_mhz: float) -> Prediction:
    """``cap_mhz``: the clock that the SMs were allowed."""
    return Prediction(
        ms=result.ms, cycles=result.cycles, tflops=result.tflops, limiter=result.limiter, bounds=_bounds(result, gpu, cap_mhz),
        peak_tflops=peak_tflops(gpu, result.attention.dtype),
    )  # fmt: skip


def peak_tflops(gpu: GPU, dtype: str) -> float:
    """Dense tensor peak of the datasheet; FP8 has twice the rate of 16 bits."""
    return peak_flops(gpu, float(gpu.clock.tensor_peak_mhz)) / 1e12 * (2 if dtype == "fp8" else 1)


def _bounds(result: Result, gpu: GPU, cap_mhz: float) -> dict[str, Bound]:
    """The busiest unit's need in cycles, and in ms at the highest clock under the cap, which shortens no transfer of HBM's."""
    busy = all(tensor_share(gpu, cycles=x.cycles, counts=x.counts) > TENSOR_ACTIVE for x in result.launches)
    mhz = max(result.clock_mhz, highest_mhz(gpu, cap_mhz, tensor=busy))
    cycles = {unit: share * result.cycles for unit, share in result.units.items()}
    ms = {unit: n / (result.clock_mhz if unit == "hbm" else mhz) / 1e3 for unit, n in cycles.items()}
    unit, longest = (max(each, key=lambda name: each[name]) for each in (cycles, ms))
    return {"cycles": Bound(least=cycles[unit], unit=unit, mhz=mhz), "ms": Bound(least=ms[longest], unit=longest, mhz=mhz)}


def verdict(error_pct: float, prediction: Prediction, given: str = "ms") -> str:
    """The error in words: as predicted, slower than predicted and what to look for, or faster than predicted or than possible.

    ``given``: the unit that the measurement was given in, ms, tflops or cycles; amounts are told in it. With the bound, where
    the prediction has one.
    """
    bound = prediction.bounds.get(_timed(given))
    measured = getattr(prediction, _timed(given)) / (1 + error_pct / 100)
    if bound is not None and measured < bound.least:
        at = "" if bound.unit == "hbm" or given == "cycles" else f" at {bound.mhz:,.0f} MHz"
        return f"faster than the hardware allows this kernel: {_most(prediction, bound, given)}{at}; check the row"
    ending = f"; {_most(prediction, bound, given)}" if bound is not None else ""
    if abs(error_pct) <= CLOSE_PCT:
        return f"as predicted (within {CLOSE_PCT:.0f} %){ending}"
    far = f"by more than {CLOSE_PCT:.0f} %"
    if error_pct > 0:
        return f"faster than predicted {far}: the model misses something or the clock was higher{ending}"
    hint = next(hint for word, hint in LOOK_FOR if word in prediction.limiter)
    told = amount(getattr(prediction, given), given)
    return f"slower than predicted {far}: predicted {told}, bound by {prediction.limiter}; look for {hint}{ending}"


def _timed(given: str) -> str:
    """Errors are of times: a rate's is that of the time it stands for."""
    return "cycles" if given == "cycles" else "ms"


def _most(prediction: Prediction, bound: Bound, given: str) -> str:
    """The bound as "at most 974 TFLOP/s: the tensor cores"."""
    unit = UNIT_WORDS[bound.unit].partition(" (")[0]
    if given == "tflops":
        return f"at most {amount(prediction.tflops * prediction.ms / bound.least, given)}: {unit}"
    return f"at least {amount(bound.least, given)}: {unit}"


def amount(value: float, given: str) -> str:
    """A measured or predicted amount with its unit."""
    return {"cycles": f"{value:,.0f} cycles", "tflops": f"{value:,.4g} TFLOP/s"}.get(given, f"{value:.4g} ms")
