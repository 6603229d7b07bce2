"""What each unit alone would need, and the initiation interval of the steady loop: the floor under any schedule of its work.

They are here and not in ``model``, because what a bundle costs on a chip is the engines' price list (``pricing.bundle_table``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model.gpu import GPU
from ..model.instructions import PIPES, Path
from ..model.program import IntArray, Opcode, Program
from ..model.rows import BUNDLE, COUNT, JUMP, OPCODE
from .engine import FIRST_PIPE, GAP, PATH, PORT, RESULT, SMEM, TICKS_PER_CYCLE
from .fast_lru import HBM_READ, HBM_WRITE, L2_READ, L2_WRITE
from .residency import Traffic

TENSOR = FIRST_PIPE + PIPES.index("tensor")
ISSUE, LOOP = int(Opcode.ISSUE), int(Opcode.LOOP)


def unit_ticks(table: IntArray, issued: Any, subpartitions: int) -> dict[str, float]:
    """Ticks of work for each unit of one SM (pipes and port: of one of its sub-partitions) in ``issued`` bundles of each kind."""
    totals = issued @ table
    out = {pipe: float(totals[FIRST_PIPE + i]) / subpartitions for i, pipe in enumerate(PIPES) if pipe != "control"}
    if not out["tmem"]:
        del out["tmem"]  # before Blackwell there is none
    products = table[:, PATH] == Path.TCGEN05  # these hold all tensor cores of the SM
    out["tensor"] += float(issued[products] @ table[products, RESULT])
    out["port"] = float(totals[PORT]) / subpartitions
    out["smem"] = float(totals[SMEM])
    return out


def unit_bounds(table: IntArray, issued: Any, gpu: GPU, mhz: float, traffic: Traffic, hbm_rate: float) -> dict[str, float]:
    """Cycles that each unit alone would need for the whole launch, spread evenly over all SMs."""
    per_sm = unit_ticks(table, issued, int(gpu.sm.subpartitions))
    out = {unit: ticks / TICKS_PER_CYCLE / float(gpu.sm.count) for unit, ticks in per_sm.items()}
    out["l2"] = (traffic.total(L2_READ) + traffic.total(L2_WRITE)) / float(gpu.l2.bytes_per_clk)
    out["hbm"] = (traffic.total(HBM_READ) + traffic.total(HBM_WRITE)) / hbm_rate * mhz * 1e6
    return out


def initiation_interval(program: Program, table: IntArray, ctas_per_sm: int, subpartitions: int = 4) -> dict[str, float]:
    """Cycles an SM needs for one trip of the steady loop in all its CTAs: ``ii_resource``, the busiest unit; ``ii_recurrence``,
    the longest that one warp's own instructions take; ``ii``, the larger. Loads from L2 and HBM are left out.

    The steady loop of a role is its longest: the one whose body issues most.
    """
    issued = np.zeros(len(program.bundles), np.int64)
    alone = 0.0
    code = program.code
    for start, end, warps in _loops(program):
        rows = code[start:end][code[start:end, OPCODE] == ISSUE]
        body = np.bincount(rows[:, BUNDLE], weights=rows[:, COUNT], minlength=len(issued)).astype(np.int64)
        issued += body * warps
        alone = max(alone, float(body @ table[:, GAP]) / TICKS_PER_CYCLE)
    work = unit_ticks(table, issued, subpartitions)
    resource = max(work.values()) * ctas_per_sm / TICKS_PER_CYCLE
    return {"ii_resource": resource, "ii_recurrence": alone, "ii": max(resource, alone)}


def _loops(program: Program) -> list[tuple[int, int, int]]:
    """(first row, END row, warps) of each role's steady loop; a role without a loop has none."""
    out = []
    code = program.code
    begins = code[:, OPCODE] == LOOP
    starts = [role.start for role in program.roles] + [len(code)]
    for role, first, last in zip(program.roles, starts, starts[1:], strict=False):
        best = (0, 0, 0)
        for pc in (first + np.flatnonzero(begins[first:last])).tolist():
            end = int(code[pc, JUMP])
            if begins[pc + 1 : end].any():
                continue
            inner = code[pc + 1 : end]
            size = int(inner[inner[:, OPCODE] == ISSUE, COUNT].sum())
            best = max(best, (size, pc, end))
        if best[0]:
            out.append((best[1] + 1, best[2], role.warps))
    return out
