"""A chip: one TOML file each in ``model/gpus``, every number with unit, kind and source.

gpu = load_gpu("h100")
gpu.hbm.peak_bytes_per_s * 0.9      # a number ...
gpu.hbm.peak_bytes_per_s.source     # ... that says where it comes from
"""

from __future__ import annotations

import difflib
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

KINDS = ("datasheet", "measured", "derived", "assumed")
GPUS = ("a100-40gb", "a100-80gb", "h100", "h100-pcie", "h200")
ARCHITECTURES = ("sm_80", "sm_90")
MAX_FLOAT = sys.float_info.max


class ChipError(ValueError):
    """A chip file that cannot be used; the message names file, field, what was found and what is allowed."""


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
MhzOrZero = Annotated[Sourced, BeforeValidator(_number("MHz", zero=True))]
Watts = Annotated[Sourced, BeforeValidator(_number("W"))]
Ratio = Annotated[Sourced, BeforeValidator(_number("ratio"))]
Picojoules = Annotated[Sourced, BeforeValidator(_number("pJ", zero=True))]


class Section(BaseModel):
    """A table of a chip file: unknown fields are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Sm(Section):
    """One streaming multiprocessor: how many, what fits on it, and in which units registers and SMEM are given out."""

    count: Count
    subpartitions: Count
    max_warps: Count
    max_ctas: Count
    tensor_flop_per_clk: Count
    registers: Count
    register_alloc_unit: Count
    max_registers_per_thread: Count
    smem_bytes: Bytes
    smem_per_cta_bytes: Bytes
    smem_reserved_per_cta_bytes: Bytes
    smem_alloc_unit_bytes: Bytes


class Clock(Section):
    """``boost_mhz``: the highest SM clock. ``tensor_peak_mhz``: the clock behind the datasheet's tensor peak."""

    boost_mhz: Mhz
    tensor_peak_mhz: Mhz


class Costs(Section):
    """Cycles per warp instruction on one sub-partition, by instruction class (``instructions.Instruction.cost``)."""

    ffma: CyclesOrZero
    fmul: CyclesOrZero
    fadd: CyclesOrZero
    imad: CyclesOrZero
    mov: CyclesOrZero
    fmnmx: CyclesOrZero
    f2fp: CyclesOrZero
    int_alu: CyclesOrZero
    ex2: CyclesOrZero
    shfl: CyclesOrZero
    hmma: CyclesOrZero
    lsu: CyclesOrZero
    control: CyclesOrZero


class Latency(Section):
    """Cycles: shared-memory load to use, barrier (base + per warp), and how far a warp may run ahead of the SMEM port."""

    lds: Cycles
    barrier_base: Cycles
    barrier_per_warp: CyclesOrZero
    lsu_queue: Cycles


class Smem(Section):
    """The SM's shared-memory port."""

    bytes_per_clk: BytesPerClk


class L2(Section):
    """Whole-chip read rate, what one SM alone can pull, and latency to the near and far partition."""

    size_bytes: Bytes
    bytes_per_clk: BytesPerClk
    bytes_per_clk_one_sm: BytesPerClk
    latency_near_ns: Ns
    latency_far_ns: Ns


class Hbm(Section):
    """Peak and achieved rates (read only, write only, half and half) and unloaded latency."""

    size_bytes: Bytes
    peak_bytes_per_s: BytesPerS
    read_bytes_per_s: BytesPerS
    write_bytes_per_s: BytesPerS
    copy_bytes_per_s: BytesPerS
    latency_ns: Ns


class Launch(Section):
    """Kernels back to back in a stream, host time per framework call, CTA dispatch per CTA, when an SM's second CTA
    follows its first, the gap between a CTA and its
    successor on the same SM, and the cycles a kernel needs before its first and after its last CTA."""

    stream_us: Us
    host_op_us: Us
    cta_dispatch_ns: Ns
    second_cta_cycles: Cycles
    cta_replace_cycles: Cycles
    ramp_cycles: Cycles


