"""Names that are not known: the nearest that are, and tables that say so in a sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


ALIKE = 0.6  #: share of two names' letters, in order, below which nobody takes one for the other (difflib's own default)
MOST = 4


def meant(name: str, known: Iterable[str]) -> list[str]:
    """The known names that ``name`` most likely means: those that begin with it, or else the nearest. None where none is near."""
    names, typed = list(known), name.lower()
    begun = [each for each in names if typed and each.lower().startswith(typed)]
    if begun:
        return begun[:MOST]
    near = {each: difflib.SequenceMatcher(None, typed, each.lower()).ratio() for each in names}
    best = max(near.values(), default=0.0)
    return [each for each in names if near[each] == best >= ALIKE][:MOST]


def guess(name: str, known: Iterable[str]) -> str:
    """What ends "NAME is unknown": a question after the names that were :func:`meant`, or a full stop."""
    names = meant(name, known)
    if not names:
        return "."
    several = f"{', '.join(names[:-1])} or {names[-1]}" if names[1:] else names[0]
    return f"; did you mean {several}?"


class Table(dict[str, T]):
    """A dict whose lookup of a name that is not there raises ValueError with what it has. ``of``: whose, and what they are."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def __missing__(self, name: str) -> T:
        has = f"{guess(name, self)} It has {', '.join(self)}" if self else "; it has none"
        raise ValueError(f"{self.of} {name!r}{has}")
