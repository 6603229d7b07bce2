"""The command ``optimum``: one line, a table, the same in JSON, and a sentence for what cannot be."""

from __future__ import annotations

import json
import re
import sys

import pytest
from click.testing import CliRunner, Result

from flashsim.cli import main

ONE_TILE = ("optimum", "fa4", "--gpu", "b200", "--batch", "1", "--heads", "1", "--seqlen", "2048", "--head-dim", "128",
            "--set", "q_stages=1", "--as-built", "--seconds", "20")  # fmt: skip
SMALL = ("--batch", "1", "--heads", "1", "--seqlen", "1024", "--head-dim", "128")


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def test_the_line_and_the_table() -> None:
    outcome = run(*ONE_TILE)
    assert outcome.exit_code == 0, outcome.output
    line = r"this schedule: II [\d,]+ cycles; bound [\d,]+ \(recurrence\); best\s+found\s+[\d,]+(,\s+optimal)?\n"
    assert re.search(line, outcome.output)
    assert "initiation interval (II): cycles from one trip" in outcome.output
    assert re.search(r"\nthe search took \d+ s\n$", outcome.output)
    for column in ("operation", "role", "unit", "start", "cycles", "alone", "stage"):
        assert column in outcome.output
    assert re.search(r"Q K\^T S0 +mma +tensor", outcome.output)
    assert re.search(r"recurrence [\d,]+: .*Q K\^T S0 -> ", outcome.output)


def test_json_has_the_same_numbers() -> None:
    outcome = run(*ONE_TILE, "--json")
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(outcome.stdout)
    (built,) = found["variants"]
    bounds = built["bounds"]
    assert max(bounds["resource"], bounds["recurrence"]) <= found["interval"] <= found["own_ii"]
    assert found["switches"] == []
    assert built["change"] == "as built"
    assert {row["op"] for row in built["schedule"]} >= {"Q K^T S0", "tma_load KV"}
    assert all(0 <= row["start"] < built["best_ii"] for row in built["schedule"])
    assert bounds["units"]["tensor"] == 1024


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("standard", "--gpu", "h100", "--kernel", "standard_qk"), "standard_qk has no loop: each of its tiles is done in one"),
        (("fa3", "--gpu", "h100", "--kernel", "x"), "fa3 has no kernel 'x'; it has fa3_fwd: change --kernel"),
        (("fa3", "--gpu", "h100", "--seconds", "0"), "seconds is 0; it must be above 0 and at most 3600: change --seconds"),
        (("fa3", "--gpu", "h100", "--seed", "-1"), f"seed is -1; it must be from 0 to {2**31 - 1}: change --seed"),
        (("fa4", "--gpu", "h100"), "fa4"),
    ],
)
def test_bad_input_is_a_sentence(args: tuple[str, ...], sentence: str) -> None:
    outcome = run("optimum", *args, *SMALL)
    assert outcome.exit_code == 2
    assert outcome.stderr.startswith(f"flashsim: {sentence}")
    assert outcome.stderr.count("\n") == 1


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools", None)
    outcome = run(*ONE_TILE)
    assert outcome.exit_code == 2
    needs = "the best modulo schedule needs ortools, which is not installed: pip install '.[optimum]'"
    assert outcome.stderr == f"flashsim: {needs}\n"
