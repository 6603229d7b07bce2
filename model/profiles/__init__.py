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


#: Executed over ideal instructions in the loops of six FlashAttention-2 binaries a build (fa2.toml, sm_90, head_dim 32 to 256),
#: the median by pipe: moves and address arithmetic run on the FMA and ALU pipes. Assumed for loops whose binary was not read.
BUILD_OVERHEAD = {"pytorch": {"fma": 1.8, "alu": 2.1}, "flash-attn": {"fma": 1.0, "alu": 1.4}}
TYPICAL = {
    build: f"assumed: vector instructions with the usual overhead of a compiler (median of six binaries, {build}, in fa2.toml)"
    for build in BUILD_OVERHEAD
}
#: Of a kernel whose own build is not known either.
TYPICAL_OVERHEAD = BUILD_OVERHEAD["pytorch"]


def origin(label: str) -> str:
    """Where a Program's counts come from, by its label (``Program.profile``), in a word: "binary" (read from this kernel's
    binary), "derived" (the algorithm's and a compiler's usual overhead, or another kernel's), "ideal" (the algorithm's alone)."""
    return "binary" if label.startswith(("sass:", "counter:")) else "ideal" if label == "ideal" else "derived"


@dataclass(frozen=True, kw_only=True)
class LoopCounts:
    """Warp instructions per warp and K/V block by counter (fma, alu, xu, tensor, lsu, other), registers per thread, the
    bytes of local memory a warp writes per K/V block (register spills, they go through to L2: instruction ``stl``), and those it
    keeps in all (``local_bytes``); ``frame_bytes``: local memory a thread, where it is worth asking whether L1 holds it;
    ``stall_cycles``: the sum of the compiler's stall counts."""

    label: str
    registers: int
    per_block: Mapping[str, float]
    local_bytes: int = 0
    frame_bytes: int = 0
    stall_cycles: float | None = None


@cache
def _file(kernel: str) -> dict[str, Any]:
    path = resources.files(__name__) / f"{kernel}.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {"loop": []}


def loop_counts(
    kernel: str, architecture: str, head_dim: int, block_q: int, block_kv: int, warps: int, build: str | None = None
) -> LoopCounts | None:
    """The binary's counts for this kernel, architecture, tile and (where several were read) build; None where none was read."""
    for row in _file(kernel)["loop"]:
        key = (row["architecture"], row["head_dim"], row["block_q"], row["block_kv"], row["warps"])
        if key == (architecture, head_dim, block_q, block_kv, warps) and build in (None, row.get("build")):
            spills = row["spill_bytes"] / LOCAL_STORE_BYTES
            per_block = row["per_block"] | {"lsu": row["per_block"]["lsu"] - row.get("local_accesses", spills), "stl": spills}
            if "refill_bytes" in row:
                per_block["ldl"] = row["refill_bytes"] / LOCAL_STORE_BYTES
            frame = row.get("stack_bytes", 0)
            label = f"{row['kind']}: {row['source']}"
            return LoopCounts(
                label=label,
                registers=row["registers"],
                per_block=MappingProxyType(per_block),
                local_bytes=32 * frame or row.get("spill_once_bytes", 0) + row["spill_bytes"],
                frame_bytes=frame,
                stall_cycles=row.get("stall_cycles"),
            )
    return None


def kernel_profile(kernel: str, **keys: Any) -> Mapping[str, Any] | None:
    """The first entry of ``kernel``'s file whose fields equal ``keys`` (see the file's header), or None where none was read."""
    return _entry(kernel, "loop", keys)


def in_order_profile(kernel: str, **keys: Any) -> Mapping[str, Any] | None:
    """As :func:`kernel_profile`, of the loop without overlap of products and softmax within a warpgroup: its phases."""
    return _entry(kernel, "in_order", keys)


def _entry(kernel: str, table: str, keys: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for row in _file(kernel)[table]:
        if all(row.get(name) == value for name, value in keys.items()):
            return MappingProxyType(row)
    return None
