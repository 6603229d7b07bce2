"""Time and error of other models beside flashsim's, on the same measured rows in one run.

    python -m flashsim.validate.bench_peers [FILE.csv] [--pipeweave FOLDER] [--llmcompass FOLDER] [--peer-python PYTHON]

FILE has the columns of ``data/published.csv`` (the default). Nothing is fetched: place a peer's repository yourself and give its
folder. Each peer runs in a process of its own, by ``--peer-python``, which needs what the peer imports:

- PipeWeave (zksainx/pipeweave): torch, numpy, pandas, joblib, scikit-learn. FA2 and FA3 forward, causal.
- LLMCompass (PrincetonUniversity/LLMCompass): torch, numpy, pandas, scalesim. No fused attention: it answers for ``standard``.

A peer answers for the rows that it can model, and rows that no peer models are left out. Seconds are processor time of one
prediction in a process that is loaded and warm (loading is printed beside); flashsim's are of its whole result, without its
timeline. An error is prediction over measurement less one.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from ..model.gpu import load_gpu
from .crosscheck import Case, predict, read_rows, understand
from .verdict import Prediction

PUBLISHED = Path(__file__).with_name("data") / "published.csv"
PROGRAM = Path(__file__).with_name("peer_programs.py")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``chips``: flashsim's name of a chip -> the peer's; ``models``: whether it models a case; ``mark``: a file of its own."""

    name: str
    title: str
    repository: str
    mark: str
    chips: Mapping[str, str]
    models: Callable[[Case], bool]


def _fused(case: Case) -> bool:
    return case.schedule.name in ("fa2", "fa3") and case.attention.causal


