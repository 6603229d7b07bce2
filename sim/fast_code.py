"""An SM's instruction cache: which stretches of code its warps began last, as many as fit.

A table with a row for each stretch: the next older and the next newer one, AWAY where it is not held, and when the last of its
instructions comes. Two more rows: the ends of that list (newest, oldest), and how many instructions are held. Equal contents in
equal order are equal tables, so that the memo can compare them.
"""

from __future__ import annotations

from typing import Any

from .fast_parts import part

OLDER, NEWER, COMES, TABLE_COLUMNS = range(4)
IN, BEGINS, LEFT_OF = range(3)  # columns of Job.stretch
AWAY = -1


@part
def begin_stretch(table: Any, sizes: Any, capacity: Any, stretch: Any) -> Any:
    """Make ``stretch`` the newest one; 1 where it was not held and is to be fetched."""
    ends, held = sizes.shape[0], sizes.shape[0] + 1
    missing = table[stretch, OLDER] == AWAY
    if missing:
        table[held, 0] += sizes[stretch, 0]
        oldest = table[ends, NEWER]
        while table[held, 0] > capacity and oldest != ends:
            _unlink(table, oldest)
            table[held, 0] -= sizes[oldest, 0]
            table[oldest, OLDER] = table[oldest, NEWER] = AWAY
            oldest = table[ends, NEWER]
    else:
        _unlink(table, stretch)
    newest = table[ends, OLDER]
    table[stretch, OLDER], table[stretch, NEWER] = newest, ends
    table[newest, NEWER] = stretch
    table[ends, OLDER] = stretch
    return 1 if missing else 0


@part
def _unlink(table: Any, stretch: Any) -> None:
    older, newer = table[stretch, OLDER], table[stretch, NEWER]
    table[older, NEWER], table[newer, OLDER] = newer, older
