"""Compiled code on disk: whether the engine's is there, a line to the log before the minute that compiling it takes, and one
process that compiles while others wait."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOG = logging.getLogger(__name__)
SENTENCE = "compiling the engine: a minute or two, once in an installation"
UNKEPT = "compiling the engine: a minute or two in each process, as no folder for its code can be written (set NUMBA_CACHE_DIR)"


def cold(function: Any) -> bool:
    """Whether a call of ``function``, a numba dispatcher, would compile it: neither this process nor its cache has the code."""
    if function.signatures:
        return False
    folder = function.stats.cache_path
    return folder is None or not any(Path(folder).glob(f"*.{function.py_func.__qualname__}-*.nbi"))


def announce(function: Any) -> None:
    """Log that a call of ``function`` will take long, where it will. Whoever runs the command sees it, libraries stay silent."""
    if cold(function):
        LOG.info(SENTENCE if function.stats.cache_path else UNKEPT)


@contextmanager
def once(function: Any) -> Iterator[None]:
    """Hold this while calling ``function``: of all processes that find it cold one compiles, the others wait and load its code.

    The lock is on the folder that keeps the code and ends with its process. Where none can be had (Windows, some network
    disks) each process compiles for itself.
    """
    announce(function)
    if not cold(function) or function.stats.cache_path is None:
        yield
        return
    folder = os.open(function.stats.cache_path, os.O_RDONLY) if fcntl else None
    try:
        if folder is not None:
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        if folder is not None:
            os.close(folder)