PEERS = (
    Peer(
        name="pipeweave", title="PipeWeave", repository="zksainx/pipeweave", mark="aggregator.py",
        chips={"a100-80gb": "A100", "h100": "H100", "h200": "H200"}, models=_fused,
    ),
    Peer(
        name="llmcompass", title="LLMCompass", repository="PrincetonUniversity/LLMCompass", mark="software_model/matmul.py",
        chips={"a100-40gb": "A100_80GB_fp16", "a100-80gb": "A100_80GB_fp16"},
        models=lambda case: case.schedule.name == "standard" and not case.attention.causal,
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A prediction of one row, or why there is none."""

    ms: float = 0.0
    seconds: float = 0.0
    reason: str = ""


def peer_for(case: Case) -> Peer | None:
    """The peer that models a case: forward, 16 bit, as many keys as queries, the schedule's own switches."""
    a = case.attention
    if a.pass_ != "fwd" or a.dtype not in ("fp16", "bf16") or a.head_dim != a.head_dim_v or a.seqlen_q != a.seqlen_kv:
        return None
    return next((peer for peer in PEERS if case.gpu in peer.chips and peer.models(case)), None)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row that a peer models: what it is called, what is predicted, by which peer, and what was measured."""

    label: str
    case: Case
    peer: Peer
    ms: float


def comparable(path: Path) -> list[Measured]:
    """The file's rows that a peer models. Raises ValueError where there are none."""
    rows = []
    for row in (understand(each, gpu=None, engine="fast") for each in read_rows(path)):
        case, ms = row.case, (row.measured or {}).get("ms")
        if case and ms and not row.cells.get("variant") and (peer := peer_for(case)):
            label = f"{case.gpu} {case.schedule.name} {row.label or case.attention.label}"
            rows.append(Measured(label=label, case=case, peer=peer, ms=float(ms)))
    if not rows:
        raise ValueError(f"{path} has no row that a peer models: forward fa2 or fa3 with a causal mask, or standard on A100")
    return rows


def ask_flashsim(cases: Sequence[Case]) -> Iterator[Answer]:
    """One after the other in this process; the first is predicted before it is timed, since the engine is then loaded."""
    predict(cases[0])
    for case in cases:
        began = time.process_time()  # neighbours on a shared machine do not count
        found = predict(case)
        seconds = time.process_time() - began
        yield Answer(ms=found.ms, seconds=seconds) if isinstance(found, Prediction) else Answer(reason=found)


def ask_peer(peer: Peer, folder: Path, python: str, cases: Sequence[Case], limit_s: float) -> tuple[float, list[Answer]]:
    """(seconds to load, an Answer a case) of a peer in its own process, ended after ``limit_s``.

    Raises ValueError, in one sentence, where the peer is not there or does not start.
    """
    folder = folder.resolve()
    if not (folder / peer.mark).is_file():
        raise ValueError(
            f"{folder} is not {peer.title}: it has no {peer.mark}; clone {peer.repository} and give its folder by --{peer.name}"
        )
    shapes = json.dumps([_shape(peer, case) for case in cases])
    command = [python, str(PROGRAM), peer.name, str(folder)]
    try:
        done = subprocess.run(command, input=shapes, capture_output=True, text=True, timeout=limit_s, check=False)
        out, err = done.stdout, done.stderr
    except subprocess.TimeoutExpired as ended:
        out, err = _text(ended.stdout), f"it was ended after {limit_s:.0f} s"
    except OSError as error:
        raise ValueError(f"--peer-python {python} cannot be run: {(error.strerror or str(error)).lower()}") from None
    lines = [json.loads(line) for line in out.splitlines()]
    if not lines:
        said = err.strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"{peer.title} does not start with {python}: {said[0]}")
    answers = [Answer(reason="not asked in the time given: raise --seconds")] * len(cases)
    for line in lines[1:]:
        answers[line["index"]] = Answer(**{name: line[name] for name in ("ms", "seconds", "reason") if name in line})
    return float(lines[0]["ready_s"]), answers


def _text(out: bytes | str | None) -> str:
    """Whole lines of what was written so far."""
    text = out.decode() if isinstance(out, bytes) else out or ""
    return text[: text.rfind("\n") + 1]


def _shape(peer: Peer, case: Case) -> dict[str, Any]:
    a = case.attention
    return {
        "peer_gpu": peer.chips[case.gpu], "hbm_bytes_per_s": float(load_gpu(case.gpu).hbm.peak_bytes_per_s),
        "kernel": case.schedule.name, "batch": a.batch, "heads_q": a.heads_q, "heads_kv": a.heads_kv, "seqlen_q": a.seqlen_q,
        "seqlen_kv": a.seqlen_kv, "head_dim": a.head_dim, "causal": a.causal,
    }  # fmt: skip


def _error(answer: Answer, measured: float) -> float:
    return 100 * (answer.ms / measured - 1)


def _cells(answer: Answer | None, measured: float) -> tuple[str, str, str]:
    if answer is None or answer.reason:
        return "-", "-", "-"
    return f"{answer.ms:.4g}", f"{_error(answer, measured):+.1f} %", _seconds(answer.seconds)


def _seconds(s: float) -> str:
    return f"{1e3 * s:.3g} ms" if s < 1 else f"{s:.3g} s"


def summary(pairs: Sequence[tuple[Answer, float]]) -> tuple[str, str, str, str]:
    """(rows, mean absolute error, worst error, median seconds) of (answer, measured ms)."""
    good = [(answer, measured) for answer, measured in pairs if not answer.reason]
    if not good:
        return "0", "-", "-", "-"
    errors = [_error(answer, measured) for answer, measured in good]
    took = median(answer.seconds for answer, _ in good)
    return str(len(good)), f"{mean(map(abs, errors)):.1f} %", f"{max(errors, key=abs):+.1f} %", _seconds(took)


def show(console: Console, rows: Sequence[Measured], own: Sequence[Answer], theirs: Sequence[Answer | None]) -> None:
    """One line a row, then both models over the rows that both predicted."""
    table = Table(*("row", "peer", "measured ms"), title="prediction, error, time of one prediction", title_justify="left")
    for head in ("flashsim ms", "error", "took", "peer ms", "error", "took"):
        table.add_column(head, justify="right", no_wrap=True)
    for row, mine, other in zip(rows, own, theirs, strict=True):
        table.add_row(row.label, row.peer.title, f"{row.ms:.4g}", *_cells(mine, row.ms), *_cells(other, row.ms))
    console.print(table)
    sums = Table("model", "against", title="over the rows that both predicted", title_justify="left")
    for head in ("rows", "mean absolute error", "worst", "median time"):
        sums.add_column(head, justify="right")
    for peer in PEERS:
        both = [
            (mine, other, row.ms)
            for row, mine, other in zip(rows, own, theirs, strict=True)
            if row.peer is peer and not mine.reason and other is not None and not other.reason
        ]
        if both:
            sums.add_row(peer.title, "", *summary([(other, ms) for _, other, ms in both]))
            sums.add_row("flashsim", peer.title, *summary([(mine, ms) for mine, _, ms in both]))
    sums.add_row("flashsim", "all rows", *summary([(mine, row.ms) for row, mine in zip(rows, own, strict=True)]))
    console.print(sums)


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 2 where a peer that was given did not answer, or FILE cannot be used. flashsim's rows are printed in any case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=PUBLISHED)
    for peer in PEERS:
        parser.add_argument(f"--{peer.name}", type=Path, metavar="FOLDER", help=f"a clone of {peer.repository}")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON", help="has what the peers import")
    parser.add_argument("--seconds", type=float, default=1800.0, help="time that a peer may take [%(default)s]")
    asked = parser.parse_args(arguments)
    console, failed = Console(width=None if sys.stdout.isatty() else 160), 0
    try:
        rows = comparable(asked.file)
    except (OSError, ValueError) as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return 2
    console.print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}; rows of {asked.file.name}")
    own = list(ask_flashsim([row.case for row in rows]))
    theirs: list[Answer | None] = [None] * len(rows)
    for peer in PEERS:
        places = [i for i, row in enumerate(rows) if row.peer is peer]
        folder = getattr(asked, peer.name)
        if folder is None:
            print(f"{peer.title} is not asked: clone {peer.repository} and give its folder by --{peer.name}", file=sys.stderr)
            continue
        try:
            ready, answers = ask_peer(peer, folder, asked.peer_python, [rows[i].case for i in places], asked.seconds)
        except ValueError as error:
            print(f"bench_peers: {error}", file=sys.stderr)
            failed = 2
            continue
        console.print(f"{peer.title}: loaded in {ready:.1f} s")
        for reason in dict.fromkeys(answer.reason for answer in answers if answer.reason):
            print(f"{peer.title}: {sum(a.reason == reason for a in answers)} rows: {reason}", file=sys.stderr)
        for place, answer in zip(places, answers, strict=True):
            theirs[place] = answer
    show(console, rows, own, theirs)
    return failed


if __name__ == "__main__":
    sys.exit(main())
