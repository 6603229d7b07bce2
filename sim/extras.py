"""Libraries that only some commands need, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any


def extra(module: str, name: str, purpose: str) -> Any:
    """The library ``module``. Raises ValueError, naming the extra ``name`` to install, where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        library = module.partition(".")[0]
        raise ValueError(f"{purpose} needs {library}, which is not installed: pip install '.[{name}]'") from None
