"""What compiled kernels issue: instruction counts per warp and loop trip, read from ``model/profiles/*.toml``.

These are facts about binaries (kind ``counter`` or ``sass``), never calibration: see the files' headers for tool and version.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

LOCAL_STORE_BYTES = 128  # a warp's STL: 32 lanes x 4 B


#: Executed over ideal instructions in the loops of six FlashAttention-2 binaries (fa2.toml, head_dim 32 to 256), the median by
#: pipe: moves and address arithmetic run on the FMA and ALU pipes. Assumed for kernels whose binary was not read.
TYPICAL_OVERHEAD = {"fma": 1.8, "alu": 2.1}
TYPICAL = "assumed: vector instructions with the usual overhead of a compiler (median of the six binaries in fa2.toml)"


@dataclass(frozen=True, kw_only=True)
class LoopCounts:
    """Warp instructions per warp and K/V block by counter (fma, alu, xu, tensor, lsu, other), registers per thread, and the
    bytes of local memory a warp writes per K/V block (register spills: they go through to L2)."""

    label: str
    registers: int
    per_block: Mapping[str, float]


@cache
def _file(kernel: str) -> dict[str, Any]:
    path = resources.files(__name__) / f"{kernel}.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {"loop": []}


def loop_counts(kernel: str, architecture: str, head_dim: int, block_q: int, block_kv: int, warps: int) -> LoopCounts | None:
    """The binary's counts for this kernel, architecture and tile, or None where none was read."""
    for row in _file(kernel)["loop"]:
        key = (row["architecture"], row["head_dim"], row["block_q"], row["block_kv"], row["warps"])
        if key == (architecture, head_dim, block_q, block_kv, warps):
            spills = row["spill_bytes"] / LOCAL_STORE_BYTES
            per_block = row["per_block"] | {"lsu": row["per_block"]["lsu"] - spills, "stl": spills}
            label = f"{row['kind']}: {row['source']}"
            return LoopCounts(label=label, registers=row["registers"], per_block=MappingProxyType(per_block))
    return None
