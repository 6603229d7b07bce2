"""A chip: one TOML file each in ``model/gpus``, every number with unit, kind and source.

gpu = load_gpu("h100")
gpu.hbm.peak_bytes_per_s * 0.9      # a number ...
gpu.hbm.peak_bytes_per_s.source     # ... that says where it comes from
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .named import guess
from .sourced import (
    KINDS as KINDS,
)
from .sourced import (
    PARTS,
    Bytes,
    BytesPerClk,
    BytesPerS,
    Count,
    Cycles,
    CyclesOrZero,
    Mhz,
    MsOrZero,
    Ns,
    Picojoules,
    Ratio,
    Text,
    Us,
    Watts,
)
from .sourced import Sourced as Sourced

GPUS = ("a100-40gb", "a100-80gb", "h100", "h100-pcie", "h200", "b200", "gb200", "b300", "gb300")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_103")
class ChipError(ValueError):
    """A chip file that cannot be used; the message names file, field, what was found and what is allowed."""


class Section(BaseModel):
    """A table of a chip file: unknown fields are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Sm(Section):
    """One streaming multiprocessor: how many, what fits on it, and in which units registers and SMEM are given out.

    ``l1_bytes``: of the data cache that L1 and SMEM share; what the resident CTAs' SMEM leaves is L1.
    """

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
    l1_bytes: Bytes


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
    """Cycles: shared-memory load to use, barrier (base + per warp), how far a warp may run ahead of the SMEM port, what the first
    read of a 64-byte line of a kernel's arguments (constant memory) takes, and from a taken branch to the instruction at its
    target."""

    lds: Cycles
    barrier_base: Cycles
    barrier_per_warp: CyclesOrZero
    lsu_queue: Cycles
    argument_line_cycles: Cycles
    branch: Cycles


class Fetch(Section):
    """Instructions: bytes that an SM's cache holds, what the next level gives all SMs together, and cycles an instruction at
    which one warp alone gets them from there."""

    cache_bytes: Bytes
    bytes_per_clk: BytesPerClk
    warp_cycles: Cycles


class Smem(Section):
    """The SM's shared-memory port."""

    bytes_per_clk: BytesPerClk


class L2(Section):
    """Size, how much of it holds data read again later, whole-chip read rate, what one SM alone can pull, and latency to
    the near and far partition. ``home_bytes_per_clk``: the rate for what one partition alone holds, as what was just written
    (None: the same). Rates are bytes per SM clock, or per ``clock_mhz`` where L2 has a clock of its own."""

    size_bytes: Bytes
    resident_bytes: Bytes
    bytes_per_clk: BytesPerClk
    bytes_per_clk_one_sm: BytesPerClk
    latency_near_ns: Ns
    latency_far_ns: Ns
    home_bytes_per_clk: BytesPerClk | None = None
    clock_mhz: Mhz | None = None


class Hbm(Section):
    """Peak and achieved rates (read only, write only, half and half) and unloaded latency."""

    size_bytes: Bytes
    peak_bytes_per_s: BytesPerS
    read_bytes_per_s: BytesPerS
    write_bytes_per_s: BytesPerS
    copy_bytes_per_s: BytesPerS
    latency_ns: Ns


class Launch(Section):
    """Kernels back to back in a stream, what events around a call add to it, host time per framework call, CTA dispatch per
    CTA, when an SM's second CTA follows its first, the gap between a CTA and its successor on the same SM, and the cycles a
    kernel needs before its first and after its last CTA."""

    stream_us: Us
    events_us: Us
    host_op_us: Us
    cta_dispatch_ns: Ns
    second_cta_cycles: Cycles
    cta_replace_cycles: Cycles
    ramp_cycles: Cycles


