"""What fits on an SM: CTAs by registers, shared memory, warps and CTA slots, with the arithmetic shown.

The rules are the CUDA occupancy calculator's: registers are given out per warp in units of 256 and a warp's registers come from
one sub-partition's quarter; each CTA's SMEM is rounded up after 1 KiB for the system.
"""

from __future__ import annotations

from dataclasses import dataclass

from .gpu import GPU
from .program import Program


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a CTA takes of an SM: ``warps`` with those that idle, ``registers`` per thread."""

    name: str
    warps: int
    registers: int
    smem_bytes: int


@dataclass(frozen=True, kw_only=True)
class Occupancy:
    """CTAs per SM: the smallest of four limits. ``arithmetic`` has one sentence a limit; ``limiter`` names the binding one."""

    ctas_per_sm: int
    warps_per_sm: int
    limiter: str
    arithmetic: dict[str, str]


def occupancy(gpu: GPU, program: Program) -> Occupancy:
    """CTAs of ``program`` resident on one SM. Raises ValueError where not even one fits, with the numbers and what to change."""
    warps, registers = program.warps + program.idle_warps, program.registers
    return resident(gpu, Footprint(name=program.name, warps=warps, registers=registers, smem_bytes=program.smem_bytes))


def resident(gpu: GPU, cta: Footprint) -> Occupancy:
    """The same for a kernel that is not lowered yet."""
    sm = gpu.sm
    warps, registers, smem = cta.warps, cta.registers, cta.smem_bytes
    if registers > sm.max_registers_per_thread:
        raise ValueError(
            f"{cta.name} needs {registers} registers per thread; {gpu.name} has at most"
            f" {int(sm.max_registers_per_thread)}: use smaller tiles, more warps or a smaller head dimension"
        )
    if smem > sm.smem_per_cta_bytes:
        raise ValueError(
            f"{cta.name} needs {smem} B of shared memory; {gpu.name} gives a CTA at most {int(sm.smem_per_cta_bytes)} B:"
            " use smaller tiles, fewer stages or a smaller head dimension"
        )
    unit = int(sm.register_alloc_unit)
    per_warp = -(-registers * 32 // unit) * unit
    quarter = int(sm.registers // sm.subpartitions)
    by_registers = quarter // per_warp * int(sm.subpartitions) // warps
    block, reserved = int(sm.smem_alloc_unit_bytes), int(sm.smem_reserved_per_cta_bytes)
    taken = -(-(smem + reserved) // block) * block
    limits = {
        "registers": by_registers,
        "smem": int(sm.smem_bytes) // taken,
        "warps": int(sm.max_warps) // warps,
        "ctas": int(sm.max_ctas),
    }
    arithmetic = {
        "registers": f"{registers} x 32 -> {per_warp} a warp, {quarter} a sub-partition: {quarter // per_warp} warps each,"
        f" {warps} a CTA -> {by_registers}",
        "smem": f"({smem} + {reserved}) B -> {taken} B of {int(sm.smem_bytes)} B -> {limits['smem']}",
        "warps": f"{warps} of {int(sm.max_warps)} -> {limits['warps']}",
        "ctas": f"at most {int(sm.max_ctas)}",
    }
    limiter = min(limits, key=lambda name: limits[name])
    if limits[limiter] < 1:
        raise ValueError(
            f"{cta.name} does not fit on {gpu.name} ({limiter}: {arithmetic[limiter]}); use smaller tiles or more warps"
        )
    return Occupancy(ctas_per_sm=limits[limiter], warps_per_sm=limits[limiter] * warps, limiter=limiter, arithmetic=arithmetic)
