"""Compiled code on disk: whether the engine's is there, and a line to the log before the minute that compiling it takes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

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
