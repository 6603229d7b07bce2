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


@dataclass(frozen=True, kw_only=True)
class LoopCounts:
    """Warp instructions per warp and K/V block by counter (fma, alu, xu, tensor, lsu, other), and registers per thread."""

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
            label = f"{row['kind']}: {row['source']}"
            return LoopCounts(label=label, registers=row["registers"], per_block=MappingProxyType(row["per_block"]))
    return None