class Wgmma(Section):
    """Asynchronous warpgroup products: tensor cycles for each of N columns, from the end of a group's last product
    to the warp that waits for it (also with A in registers), how many a sub-partition holds at a time (with the one that runs),
    and energy of a warp's 16 rows and k-step for each column, of BF16, FP16 and FP8."""

    cycles_per_column: Cycles
    wait_cycles: Cycles
    wait_register_cycles: Cycles
    queue: Count
    pj_per_column: Picojoules
    pj_per_column_fp16: Picojoules
    pj_per_column_fp8: Picojoules


class Beside(Section):
    """What a sub-partition's vector work costs while its tensor core runs a warpgroup product: cycles of the ALU and the MUFU
    an instruction, port cycles of an FMA class and of a MUFU instruction, and what one of FMA class takes from the product;
    bytes a cycle that the product leaves of the SM's SMEM port."""

    alu: Cycles
    mufu: Cycles
    port_fma: Cycles
    port_mufu: Cycles
    tensor_per_fma: Cycles
    smem_bytes_per_clk: BytesPerClk


class Async(Section):
    """Bulk copies and barriers: time a TMA load adds to an L2 or HBM access, issue of one copy, how fast a store reads shared
    memory (one SM's, all SMs' together) and what it takes beside that until its warp goes on, from an mbarrier's last arrival to
    the waiting warp, the same where one of its lanes waits, and what a wait takes where the phase is over already."""

    tma_ns: Ns
    tma_issue_cycles: Cycles
    store_bytes_per_clk: BytesPerClk
    store_bytes_per_clk_all: BytesPerClk
    store_cycles: Cycles
    mbarrier_cycles: Cycles
    mbarrier_lane_cycles: Cycles
    mbarrier_try_cycles: CyclesOrZero


class Tcgen05(Section):
    """Products of a CTA, or of a CTA pair, accumulated in TMEM: tensor cycles for each of N columns, what a batch of them
    costs on top, a warp's gap between issues, from issue to the warp that waits for the mbarrier, less the product's own
    cycles (A in shared memory or in TMEM, one CTA or a pair), and energy per column of 128 rows in a k-step of 16."""

    cycles_per_column: Cycles
    batch_cycles: CyclesOrZero
    issue_cycles: Cycles
    latency_cycles: Cycles
    latency_a_tmem_cycles: Cycles
    pair_latency_cycles: Cycles
    pair_latency_a_tmem_cycles: Cycles
    pj_per_column: Picojoules
    pj_per_column_fp16: Picojoules
    pj_per_column_fp8: Picojoules


class Tmem(Section):
    """Tensor memory: 32-bit columns of 128 lanes, what all four sub-partitions together load and store a cycle, latency beyond
    the transfer, and what an allocation takes."""

    columns: Count
    load_bytes_per_clk: BytesPerClk
    store_bytes_per_clk: BytesPerClk
    latency_cycles: Cycles
    alloc_cycles: Cycles


class Packed(Section):
    """FP32 arithmetic on two values an instruction (f32x2): cycles of the FMA pipe, of the port, of the warp, and until the
    result, as the sections ``pipe``, ``port``, ``warp`` and ``result`` hold them for the classes of all chips."""

    pipe: Cycles
    port: Cycles
    warp: Cycles
    result: Cycles


