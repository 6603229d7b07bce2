"""Where FA2's loops have their vector work: as in the binaries that were read, or as compilers usually place it."""

from __future__ import annotations

import tomllib
from importlib import resources
from itertools import compress
from statistics import median
from typing import Any

import pytest

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import INSTRUCTIONS
from flashsim.model.profiles import USUAL
from flashsim.model.program import Opcode, Program
from flashsim.model.rows import BUNDLE, COUNT, JUMP, OPCODE
from flashsim.model.schedules import get_schedule
from flashsim.model.schedules.fa2 import BUILDS

FILES = {build: resources.files("flashsim.model.profiles") / f"fa2_{build}.toml" for build in BUILDS}
BINARIES: list[dict[str, Any]] = [row for file in FILES.values() for row in tomllib.loads(file.read_text())["loop"]]
PARTS = ("scores", "softmax", "values")
CHIPS = {"sm_80": "a100-80gb", "sm_90": "h100"}
#: Rounding: a part's instructions are whole, and a bundle that holds the last product of a part may hold a neighbour of it.
SLACK = 4


def lowered(row: dict[str, Any], *, causal: bool = False, **fields: Any) -> Program:
    a = Attention(batch=1, heads_q=1, seqlen_q=2048, head_dim=row["head_dim"], dtype="fp16", causal=causal)
    tile = {name: row[name] for name in ("block_q", "block_kv", "warps", "build")}
    (program,) = get_schedule("fa2", **tile | fields).lower(load_gpu(CHIPS[row["architecture"]]), a)
    return program


def loop(program: Program, number: int = -1) -> list[list[tuple[str, int]]]:
    """What the bundles of a loop hold, in order."""
    start = [i for i, row in enumerate(program.code) if row[OPCODE] == Opcode.LOOP][number]
    rows = program.code[start : program.code[start][JUMP]]
    return [[(n, k * int(row[COUNT])) for n, k in program.bundles[row[BUNDLE]]] for row in rows if row[OPCODE] == Opcode.ISSUE]


def copy(program: Program, number: int) -> list[list[tuple[str, int]]]:
    """The same of a block that stands apart, before the loop."""
    guards = [i for i, row in enumerate(program.code) if row[OPCODE] == Opcode.SKIP_IF_NEGATIVE]
    outer = [i for i in guards if not any(j < i < program.code[j][JUMP] for j in guards)]
    bodies = [program.code[i : program.code[i][JUMP]] for i in outer]
    issued = [[program.bundles[row[BUNDLE]] for row in rows if row[OPCODE] == Opcode.ISSUE] for rows in bodies]
    multiplies = [any(INSTRUCTIONS[n].pipe == "tensor" for bundle in bundles for n, _ in bundle) for bundles in issued]
    rows = list(compress(bodies, multiplies))[number]
    return [[(n, k * int(row[COUNT])) for n, k in program.bundles[row[BUNDLE]]] for row in rows if row[OPCODE] == Opcode.ISSUE]


def counted(bundles: list[list[tuple[str, int]]], spilled: tuple[str, ...] = ("stl", "ldl", "ldl_far")) -> dict[str, int]:
    """Instructions by counter; ``spilled`` ones and stalls by name."""
    counts: dict[str, int] = {}
    for name, n in (each for bundle in bundles for each in bundle):
        key = name if name in (*spilled, "stall") else INSTRUCTIONS[name].counter
        counts[key] = counts.get(key, 0) + n
    return counts


