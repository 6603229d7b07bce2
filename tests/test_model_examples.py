"""The example and its page; broken schedules, refused with their culprit and clean once repaired; a file in other processes."""

from __future__ import annotations

import ast
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import flashsim.cli as cli
from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.user import load, with_fields
from flashsim.sim.hazards import Verdict, check

EXAMPLES = Path(cli.__file__).parent / "model" / "examples"
EXAMPLE, PAGE, BROKEN = EXAMPLES / "single_consumer.py", EXAMPLES / "README.md", EXAMPLES / "broken"

ADVANCE = '        b.op("advance", ring=ring)\n'
ARRIVE = '        b.op("mbarrier_arrive", barrier=f"{ring}_empty", ring=ring)\n'
WAIT = '        b.op("mma_wait", arg=0)\n'
STORE = '        b.op("tma_store"'

#: file: (kind of the first finding, parts of its fields, the wrong lines, the right ones)
PUZZLES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "eager_producer": ("write before release", {"role": "producer", "op": "tma_load Vs", "barrier": "v_empty[0]"},
        '                if ring == "k":\n    ', ""),
    "early_release": ("write before release", {"role": "producer", "op": "tma_load Ks", "barrier": "k_empty[0]",
        "sentence": "nothing orders the two; k_empty[0] phase 0 would order them"},
        ARRIVE + WAIT, WAIT + ARRIVE),
    "first_turn": ("deadlock", {"role": "producer", "barrier": "k_empty[0]", "phase": 0},
        '_empty", ring=ring)', '_empty", ring=ring, previous=True)'),
    "four_arrivals": ("arrival count", {"role": "consumer", "op": "mbarrier_arrive", "barrier": "k_empty[0]",
        "sentence": "makes 8 of the same op: its count is too small, or someone arrives too often"}, ", count=4", ""),
    "gone_too_soon": ("unfinished at exit", {"role": "consumer", "op": "tma_store O"},
        'index=Index(arg="q_block"))\n        b.op("store"', 'index=Index(arg="q_block"), wait="read")\n        b.op("store"'),
    "never_full": ("bytes", {"role": "consumer", "barrier": "k_full[0]", "sentence": "32768 B to come"},
        'of=("Ks", "Vs")', 'of=(f"{tensor}s",)'),
    "one_group_left": ("read before data", {"role": "consumer", "buffer": "S", "op": "mask"}, "arg=1", "arg=0"),
    "own_rows": ("read before data", {"role": "consumer", "buffer": "Qs.O", "op": "tma_store O", "barrier": ""},
        STORE, '        b.op("named_sync", barrier="epilogue")\n' + STORE),
    "standing_still": ("arrival count", {"role": "consumer", "op": "mbarrier_arrive", "barrier": "v_empty[0]",
        "sentence": "or consumer lacks an advance of ring v between two of its arrivals"},
        '        if ring == "k":\n    ', ""),
    "two_proxies": ("missing proxy fence", {"role": "consumer", "buffer": "Qs.O", "op": "tma_store O"},
        '        b.op("named_sync"', '        b.op("fence_async")\n        b.op("named_sync"'),
}  # fmt: skip


def judged(path: Path, **shape: Any) -> Verdict:
    return check(load(path), load_gpu("h100"), Attention(**{"batch": 1, "heads_q": 1, "seqlen_q": 512, "head_dim": 128, **shape}))


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 100


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def test_the_page_is_the_file() -> None:
    """Each line of the example is in the page, in order, with words before each piece."""
    pieces = re.split(r"```python\n(.*?)\n```\n", PAGE.read_text(), flags=re.DOTALL)
    assert lines("\n".join(pieces[1::2])) == lines(EXAMPLE.read_text())
    assert all(len(words.strip()) > 40 for words in pieces[:-1:2])


