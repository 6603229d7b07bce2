"""``flashsim check`` and a user's own schedule file: verdicts, exit codes, and the sentence for each file that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run, sentence

import flashsim.cli as cli
from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.reference import forward
from flashsim.model.user import load, with_fields
from flashsim.sim.hazards import check
from flashsim.sim.values import run as run_values

EXAMPLES = Path(cli.__file__).parent / "model" / "examples"
MINE = EXAMPLES / "single_consumer.py"
SHAPE = ["--gpu", "h100", "--batch", "1", "--heads", "2", "--seqlen", "256", "--head-dim", "64"]


# --- the command ---


@pytest.mark.parametrize("args", [("fa2", "--gpu", "a100-40gb"), ("fa3",), (str(MINE),)])
def test_clean_is_exit_code_0(args: tuple[str, ...]) -> None:
    """Without a length three problems are checked, a verdict each."""
    result = run("check", *args)
    assert result.exit_code == 0, result.output
    assert result.stdout.count(": clean (1 kernel, ") == 3


def test_without_a_chip_the_first_that_can_is_taken_and_named() -> None:
    result = run("check", "fa4", "--seqlen", "256")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("fa4 on b200, ")
    assert result.stderr == "note: fa4 cannot run on h100; it is checked on b200, --gpu chooses another\n"
    assert run("check", "fa3", "--seqlen", "256").stderr == ""
    assert sentence("check", "fa2", "--dtype", "fp8") == "flashsim: fa2 runs bf16 or fp16, got dtype 'fp8': change dtype"


def test_what_is_too_large_names_what_can_be_smaller() -> None:
    shown = run("check", "standard", "--head-dim-v", "512", "--seqlen", "256").stdout
    assert "use smaller tiles, fewer stages or a smaller head dimension" in shown


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ('"row_sum", writes="l", reads="S"', '"row_sum", writes="l", reads="SS"', "has no buffer 'SS'; did you mean S?"),
        ('"row_max", writes', '"rowmax", writes', "single_consumer_fwd: op 'rowmax' is unknown; did you mean row_max?"),
    ],
)
def test_a_mistyped_name_is_a_sentence(right: str, wrong: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE.read_text().replace(right, wrong))
    assert words in sentence("check", str(tmp_path / "mine.py"))


def test_hazards_are_exit_code_1_and_told_once() -> None:
    result = run("check", str(MINE), "--set", "stages=9")
    assert result.exit_code == 1
    assert result.stdout.count("budget: single_consumer_fwd needs") == 1
    assert "1 hazard, with the same first" in result.stdout


def test_a_problem_is_checked_as_asked() -> None:
    result = run("check", "fa3", "--seqlen", "300", "--causal", "--head-dim", "64", "--dtype", "fp8", "--json")
    assert result.exit_code == 0, result.output
    (verdict,) = json.loads(result.stdout)
    assert verdict["clean"] is True
    assert (verdict["schedule"], verdict["gpu"], verdict["findings"]) == ("fa3", "h100", [])
    assert "N300 D64 fp8 fwd causal" in verdict["problem"]


def test_why_lists_what_orders_what() -> None:
    result = run("check", "fa2", "--seqlen", "300", "--why")
    assert "  Vs: compute: mma Oacc <- P, Vs accumulate=True after compute: load_async Vs" in result.stdout
    assert ", by compute: barrier" in result.stdout


def test_a_problem_that_cannot_run_is_a_sentence() -> None:
    assert sentence("check", "fa3", "--gpu", "a100-40gb").startswith("flashsim: fa3 multiplies with wgmma and a100-40gb has none")
    assert sentence("check", "fa5").startswith("flashsim: schedule 'fa5' is unknown; did you mean fa")


# --- a user's own schedule ---


def test_predict_and_trace_take_a_file(tmp_path: Path) -> None:
    result = run("predict", str(MINE), *SHAPE, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["schedule"] == "single_consumer"
    longer = json.loads(run("predict", str(MINE), *SHAPE, "--json", "--set", "block_kv=64").stdout)
    assert longer["cycles"] > answer["cycles"]
    out = tmp_path / "trace.json"
    assert run("trace", str(MINE), *SHAPE, "-o", str(out)).exit_code == 0
    assert {"producer", "consumer"} <= set(out.read_text().replace('"', " ").replace(":", " ").split())


@pytest.mark.parametrize("shape", [{"seqlen_q": 130, "seqlen_kv": 300}, {"seqlen_q": 200, "seqlen_kv": 90, "causal": True}])
def test_the_example_computes_attention(shape: dict[str, Any]) -> None:
    attention = Attention(batch=1, heads_q=2, head_dim=40, **shape)
    rng = np.random.default_rng(3)
    rows = (attention.seqlen_q, attention.seqlen_kv, attention.seqlen_kv)
    q, k, v = (rng.standard_normal((1, 2, n, 40)) for n in rows)
    out = run_values(load(MINE), load_gpu("h200"), attention, q, k, v, operands="fp32")
    o, lse = forward(q, k, v, causal=attention.causal)
    assert np.abs(out["O"] - o).max() < 1e-5
    assert np.allclose(out["LSE"], lse, atol=1e-5)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_example_is_clean_with_other_switches(stages: int) -> None:
    schedule = with_fields(load(MINE), {"stages": stages, "block_kv": 64})
    verdict = check(schedule, load_gpu("h100"), Attention(batch=1, heads_q=1, seqlen_q=700, head_dim=64, causal=True))
    assert verdict.clean, str(verdict)


PROTOCOL = "    def lower(self, gpu, attention):\n        return {}\n"
FILES: dict[str, tuple[str, str]] = {
    "nothing": (
        "x = 1\n",
        "{path} defines no schedule: write a class with name and lower(gpu, attention), or an object schedule",
    ),
    "two": (
        f"class A:\n    name = 'a'\n{PROTOCOL.format('()')}\nclass B:\n    name = 'b'\n{PROTOCOL.format('()')}",
        "{path} defines 2 schedules (A, B): leave one, or call one object schedule",
    ),
    "needs an argument": (
        f"class A:\n    name = 'a'\n    def __init__(self, size):\n        pass\n{PROTOCOL.format('()')}",
        "{path}: A.__init__() missing 1 required positional argument: 'size': give the fields of A defaults",
    ),
    "no name": (
        f"class A:\n{PROTOCOL.format('()')}\nschedule = A()\n",
        "{path}: schedule is a A without name or lower(gpu, attention): add what is missing",
    ),
    "empty name": (f"class A:\n    name = ''\n{PROTOCOL.format('()')}", "{path}: A has the name ''; it must be text"),
    "syntax": ("def f(:\n", "{path} line 1: invalid syntax"),
    "error": ("x = 1\ny = x / 0\n", "{path} line 2: ZeroDivisionError: division by zero"),
    "error in lower": (
        f"class A:\n    name = 'a'\n{PROTOCOL.format('[0][attention.batch]')}",
        "{path} line 4: IndexError: list index out of range",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_cannot_be_used_is_a_sentence(case: str, tmp_path: Path) -> None:
    text, expected = FILES[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert sentence("check", str(path)) == f"flashsim: {expected.format(path=path)}"


def test_missing_files_and_fields_are_sentences(tmp_path: Path) -> None:
    missing = tmp_path / "none.py"
    assert sentence("check", str(missing)) == (
        f"flashsim: there is no file {missing}; give a shipped schedule's name, or the path of a Python file with one"
    )
    folder = tmp_path / "text"
    folder.write_text("")
    assert sentence("predict", str(folder), *SHAPE) == f"flashsim: {folder} is not a Python file: its name must end with .py"
    assert sentence("check", str(MINE), "--set", "stage=3") == (
        "flashsim: single_consumer has no field 'stage'; did you mean stages? Its fields are block_kv, stages"
    )
    plain = tmp_path / "plain.py"
    plain.write_text(f"class A:\n    name = 'a'\n{PROTOCOL.format('()')}")
    assert sentence("check", str(plain), "--set", "stage=3") == (
        "flashsim: a has no field 'stage': make its class a dataclass to give it fields"
    )


def test_an_object_called_schedule_goes_before_classes(tmp_path: Path) -> None:
    path = tmp_path / "object.py"
    path.write_text("from flashsim.model.schedules import get_schedule\nschedule = get_schedule('fa2', block_kv=32)\n")
    assert load(path).name == "fa2"
    assert run("check", str(path), "--set", "warps=2").exit_code == 0