class Power(Section):
    """Board limit, power at rest, and energy per event at boost clock and voltage.

    ``regulated_share``: what the regulator holds of the limit. ``tensor_clock_slope_mhz``: how far the free-running clock falls
    below ``tensor_peak_mhz`` when the tensor cores are fully busy, whatever the power. ``voltage_floor``: lowest core
    voltage over the voltage at boost, reached at half the boost clock.
    """

    limit_w: Watts
    regulated_share: Ratio
    idle_w: Watts
    voltage_floor: Ratio
    tensor_clock_slope_mhz: MhzOrZero
    hmma_pj: Picojoules
    vector_pj: Picojoules
    ex2_pj: Picojoules
    smem_pj_per_byte: Picojoules
    l2_pj_per_byte: Picojoules
    hbm_pj_per_byte: Picojoules


class GPU(Section):
    """A chip. ``pipe``: how long an instruction holds its pipe; ``port``: the sub-partition's issue and register-read port;
    ``warp``: the shortest gap to the same warp's next instruction; ``result``: until its result can be read."""

    name: Text
    full_name: Text
    architecture: Text
    sm: Sm
    clock: Clock
    pipe: Costs
    port: Costs
    warp: Costs
    result: Costs
    latency: Latency
    smem: Smem
    l2: L2
    hbm: Hbm
    launch: Launch
    power: Power

    def numbers(self) -> Iterator[tuple[str, Sourced]]:
        """Every number as (dotted name, value)."""
        for section in type(self).model_fields:
            table = getattr(self, section)
            if isinstance(table, Section):
                for field in type(table).model_fields:
                    yield f"{section}.{field}", getattr(table, field)

    def replace_number(self, name: str, value: float) -> GPU:
        """A copy with one number changed (``"pipe.ex2"``); it is of kind "assumed". Raises ChipError for unknown names."""
        known = dict(self.numbers())
        if name not in known:
            raise ChipError(f"{self.name} has no number {name!r}; did you mean {_nearest(name, list(known))}?")
        section, field = name.split(".")
        table = getattr(self, section)
        raw = {**dict(table), field: _raw(value, known[name].unit)}
        try:
            changed = type(table).model_validate(raw)
        except ValidationError as error:
            raise ChipError(f"{self.name}: {name} {_message(error)}") from None
        return self.model_copy(update={section: changed})


def _raw(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "kind": "assumed", "source": "set by the user"}


def _message(error: ValidationError) -> str:
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return close[0] if close else known[0]


def load_gpu(name: str | Path) -> GPU:
    """The chip of that name, or of that TOML file. Raises ChipError with what is known or what is wrong in the file."""
    name = str(name)
    if name in GPUS:
        return _shipped(name)
    if name.lower().endswith(".toml"):
        try:
            text = Path(name).read_bytes()
        except OSError as error:
            reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise ChipError(f"chip file {name} {reason}; give a readable .toml file or one of {', '.join(GPUS)}") from None
        return parse_gpu(text, Path(name).name)
    raise ChipError(
        f"gpu {name!r} is unknown; did you mean {_nearest(name, list(GPUS))}? Known are {', '.join(GPUS)}, or a .toml file"
    )


@cache
def _shipped(name: str) -> GPU:
    return parse_gpu((resources.files(__package__) / "gpus" / f"{name}.toml").read_bytes(), f"{name}.toml")


def parse_gpu(text: bytes, file: str) -> GPU:
    """Read one chip file; ``file`` names it in errors."""
    try:
        raw = tomllib.loads(text.decode())
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, and integers of thousands of digits
        raise ChipError(f"{file} is not valid TOML: {error}") from None
    try:
        gpu = GPU.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise ChipError(f"{file}: {field} is missing; every field of the chip is needed") from None
        if first["type"] == "extra_forbidden":
            raise ChipError(f"{file}: {field} is not a field of a chip; {_allowed(first['loc'])}") from None
        if first["type"] == "model_type":
            got = type(first["input"]).__name__
            raise ChipError(f"{file}: {field} is of type {got}; it must be a table, its fields below a line [{field}]") from None
        raise ChipError(f"{file}: {field} {_message(error)}") from None
    if gpu.architecture not in ARCHITECTURES:
        raise ChipError(f"{file}: architecture is {gpu.architecture!r}; it must be one of {', '.join(ARCHITECTURES)}")
    return gpu


def _allowed(loc: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = GPU
    if len(loc) > 1:
        annotation = GPU.model_fields[str(loc[0])].annotation
        assert isinstance(annotation, type)
        model = annotation
    return f"did you mean {_nearest(str(loc[-1]), list(model.model_fields))}?"