class Power(Section):
    """Board limit, power at rest, and energy per event at boost clock and voltage (``hmma_pj``: of BF16).

    ``regulated_share``: what the regulator holds of the limit. ``hold_ms``: how long after a rest it lets a load pass it,
    ``peak_core_w``: what the SMs may draw meanwhile.
    ``tensor_stretch``: what the SMs run at of the clock asked for while tensor cores work, whatever the power.
    ``voltage_floor``: lowest core voltage over the voltage at boost, reached at half the boost clock. ``smem_write_pj_per_byte``:
    of what lands in an SM's memory from L2; ``l2_pj_per_byte``: until there. ``zero_fill_pj_per_byte``: of zeros written to HBM.
    """

    limit_w: Watts
    regulated_share: Ratio
    idle_w: Watts
    voltage_floor: Ratio
    hold_ms: MsOrZero
    peak_core_w: Watts
    tensor_stretch: Ratio
    hmma_pj: Picojoules
    hmma_fp16_pj: Picojoules
    vector_pj: Picojoules
    ex2_pj: Picojoules
    smem_pj_per_byte: Picojoules
    smem_write_pj_per_byte: Picojoules
    l2_pj_per_byte: Picojoules
    hbm_pj_per_byte: Picojoules
    zero_fill_pj_per_byte: Picojoules


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
    fetch: Fetch
    smem: Smem
    l2: L2
    hbm: Hbm
    launch: Launch
    power: Power
    wgmma: Wgmma | None = None
    beside: Beside | None = None
    async_: Async | None = Field(default=None, alias="async")
    tcgen05: Tcgen05 | None = None
    tmem: Tmem | None = None
    packed: Packed | None = None

    def numbers(self) -> Iterator[tuple[str, Sourced]]:
        """Every number as (dotted name, value)."""
        for section, table in self:
            if isinstance(table, Section):
                yield from ((f"{section.rstrip('_')}.{field}", number) for field, number in table if number is not None)

    def replace_number(self, name: str, value: float) -> GPU:
        """A copy with one number changed (``"pipe.ex2"``); it is of kind "assumed". Raises ChipError for unknown names."""
        known = dict(self.numbers())
        if name not in known:
            raise ChipError(f"{self.name} has no number {name!r}{guess(name, known)}")
        section, field = name.split(".")
        section = "async_" if section == "async" else section
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


def load_gpu(name: str | Path) -> GPU:
    """The chip of that name, or of that TOML file. Raises ChipError with what is known or what is wrong in the file."""
    name = str(name)
    return _shipped(name) if name in GPUS else parse_gpu(chip_text(name), Path(name).name)


def chip_text(name: str) -> bytes:
    """The file of the chip of that name, or that TOML file. Raises ChipError where there is none."""
    if name in GPUS:
        return (resources.files(__package__) / "gpus" / f"{name}.toml").read_bytes()
    if name.lower().endswith(".toml"):
        try:
            return Path(name).read_bytes()
        except OSError as error:
            reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise ChipError(f"chip file {name} {reason}; give a readable .toml file or one of {', '.join(GPUS)}") from None
    raise ChipError(
        f"gpu {name!r} is unknown{guess(name, GPUS)} Known are {', '.join(GPUS)}, or a .toml file"
    )


@cache
def _shipped(name: str) -> GPU:
    return parse_gpu(chip_text(name), f"{name}.toml")


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
            raise ChipError(f"{file}: {field} is missing; every field is needed: flashsim gpus h200 --toml has all") from None
        if first["type"] == "extra_forbidden":
            raise ChipError(f"{file}: {field} is not a field of a chip{_allowed(first['loc'])}") from None
        if first["type"] == "model_type":
            got = type(first["input"]).__name__
            raise ChipError(f"{file}: {field} is of type {got}; it must be a table, its fields below a line [{field}]") from None
        raise ChipError(f"{file}: {field} {_message(error)}") from None
    if gpu.architecture not in ARCHITECTURES:
        raise ChipError(f"{file}: architecture is {gpu.architecture!r}; it must be one of {', '.join(ARCHITECTURES)}")
    numbers = dict(gpu.numbers())
    for part, whole in PARTS.items():
        if numbers[part] > numbers[whole]:
            raise ChipError(f"{file}: {part} is {numbers[part]:g}; it must be at most {whole}, which is {numbers[whole]:g}")
    return gpu


def _allowed(loc: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = GPU
    if len(loc) > 1:
        name = "async_" if loc[0] == "async" else str(loc[0])
        annotation = GPU.model_fields[name].annotation
        model = next(each for each in (annotation, *get_args(annotation)) if isinstance(each, type))
    return guess(str(loc[-1]), model.model_fields)