def parts_of(bundles: list[list[tuple[str, int]]], row: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Split where half of the products are issued."""
    with_products = [i for i, bundle in enumerate(bundles) if any(name == "hmma" for name, _ in bundle)]
    products = [sum(n for name, n in bundles[i] if name == "hmma") for i in with_products]
    half = next(k for k in range(len(products)) if sum(products[: k + 1]) >= row["per_block"]["tensor"] / 2)
    end, begin = with_products[half] + 1, with_products[half + 1]
    return {name: counted(part) for name, part in zip(PARTS, (bundles[:end], bundles[end:begin], bundles[begin:]), strict=True)}


def name_of(row: dict[str, Any]) -> str:
    return f"{row['build']}-{row['architecture']}-D{row['head_dim']}-{row['block_q']}x{row['block_kv']}-{row['warps']}"


@pytest.mark.parametrize("row", BINARIES, ids=name_of)
def test_a_loop_issues_in_each_part_what_its_binary_does(row: dict[str, Any]) -> None:
    bundles = loop(lowered(row))
    found, scale = parts_of(bundles, row), dict.fromkeys(("fma", "alu", "xu"), 1.0)
    if row["kind"] == "counter":
        scale = {c: row["per_block"][c] / sum(row[part].get(c, 0) for part in PARTS) for c in scale}
    for part in PARTS:
        for counter, factor in scale.items():
            assert found[part].get(counter, 0) == pytest.approx(row[part].get(counter, 0) * factor, abs=SLACK), (part, counter)
    whole = counted(bundles)
    assert whole["tensor"] == round(row["per_block"]["tensor"])
    assert whole.get("stl", 0) == sum(row[part].get("stl", 0) for part in PARTS)
    assert whole.get("ldl", 0) + whole.get("ldl_far", 0) == sum(row[part].get("ldl", 0) for part in PARTS)
    issued = sum(n for c, n in whole.items() if c not in ("tensor", "stall"))
    assert issued + whole["stall"] == pytest.approx(sum(row[part]["stall"] for part in PARTS), rel=0.02, abs=SLACK)


@pytest.mark.parametrize("kind", ["first", "masked"])
@pytest.mark.parametrize("row", BINARIES, ids=name_of)
def test_a_block_before_the_loop_issues_what_its_binary_does(row: dict[str, Any], kind: str) -> None:
    """The first one without a mask, all of them with a causal one, what masks them included. Never less than the algorithm needs:
    one compiler has some of its FMA-class instructions elsewhere (head_dim 96)."""
    blocks = [row["first"]] if kind == "first" else row.get("masked", [])
    program, ideal = (lowered(row, causal=kind == "masked", counts=counts) for counts in ("binary", "ideal"))
    for number, parts in enumerate(blocks):
        found, least = counted(copy(program, number)), counted(copy(ideal, 0))
        for counter in ("fma", "alu", "xu"):
            wanted = max(least[counter], sum(p.get(counter, 0) for p in parts))
            assert found[counter] == pytest.approx(wanted, abs=SLACK), (number, counter)
        for name in ("stl", "ldl"):
            assert found.get(name, 0) + found.get(f"{name}_far", 0) == sum(p.get(name, 0) for p in parts)
        assert found["tensor"] == round(row["per_block"]["tensor"])


def test_where_masked_blocks_were_not_read_what_masks_comes_on_top() -> None:
    row = next(r for r in BINARIES if "masked" not in r and r["architecture"] == "sm_90" and r["block_kv"] == 256)
    program = lowered(row, causal=True)
    masked, plain = counted(copy(program, 0)), counted(copy(lowered(row), 0))
    assert masked["alu"] - plain["alu"] == 2 * row["block_q"] * row["block_kv"] // (32 * row["warps"])
    assert {c: masked[c] for c in ("fma", "xu", "tensor")} == {c: plain[c] for c in ("fma", "xu", "tensor")}


def test_counts_of_the_algorithm_stay_in_its_order() -> None:
    """Ideal counts are no compiler's: all exponentials come before the first product of P V."""
    row = next(r for r in BINARIES if r["build"] == "flash-attn" and r["head_dim"] == 64)
    ideal = parts_of(loop(lowered(row, counts="ideal")), row)
    assert ideal["values"].get("xu", 0) == 0
    assert "stall" not in ideal["softmax"]


def test_a_tile_that_was_not_read_is_placed_as_usual() -> None:
    row = dict(next(r for r in BINARIES if r["build"] == "flash-attn" and r["head_dim"] == 64), block_kv=96)
    row["per_block"] = {"tensor": 192}
    found, usual = parts_of(loop(lowered(row)), row), USUAL["flash-attn"]
    for counter, share in usual.late.items():
        all_of_it = found["softmax"][counter] + found["values"][counter]
        assert found["values"][counter] / all_of_it == pytest.approx(share, abs=0.03)
    held = [sum(n for c, n in found[part].items() if c != "tensor") for part in PARTS]
    issued = [n - found[part]["stall"] for n, part in zip(held, PARTS, strict=True)]
    assert [h / n for h, n in zip(held, issued, strict=True)] == pytest.approx(usual.stalls, rel=0.1)


@pytest.mark.parametrize("build", USUAL)
def test_the_usual_loop_is_the_median_of_the_builds_binaries(build: str) -> None:
    rows = [r for r in BINARIES if r["build"] == build and r["architecture"] == "sm_90" and "stack_bytes" not in r]
    usual = USUAL[build]
    assert len(rows) == 6
    for counter in usual.late:
        late = [r["values"][counter] / (r["softmax"][counter] + r["values"][counter]) for r in rows]
        assert median(late) == pytest.approx(usual.late[counter], abs=0.01)
    for part, stalls in zip(PARTS, usual.stalls, strict=True):
        ratios = [r[part]["stall"] / sum(n for c, n in r[part].items() if c not in ("stall", "off")) for r in rows]
        assert median(ratios) == pytest.approx(stalls, abs=0.06)
    for pipe, overhead in usual.overhead.items():
        ratios = [r["per_block"][pipe] / counted(loop(lowered(r, counts="ideal")))[pipe] for r in rows]
        assert median(ratios) == pytest.approx(overhead, abs=0.05)
