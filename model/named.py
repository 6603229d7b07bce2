"""Names that are not known: the nearest one that is, and tables that say so in a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that ``name`` most likely means. There must be one."""
    names = list(known)
    return (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or names)[0]


class Table(dict[str, T]):
    """A dict whose lookup of a name that is not there raises ValueError with what it has. ``of``: whose, and what they are."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def __missing__(self, name: str) -> T:
        has = f"did you mean {nearest(name, self)}? It has {', '.join(self)}" if self else "it has none"
        raise ValueError(f"{self.of} {name!r}; {has}")
