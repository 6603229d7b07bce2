"""Time attention kernels as ``triton.testing.do_bench`` does, with the SMs' own clock beside each time; one CSV row a shape.

A user's time is taken between two events around one launch, behind 256 MiB of zeros that empty L2. Three ways, so that what
each adds can be told apart: ``do_bench_ms`` by Triton's own function; ``stamped_ms`` by the same loop with clock stamps
(``microbench/stamp.cu``) before the first event and behind the second one, which tell ``sm_clock_mhz`` of the launch; ``loop_ms``
and ``loop_mhz`` of launches that follow each other with nothing between; ``graph_ms`` of do_bench's loop around a captured
launch, which needs no more of the host than 10 us. All are medians; cases follow each other without a rest. ``nothing`` is an
event pair around no launch, ``stamp`` around one warp an SM: what events and a launch cost alone.

    python -m flashsim.validate.profile_do_bench --library libstamp.so > do_bench.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .profile_sustained import Case, Stamps, attention

#: What empties L2, and about how long it takes.
FLUSH_BYTES, FLUSH_MS = 256 << 20, 0.1
#: Milliseconds of launches that are timed, and that go before.
TIMED_MS, WARM_MS = 100.0, 25.0
SHAPE = ("batch", "heads_q", "seqlen_q", "head_dim", "causal", "dtype", "variant")
FOUND = (
    "do_bench_ms",
    "graph_ms",
    "stamped_ms",
    "sm_clock_mhz",
    "loop_ms",
    "loop_mhz",
    "launches",
    "event_least_ms",
    "event_most_ms",
)
COLUMNS = ("gpu", "kernel", "pass", *SHAPE, *FOUND)
#: (batch, heads, seqlen, head_dim): 16,384 tokens by sequence length, and launches of a wave or two.
TOKENS = 16384
LENGTHS = {64: (32, (512, 1024, 2048, 4096)), 128: (16, (256, 512, 1024, 2048, 4096, 8192)), 256: (8, (512, 1024, 2048, 4096))}
SMALL = ((1, 16, 512, 128), (1, 16, 1024, 128), (1, 16, 2048, 128), (1, 32, 2048, 64), (2, 8, 1024, 256), (1, 16, 4096, 128))


def shapes(kernel: str) -> Iterator[tuple[int, int, int, int, bool, str]]:
    """(batch, heads, seqlen, head_dim, causal, dtype), chosen beforehand."""
    for dtype in ("bf16", "fp8") if kernel == "fa3" else ("bf16",):
        for head_dim, (heads, lengths) in LENGTHS.items():
            for causal in (False, True) if dtype == "bf16" else (False,):
                for seqlen in lengths:
                    yield TOKENS // seqlen, heads, seqlen, head_dim, causal, dtype
        for batch, heads, seqlen, head_dim in SMALL if dtype == "bf16" else ():
            yield batch, heads, seqlen, head_dim, False, dtype


def cases() -> Iterator[Case]:
    """Both kernels by shape, behind a launch of next to nothing."""
    for kernel in ("fa3", "fa2"):
        for b, h, n, d, causal, dtype in shapes(kernel):
            make = lambda a=(kernel, b, h, n, d, causal, dtype): attention(*a)  # noqa: E731
            yield Case(kernel=kernel, make=make, batch=b, heads=h, seqlen=n, head_dim=d, causal=causal, dtype=dtype)


def timed(launch: Callable[[], Any], flush: Callable[[], Any], count: int, stamps: Stamps) -> tuple[list[float], list[float]]:
    """Milliseconds between the events of each launch, and MHz between its stamps."""
    import torch  # type: ignore[import-not-found, unused-ignore]

    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    stamps.used = 0
    for begin, end in events:
        flush()
        stamps.take()
        begin.record()
        launch()
        end.record()
        stamps.take()
    torch.cuda.synchronize()
    _, mhz = stamps.clocks()
    return [begin.elapsed_time(end) for begin, end in events], [float(each) for each in mhz[::2]]


def looped(launch: Callable[[], Any], count: int, stamps: Stamps) -> tuple[float, float]:
    """Milliseconds a launch and MHz of launches that follow each other."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stamps.used = 0
    stamps.take()
    begin.record()
    for _ in range(count):
        launch()
    end.record()
    stamps.take()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count, float(stamps.clocks()[1][0])


def captured(launch: Callable[[], Any]) -> Callable[[], Any]:
    """The launch as a CUDA graph."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def replay() -> None:
        graph.replay()

    return replay


def measure(case: Case, chip: str, stamps: Stamps, flush: Callable[[], Any]) -> list[Any]:
    """The row of one case."""
    import torch
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

    launch = case.make()
    launch()
    torch.cuda.synchronize()
    about = triton.testing.do_bench(launch, warmup=5, rep=20, return_mode="median")
    count = max(10, int(TIMED_MS / (about + FLUSH_MS)))
    timed(launch, flush, count // 4, stamps)
    milliseconds, mhz = timed(launch, flush, count, stamps)
    by_triton = triton.testing.do_bench(launch, warmup=WARM_MS, rep=TIMED_MS, return_mode="median")
    graph_ms = 0.0
    if case.batch:
        graph_ms = triton.testing.do_bench(captured(launch), warmup=WARM_MS, rep=TIMED_MS, return_mode="median")
    loop_ms, loop_mhz = looped(launch, max(10, int(TIMED_MS / max(about, 0.01))), stamps)
    shape = [case.batch, case.heads, case.seqlen, case.head_dim, int(case.causal), case.dtype, case.variant]
    found = [by_triton, graph_ms, statistics.median(milliseconds), statistics.median(mhz), loop_ms, loop_mhz, len(mhz)]
    return [chip, case.kernel, "fwd", *shape, *(f"{x:.6g}" for x in (*found, min(milliseconds), max(milliseconds)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gpu", default="h200", help="the chip file's name for what this machine has")
    parser.add_argument("--library", type=Path, required=True, help="libstamp.so, built from microbench/stamp.cu")
    arguments = parser.parse_args()
    import torch

    stamps = Stamps(arguments.library, 2048)
    alone = Stamps(arguments.library, 2)
    zeros = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def one_stamp() -> None:
        alone.used = 0
        alone.take()

    out = csv.writer(sys.stdout)
    out.writerow(COLUMNS)
    around = {"nothing": lambda: lambda: None, "stamp": lambda: one_stamp}
    for case in (*(Case(kernel=name, make=make) for name, make in around.items()), *cases()):
        try:
            out.writerow(measure(case, arguments.gpu, stamps, zeros.zero_))
        except (RuntimeError, ImportError) as error:
            print(f"{case}: {error}", file=sys.stderr)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