def test_the_page_lists_the_broken_ones() -> None:
    listed = dict(re.findall(r"^\| `(\w+)\.py` \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE))
    files = {path.stem: str(ast.get_docstring(ast.parse(path.read_text()))) for path in BROKEN.glob("[!_]*.py")}
    assert listed == {name: text.splitlines()[0] for name, text in files.items()}
    assert set(files) == set(PUZZLES)
    assert all(text.rstrip().endswith("?") for text in files.values()), "a puzzle asks a question"


@pytest.mark.parametrize("name", PUZZLES)
def test_a_broken_schedule_is_refused_with_its_culprit(name: str) -> None:
    kind, culprit, _, _ = PUZZLES[name]
    first = judged(BROKEN / f"{name}.py").findings[0]
    assert first.kind == kind, str(first)
    for field, part in culprit.items():
        value = getattr(first, field)
        assert (part in value) if isinstance(part, str) and part else value == part, str(first)


@pytest.mark.parametrize("name", PUZZLES)
def test_its_repair_is_clean(name: str, tmp_path: Path) -> None:
    _, _, wrong, right = PUZZLES[name]
    text = (BROKEN / f"{name}.py").read_text()
    assert text.count(wrong) == 1
    path = tmp_path / f"{name}.py"
    path.write_text(text.replace(wrong, right))
    for shape in ({}, {"causal": True, "seqlen_q": 700, "head_dim": 64}):
        verdict = judged(path, **shape)
        assert verdict.clean, str(verdict)


def test_the_pages_commands_run(tmp_path: Path) -> None:
    """On a small problem; the commands are read from the page."""
    commands = [line.split()[1:] for line in PAGE.read_text().splitlines() if line.startswith("    flashsim ")]
    assert {words[0] for words in commands} == {"check", "predict", "trace", "explore"}
    names = {"my_schedule.py": str(EXAMPLE), "hazards.json": str(tmp_path / "h.json"), "trace.json": str(tmp_path / "t.json")}
    small = {"--seqlen": "256", "--heads": "1", "--batch": "1"}
    for words in commands:
        args = [names.get(word, word) for word in words]
        args = [small.get(before, word) for before, word in zip(["", *args], args, strict=False)]
        result = CliRunner().invoke(cli.main, args)
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "h.json").read_text())["traceEvents"]


# --- to other processes ---


def test_a_users_schedule_is_pickled_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(EXAMPLE.read_text())
    schedule = with_fields(load(path), {"stages": 3})
    again = pickle.loads(pickle.dumps(schedule))
    assert (again.name, again.stages, again.block_kv) == ("single_consumer", 3, 128)
    assert str(path).encode() in pickle.dumps(schedule)


def test_explore_takes_a_users_file_to_worker_processes(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.py"
    path.write_text(EXAMPLE.read_text())
    args = ["--gpu", "h100", "--batch", "1", "--heads", "1", "--seqlen", "256", "--head-dim", "64"]
    result = CliRunner().invoke(cli.main, ["explore", str(path), *args, "--vary", "stages=1,2", "--jobs", "2"])
    assert result.exit_code == 0, result.output
    assert "2 ran, 0 cannot run" in result.output


@pytest.mark.parametrize("where", ["the file", "lower"])
def test_a_file_that_ends_the_program_is_a_sentence(where: str, tmp_path: Path) -> None:
    path = tmp_path / "quits.py"
    lower = "class A:\n    name = 'a'\n    def lower(self, gpu, attention):\n        sys.exit(3)"
    bodies = {"the file": "sys.exit(3)", "lower": lower}
    path.write_text(f"import sys\n{bodies[where]}\n")
    result = CliRunner().invoke(cli.main, ["check", str(path)])
    assert result.exit_code == 2
    ends = {"the file": f"{path} line 2: SystemExit: 3", "lower": "a ends the program in lower(gpu, attention): raise ValueError"}
    assert result.stderr.startswith(f"flashsim: {ends[where]}")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_schedule_that_cannot_be_called_says_how_it_must_be(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    name = 'mine'\n\n    def lower(self):\n        return ()\n")
    with pytest.raises(ValueError, match=r"Mine\.lower cannot be called as lower\(gpu, attention\)"):
        load(path)
