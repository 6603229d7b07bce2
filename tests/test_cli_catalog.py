"""The commands gpus and schedules: what there is, and a user's own schedule beside the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import run, sentence

import flashsim.cli as cli
from flashsim.model.gpu import load_gpu

MINE = Path(cli.__file__).parent / "model" / "examples" / "single_consumer.py"
BARE = "from flashsim.model.schedules import get_schedule\nclass Mine:\n    name = 'mine'\n    def lower(self, gpu, attention):\n"


def test_a_users_file_shows_its_fields_and_its_program() -> None:
    done = run("schedules", str(MINE))
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["block_kv", "128", "int"] in lines
    assert ["stages", "2", "int"] in lines
    assert "B1 H1 N512 D128 bf16 fwd on h100:" in done.stdout
    assert "program single_consumer_fwd: 8 tiles" in done.stdout
    assert "tma_load Ks" in done.stdout


def test_switches_and_the_problem_show_in_fields_and_program() -> None:
    done = run("schedules", str(MINE), "--set", "stages=3", "--head-dim", "64", "--seqlen", "640", "--causal", "--gpu", "h200")
    assert done.exit_code == 0, done.output
    assert ["stages", "3", "int"] in [line.split() for line in done.stdout.splitlines()]
    assert "B1 H1 N640 D64 bf16 fwd causal on h200:" in done.stdout
    assert "smem Ks: 128 x 64, 16384 B, 3 stages" in done.stdout
    plain, off = (run("schedules", "fa3", "--set", f"pingpong={value}").stdout for value in ("true", "false"))
    assert "named_sync" in plain
    assert plain.count("named_sync") > off.count("named_sync")


def test_a_chips_file_starts_one_of_your_own(tmp_path: Path) -> None:
    done = run("gpus", "h200", "--toml")
    assert done.exit_code == 0, done.output
    (peak,) = [line for line in done.stdout.splitlines() if line.startswith("peak_bytes_per_s")]
    assert peak.endswith("# enters no prediction: read_, write_ and copy_bytes_per_s do")
    path = tmp_path / "mine.toml"
    path.write_text(done.stdout.replace('name = "h200"', 'name = "mine"'))
    assert list(load_gpu(path).numbers()) == list(load_gpu("h200").numbers())
    assert run("gpus", str(path), "--toml").stdout == path.read_text()
    assert "--toml is of one chip: name it" in sentence("gpus", "--toml")


def test_what_enters_no_prediction_is_said() -> None:
    shown = " ".join(run("gpus", "h200").stdout.split())
    assert "These enter no prediction: hbm.peak_bytes_per_s (read_, write_ and copy_bytes_per_s do), hbm.size_bytes" in shown
    shape = ("--gpu", "h200", "--batch", "1", "--heads", "8", "--seqlen", "512", "--head-dim", "64")
    done = run("predict", "fa2", *shape, "--set-gpu", "hbm.peak_bytes_per_s=6e12")
    assert "note: hbm.peak_bytes_per_s enters no prediction: read_, write_ and copy_bytes_per_s do" in done.stderr


def test_a_file_without_fields_says_so(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text(f"{BARE}        return get_schedule('fa2').lower(gpu, attention)\n")
    done = run("schedules", str(path))
    assert done.exit_code == 0, done.output
    assert "mine has no fields: make its class a dataclass to give it some" in done.stdout
    assert "program fa2" in done.stdout


def test_a_file_that_runs_nowhere_tells_its_first_reason(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text(f"{BARE}        raise ValueError(f'mine does not like {{gpu.name}}')\n")
    assert sentence("schedules", str(path)) == "flashsim: mine does not like h100"
    path.write_text(f"{BARE}        return 1 / 0\n")
    assert sentence("schedules", str(path)) == f"flashsim: {path} line 5: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--set", "stages=3"], "--set and --gpu are of one schedule: name it, as in flashsim schedules fa3"),
        (["nothing.py"], "there is no file nothing.py; give a shipped schedule's name, or the path of a Python file"),
        (["fa2", "--seqlen", "0"], "seqlen_q is 0; it must be a whole number of at least 1"),
        (["fa2", "--head-dim", "9999999999"], "head_dim is 9999999999; it must be at most 2147483647: change --head-dim"),
        (["fa2", "--dtype", "int8"], "dtype is 'int8'; it must be one of"),
        (["fa3", "--set", "stage=3"], "fa3 has no field 'stage'; did you mean stages?"),
    ],
)
def test_bad_input_is_one_sentence(args: list[str], words: str) -> None:
    assert words in sentence("schedules", *args)
