"""Many independent calls over a ``concurrent.futures`` executor: this process, local processes or a Dask cluster.

    with local(jobs=2) as workers:
        for item, answer in workers.answers(function, items): ...

Answers come as they are ready. A worker that dies loses nothing: what it held is asked again, one item at a time; an item whose
worker dies each time is answered with :class:`Died` and the others go on.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from multiprocessing import get_context
from typing import Any

from .extras import extra

IN_FLIGHT = 3  # calls under way a worker: one runs, two wait, so that none idles
TOGETHER_S, MOST_TOGETHER = 0.1, 32  # neighbours go to a worker in one call, as many as take about so long
ALONE = 2  # times that an item whose worker died is tried by itself
DEATHS = 3  # items lost before any answer came: then something is wrong with the workers, not with the items
ANSWER_S = 10  # how long a Dask scheduler, and its first worker, may take to answer


@dataclass(frozen=True)
class Died:
    """Stands for an answer: every worker that took the item died (out of memory, or a crash in compiled code)."""

    times: int


class Inline(Executor):
    """Calls in this process, at once: for one job, and for debuggers."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass(kw_only=True)
class Workers:
    """``start`` makes the executor, at first use and again after its death; ``width``: how many calls run at a time."""

    start: Callable[[], Executor]
    width: int
    lost: tuple[type[BaseException], ...] = (BrokenExecutor,)
    _executor: Executor | None = field(default=None, init=False)

    def answers(
        self, function: Callable[[Any], Any], items: Iterable[Any], *, family: Callable[[Any], Any] | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """(item, ``function(item)``) in the order of completion. ``function`` is pickled once; ``items`` are drawn as needed.

        ``family``: short neighbours share a call, so that one worker has what they have in common, and those with the same value
        of it are kept together. Raises ValueError where the workers die before any of them answers, and what ``function`` itself
        raises.
        """
        payload = pickle.dumps(function)
        source, flying, suspects = _Source(items, family), dict[Future[Any], tuple[Any, ...]](), list[Any]()
        answered, deaths, more, size = False, 0, True, 1
        while True:
            while more and not suspects and len(flying) < self.window:
                some = source.draw(size)
                more = bool(some)
                if some:
                    flying[self._submit(payload, some)] = some
            if not flying and not suspects:
                return
            if not flying:
                item = suspects.pop(0)
                answer = self._alone(payload, item)
                deaths += isinstance(answer, Died)
                if deaths >= DEATHS and not answered:
                    raise ValueError(
                        f"{deaths} workers died before any gave an answer: free memory, or use --jobs 1 to see what happens"
                    )
                answered |= not isinstance(answer, Died)
                yield item, answer
                continue
            done, _ = wait(flying, return_when=FIRST_COMPLETED)
            ready = list[tuple[Any, Any]]()
            for future in done:
                some = flying.pop(future)
                try:
                    found, seconds = future.result()
                except self.lost:
                    suspects += some
                except CancelledError:
                    raise ValueError("the Dask scheduler went away before the last answer: run again, with --resume") from None
                except ImportError as error:
                    raise ValueError(f"a worker cannot run flashsim ({error}): install the same version there") from None
                else:
                    ready += zip(some, found, strict=True)
                    size = _size(len(some), seconds) if family and self.width > 1 else 1
            answered |= bool(ready)
            yield from ready

    @property
    def window(self) -> int:
        """Calls under way at a time."""
        return 1 if self.width == 1 else IN_FLIGHT * self.width

    def close(self, *, wait: bool = True) -> None:
        """Let the executor go; with ``wait=False`` without what is still under way."""
        if isinstance(self._executor, ProcessPoolExecutor):
            self._executor.shutdown(wait=wait, cancel_futures=True)
        elif self._executor is not None:  # Dask's cancels where it does not wait
            self._executor.shutdown(wait=wait)
        self._executor = None

    def _submit(self, payload: bytes, some: tuple[Any, ...]) -> Future[Any]:
        for _ in range(ALONE):
            if self._executor is None:
                self._executor = self.start()
            try:
                return self._executor.submit(_call, payload, some)
            except BrokenExecutor:
                self.close(wait=False)
        self._executor = self.start()
        return self._executor.submit(_call, payload, some)

    def _alone(self, payload: bytes, item: Any) -> Any:
        """Ask again with nothing else under way, so that a death tells which item caused it."""
        for _ in range(ALONE):
            try:
                ((answer,), _) = self._submit(payload, (item,)).result()
                return answer
            except self.lost:
                continue
        return Died(ALONE + 1)


def _call(payload: bytes, some: tuple[Any, ...]) -> tuple[list[Any], float]:
    """Answers, and the seconds that they took."""
    function, began = _function(payload), time.perf_counter()
    return [function(item) for item in some], time.perf_counter() - began


def _size(answered: int, seconds: float) -> int:
    """Neighbours of the next call, after one of so many that took so long: some of them may have had nothing to do, so no more
    than twice as many."""
    return max(1, min(MOST_TOGETHER, 2 * answered, int(answered / max(seconds, 1e-6) * TOGETHER_S)))


class _Source:
    """Items one after the other, in calls that part families as seldom as their size allows."""

    def __init__(self, items: Iterable[Any], family: Callable[[Any], Any] | None) -> None:
        self.items, self.family = iter(items), family
        self.first: list[Any] = []  # drawn already: the next family's first

    def draw(self, size: int) -> tuple[Any, ...]:
        """The next ``size`` items, and of several the rest of the last one's family, up to twice as many; none at the end."""
        some = [*self.first, *islice(self.items, size - len(self.first))]
        self.first = []
        if self.family and 1 < size == len(some):
            for item in self.items:
                if len(some) == 2 * size or self.family(item) != self.family(some[-1]):
                    self.first = [item]
                    break
                some.append(item)
        return tuple(some)


@lru_cache(maxsize=4)
def _function(payload: bytes) -> Callable[[Any], Any]:
    function: Callable[[Any], Any] = pickle.loads(payload)
    return function


def default_jobs() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def local(jobs: int) -> Iterator[Workers]:
    """``jobs`` processes of this machine; one job runs in this process. Raises ValueError for less than one."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be a whole number of at least 1: change --jobs")
    start: Callable[[], Executor] = Inline
    if jobs > 1:
        _compile_here()
        start = partial(ProcessPoolExecutor, jobs, mp_context=get_context("spawn"), initializer=_warm)
    yield from _closing(Workers(start=start, width=jobs))


@contextmanager
def dask(address: str) -> Iterator[Workers]:
    """The workers of the Dask scheduler at ``address``; they need the same flashsim installed. Raises ValueError where no
    scheduler or worker answers within ANSWER_S seconds."""
    distributed = extra("distributed", "dask", "--dask")
    try:
        client = distributed.Client(address, timeout=ANSWER_S, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"no Dask scheduler answers at {address!r} ({reason}): check --dask, as in tcp://host:8786") from None
    try:
        try:
            client.wait_for_workers(1, timeout=ANSWER_S)
        except TimeoutError:
            raise ValueError(f"the Dask scheduler at {address!r} has no workers: start some, then run again") from None
        workers = Workers(
            start=partial(client.get_executor, pure=False),
            width=max(2, sum(client.ncores().values())),
            lost=(BrokenExecutor, distributed.KilledWorker),
        )
        yield from _closing(workers)
    finally:
        client.close()


def _closing(workers: Workers) -> Iterator[Workers]:
    try:
        yield workers
    except BaseException:
        workers.close(wait=False)
        raise
    workers.close()


def _compile_here() -> None:
    """Compile the engine once, where it has to be: without this each process would, all at the same time."""
    from . import fast_engine

    if fast_engine.cold():
        _first_run()


def _warm() -> None:
    """In a new process: load the engine from its cache before the first item; Ctrl-C ends the process without a trace.

    What has been loaded until then stays for good: the collector of garbage, which would look through all of it every few dozen
    candidates, leaves it aside.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _first_run()
    gc.freeze()


def _first_run() -> None:
    """The shortest simulation: what is compiled is loaded, or compiled."""
    from ..model.attention import Attention
    from ..model.gpu import GPUS, load_gpu
    from ..model.schedules import get_schedule
    from .predict import simulate

    simulate(get_schedule("fa2"), load_gpu(GPUS[-1]), Attention(batch=1, heads_q=1, seqlen_q=128, head_dim=64))
