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
class Usual:
    """What the loops of a build's binaries have in common: executed over ideal instructions by pipe (moves and address arithmetic
    run on the FMA and ALU pipes); the share of softmax's instructions that stands among the products of P V; and cycles of stall
    counts per instruction that is no product, beside Q K^T, between the products and beside P V; and instructions that predicates
    turn off (of the FMA pipe's) per exponential."""

    overhead: Mapping[str, float]
    late: Mapping[str, float]
    stalls: tuple[float, float, float]
    off: float


#: Medians of six FlashAttention-2 binaries a build (fa2_*.toml, sm_90, head_dim 32 to 256). Assumed for loops whose binary was
#: not read.
USUAL = {
    "pytorch": Usual(
        overhead={"fma": 1.8, "alu": 2.1}, late={"fma": 0.58, "alu": 0.46, "xu": 0.71}, stalls=(3.2, 1.5, 1.4),
        off=2,
    ),
    "flash-attn": Usual(
        overhead={"fma": 1.0, "alu": 1.4}, late={"fma": 0.53, "alu": 0.29, "xu": 0.73}, stalls=(3.4, 1.65, 2.05),
        off=0,
    ),
}  # fmt: skip
TYPICAL = {
    build: f"assumed: vector instructions as a compiler usually adds and places them (median of six FA2 binaries, {build})"
    for build in USUAL
}
#: Of a kernel whose own build is not known either.
TYPICAL_OVERHEAD = USUAL["pytorch"].overhead


def origin(label: str) -> str:
    """Where a Program's counts come from, by its label (``Program.profile``), in a word: "binary" (read from this kernel's
    binary), "derived" (the algorithm's and a compiler's usual overhead, or another kernel's), "ideal" (the algorithm's alone)."""
    return "binary" if label.startswith(("sass:", "counter:")) else "ideal" if label == "ideal" else "derived"


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a warp of a binary runs before its first load: instructions, the sum of their stall counts, and how many 64-byte lines
    of the kernel's arguments they read."""

    instructions: int
    stall_cycles: int
    argument_lines: int


@dataclass(frozen=True, kw_only=True)
class LoopCounts:
    """What a compiled loop issues per warp and K/V block but for products, in its three ``parts`` (:mod:`..placement`): by
    counter (fma, alu, xu, lsu, other), registers spilled (``stl``, ``ldl``) and stall cycles. ``setup``, ``loads``, ``epilogue``:
    the same of a tile's code outside the loop: up to its first load, up to its first wait, after the loop. ``first``: the parts
    of the first block, which stands apart from the loop; ``masked``: of the blocks apart in the kernel with a causal mask, what
    masks them included; both empty where not read. ``registers`` per thread; ``local_bytes``: local memory of a warp;
    ``frame_bytes``: of a thread, where it is worth asking whether L1 holds it."""

    label: str
    registers: int
    parts: tuple[Mapping[str, float], ...]
    setup: Mapping[str, float]
    loads: Mapping[str, float]
    epilogue: Mapping[str, float]
    first: tuple[Mapping[str, float], ...] = ()
    masked: tuple[tuple[Mapping[str, float], ...], ...] = ()
    local_bytes: int = 0
    frame_bytes: int = 0
    start: Start | None = None


@cache
def _file(kernel: str) -> dict[str, Any]:
    path = resources.files(__name__) / f"{kernel}.toml"
    return tomllib.loads(path.read_text()) if path.is_file() else {"loop": []}


def loop_counts(
    kernel: str, architecture: str, head_dim: int, block_q: int, block_kv: int, warps: int, build: str
) -> LoopCounts | None:
    """What the binary of this kernel and build issues (``{kernel}_{build}.toml``); None where it was not read."""
    for row in _file(f"{kernel}_{build}")["loop"]:
        key = (row["architecture"], row["head_dim"], row["block_q"], row["block_kv"], row["warps"])
        if key == (architecture, head_dim, block_q, block_kv, warps):
            frame = row.get("stack_bytes", 0)
            return LoopCounts(
                label=f"{row['kind']}: {row['source']}",
                registers=row["registers"],
                parts=_parts(row),
                setup=row["setup"],
                loads=row["loads"],
                epilogue=row["epilogue"],
                first=tuple(row.get("first", ())),
                masked=tuple(tuple(block) for block in row.get("masked", ())),
                local_bytes=32 * frame or row.get("spill_once_bytes", 0) + row["spill_bytes"],
                frame_bytes=frame,
                start=Start(**row["start"]) if "start" in row else None,
            )
    return None


def _parts(row: Mapping[str, Any]) -> tuple[Mapping[str, float], ...]:
    """The loop's parts; where a kernel was counted (``per_block``), in these proportions."""
    parts: list[dict[str, float]] = [dict(row[name]) for name in ("scores", "softmax", "values")]
    if row["kind"] == "counter":
        counted = row["per_block"] | {"lsu": row["per_block"]["lsu"] - sum(p.get(c, 0) for p in parts for c in ("stl", "ldl"))}
        for counter in ("fma", "alu", "xu", "lsu", "other"):
            total = sum(p.get(counter, 0) for p in parts)
            for p in parts:
                p[counter] = p.get(counter, 0) * counted[counter] / total
    return tuple(MappingProxyType(p) for p in parts)


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
