"""A chip file's number: a value with its unit, its kind (datasheet, measured, derived, assumed) and its source."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

KINDS = ("datasheet", "measured", "derived", "assumed")
MAX_FLOAT = sys.float_info.max
#: What no chip comes near, smallest (zero aside) and largest: within it ticks fit 64 bits, arrays of SMs fit memory and seconds,
#: and watts can be told.
LIMITS = {
    "count": (1, 1e6), "cycles": (0, 1e9), "ns": (0, 1e9), "us": (0, 1e9), "ms": (0, 1e9), "MHz": (1, 1e6),
    "bytes/clk": (1e-3, 1e12), "bytes/s": (1e3, 1e18), "W": (1e-3, 1e6), "pJ": (0, 1e6), "ratio": (1e-3, 1e3),
}  # fmt: skip

#: What cannot be more than what it is a part of.
PARTS = {
    **{f"hbm.{rate}_bytes_per_s": "hbm.peak_bytes_per_s" for rate in ("read", "write", "copy")},
    "l2.resident_bytes": "l2.size_bytes",
}
#: Numbers that are told and enter no prediction, and which do in their place.
TOLD = {
    "hbm.peak_bytes_per_s": "read_, write_ and copy_bytes_per_s do", "hbm.size_bytes": "no problem is held against it",
    "l2.size_bytes": "resident_bytes does", "launch.cta_dispatch_ns": "second_cta_cycles and cta_replace_cycles do",
    "async.tma_issue_cycles": "port.control does", "tcgen05.latency_a_tmem_cycles": "latency_cycles does",
    "tcgen05.pair_latency_a_tmem_cycles": "pair_latency_cycles does",
}  # fmt: skip


class Sourced(float):
    """A number with its unit, its kind (datasheet, measured, derived, assumed) and its source."""

    unit: str
    kind: str
    source: str

    def __new__(cls, value: float, *, unit: str, kind: str, source: str) -> Sourced:
        number = super().__new__(cls, value)
        number.unit, number.kind, number.source = unit, kind, source
        return number

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, str]]:
        """What copy and pickle (worker processes) make the number anew from."""
        return (float(self),), {"unit": self.unit, "kind": self.kind, "source": self.source}


def _number(unit: str, *, zero: bool = False) -> Callable[[Any], Sourced]:
    def parse(raw: Any) -> Sourced:
        if isinstance(raw, Sourced):
            return raw
        if not isinstance(raw, dict):
            raise ValueError(f'got {raw!r}; write {{ value = ..., unit = "{unit}", kind = ..., source = ... }}')
        unknown = set(raw) - {"value", "unit", "kind", "source"}
        if unknown:
            raise ValueError(f"has the unknown key {sorted(unknown)[0]!r}; allowed are value, unit, kind and source")
        for key in ("value", "unit", "kind", "source"):
            if key not in raw:
                raise ValueError(f"has no {key}; a number needs value, unit, kind and source")
        value = raw["value"]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ValueError(f"has the value {value!r}; it must be a number")
        if abs(value) > MAX_FLOAT:
            raise ValueError(f"has the value {'-' * (value < 0)}inf; it must be finite, at most {MAX_FLOAT:.1e}")
        if value < 0 or (value == 0 and not zero):
            raise ValueError(f"has the value {value}; it must be {'zero or more' if zero else 'more than zero'}")
        least, most = LIMITS.get(unit, (0, MAX_FLOAT))
        if value and not least <= value <= most:
            bound = f"at least {least:g}" if value < least else f"at most {most:g}"
            raise ValueError(f"has the value {value:g}; it must be {bound} {unit}")
        if unit == "count" and value != int(value):
            raise ValueError(f"has the value {value}; it must be a whole number")
        if raw["unit"] != unit:
            raise ValueError(f"has the unit {raw['unit']!r}; it must be {unit!r}")
        if raw["kind"] not in KINDS:
            raise ValueError(f"has the kind {raw['kind']!r}; it must be one of {', '.join(KINDS)}")
        if not isinstance(raw["source"], str) or not raw["source"].strip():
            raise ValueError("has no source; say which datasheet, paper, file or microbenchmark it comes from")
        return Sourced(value, unit=unit, kind=raw["kind"], source=raw["source"])

    return parse


def _text(raw: Any) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError(f"is {raw!r}; it must be text in quotes")
    return raw


Text = Annotated[str, BeforeValidator(_text)]
Count = Annotated[Sourced, BeforeValidator(_number("count"))]
Bytes = Annotated[Sourced, BeforeValidator(_number("bytes"))]
Cycles = Annotated[Sourced, BeforeValidator(_number("cycles"))]
CyclesOrZero = Annotated[Sourced, BeforeValidator(_number("cycles", zero=True))]
BytesPerClk = Annotated[Sourced, BeforeValidator(_number("bytes/clk"))]
BytesPerS = Annotated[Sourced, BeforeValidator(_number("bytes/s"))]
Ns = Annotated[Sourced, BeforeValidator(_number("ns"))]
Us = Annotated[Sourced, BeforeValidator(_number("us"))]
Mhz = Annotated[Sourced, BeforeValidator(_number("MHz"))]
MsOrZero = Annotated[Sourced, BeforeValidator(_number("ms", zero=True))]
Watts = Annotated[Sourced, BeforeValidator(_number("W"))]
Ratio = Annotated[Sourced, BeforeValidator(_number("ratio"))]
Picojoules = Annotated[Sourced, BeforeValidator(_number("pJ", zero=True))]
