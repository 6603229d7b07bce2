"""The engine's compiled code: who waits for it is told so once, and it runs where nothing can be kept."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import numba as nb
import pytest

from flashsim.sim.compiled import SENTENCE, UNKEPT, announce, cold, once
from flashsim.sim.fast_parts import jit

SMALL = "import numba as nb\n\ndef twice(x):\n    return 2 * x\n"


def dispatcher(folder: Path, *, kept: bool = True) -> object:
    """A small function like the engine's, of a file of its own."""
    scope: dict[str, object] = {"__name__": "small", "__file__": str(folder / "small.py")}
    (folder / "small.py").write_text(SMALL)
    exec(compile(SMALL, str(folder / "small.py"), "exec"), scope)
    return nb.njit(cache=kept)(scope["twice"])  # type: ignore[arg-type, no-any-return]


def test_code_is_cold_until_it_is_compiled_or_on_disk(tmp_path: Path) -> None:
    first = dispatcher(tmp_path)
    assert cold(first)
    first(2)  # type: ignore[operator]
    assert not cold(first)
    assert not cold(dispatcher(tmp_path))  # another process would find it
    unkept = dispatcher(tmp_path, kept=False)
    assert cold(unkept)
    unkept(2)  # type: ignore[operator]
    assert not cold(unkept)


def test_code_runs_where_no_folder_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(**options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'twice': no locator available for file 'small.py'")
        return nb_njit(**options)

    nb_njit = nb.njit
    monkeypatch.setattr("flashsim.sim.fast_parts.nb.njit", njit)
    assert jit(lambda x: 2 * x)(4) == 8


def test_what_is_cold_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("flashsim.sim.compiled"), "disabled", False)
    caplog.set_level(logging.INFO, "flashsim")
    first, unkept = dispatcher(tmp_path), dispatcher(tmp_path, kept=False)
    announce(first)
    announce(unkept)
    assert caplog.messages == [SENTENCE, UNKEPT]
    first(2)  # type: ignore[operator]
    announce(first)
    assert len(caplog.messages) == 2


def test_one_compiles_while_the_others_wait(tmp_path: Path) -> None:
    first, second = dispatcher(tmp_path), dispatcher(tmp_path)
    began, entered = threading.Event(), threading.Event()

    def other() -> None:
        began.set()
        with once(second):
            entered.set()
            second(2)  # type: ignore[operator]

    thread = threading.Thread(target=other)
    with once(first):
        thread.start()
        assert began.wait(10)
        assert not entered.wait(0.3)
        first(2)  # type: ignore[operator]
    thread.join(10)
    assert entered.is_set()
    hits = [sum(each.stats.cache_hits.values()) for each in (first, second)]  # type: ignore[attr-defined]
    assert hits == [0, 1]


def test_what_fails_lets_the_others_go_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), once(dispatcher(tmp_path)):
        raise ZeroDivisionError
    with once(dispatcher(tmp_path)):
        pass


COMMAND = "import flashsim.sim.compiled as c; c.cold = lambda f: {cold}; from flashsim.cli import main; main()"
SHAPE = ["--gpu", "h100", "--batch", "1", "--heads", "1", "--seqlen", "128", "--head-dim", "64"]


@pytest.mark.parametrize("is_cold", [True, False])
def test_a_command_says_so_on_stderr_and_leaves_json_alone(is_cold: bool) -> None:
    import json

    command = [sys.executable, "-c", COMMAND.format(cold=is_cold), "predict", "fa2", *SHAPE, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["schedule"] == "fa2"
    notes = set(done.stderr.splitlines())
    assert notes == ({f"note: {SENTENCE}"} if is_cold else set())


def test_a_python_program_is_not_told() -> None:
    code = (
        "from flashsim.sim import fast_engine; fast_engine.compiled.cold = lambda f: True; from flashsim import *;"
        "simulate(get_schedule('fa2'), load_gpu('h100'), Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=64))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
