"""L2 and HBM of a whole chip as processor sharing, compiled: SMs that wait are served evenly, each SM's requests in order.

What an SM has been served since the launch began, had it never stopped asking, is a queue's *progress*: it grows by 1 / n while n
SMs wait. A request is done when progress comes to its *mark*. Requests that come later do not move the mark; they put off when
progress is there. So when a load lands is known for certain only afterwards, and before as when it would if nobody else asked.
(Progress is the virtual time of A. Parekh and R. Gallager, "A generalized processor sharing approach to flow control", 1993.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .fast_parts import part, pop, push

L2, HBM = 0, 1
#: Progress and marks are in fractions of a tick of service, UNIT of them a tick; a heap's entry is a mark, then an SM's number.
#: All are powers of two, for which compiled code shifts.
UNIT_BITS, SM_BITS, KEPT_BITS = 16, 12, 15
UNIT = 1 << UNIT_BITS
#: Of a queue: the tick up to which it is known, its progress then, SMs that wait, and how often their number has changed.
NOW, PROGRESS, WAITING, CHANGES, QUEUE_SIZE = range(5)
#: Changes that are kept: when, progress, and how many SMs wait from then on. A latency's worth is asked for.
KEPT = 1 << KEPT_BITS


@part
def _ticks(amount: Any) -> Any:
    """Whole ticks of service that an amount takes, rounded up."""
    return (amount + UNIT - 1) >> UNIT_BITS


@part
def _change(queue: Any, changes: Any) -> None:
    row = changes[queue[CHANGES] & (KEPT - 1)]
    row[0], row[1], row[2] = queue[NOW], queue[PROGRESS], queue[WAITING]
    queue[CHANGES] += 1


@part
def go_on(queue: Any, marks: Any, heap: Any, changes: Any, t: Any) -> None:
    """Serve up to tick ``t``. ``marks``: of each SM's last request; ``heap``: SMs that wait, by a mark not above that one."""
    while queue[WAITING] > 0:
        n, mark, sm = queue[WAITING], heap[0] >> SM_BITS, heap[0] & ((1 << SM_BITS) - 1)
        if marks[sm] > mark:  # it has asked again
            pop(heap, n)
            push(heap, n - 1, marks[sm] << SM_BITS | sm)
            continue
        at = queue[NOW] + _ticks((mark - queue[PROGRESS]) * n)
        if at > t:
            queue[PROGRESS] += (t - queue[NOW]) * UNIT // n
            break
        queue[WAITING] = pop(heap, n)
        queue[NOW], queue[PROGRESS] = at, mark
        _change(queue, changes)
    queue[NOW] = t


@part
def ask(queue: Any, marks: Any, heap: Any, changes: Any, sm: int, cost: Any) -> Any:
    """A request of ``cost`` from an SM at the tick up to which the queue is known; returns its mark."""
    if marks[sm] <= queue[PROGRESS]:
        marks[sm] = queue[PROGRESS] + cost
        queue[WAITING] = push(heap, queue[WAITING], marks[sm] << SM_BITS | sm)
        _change(queue, changes)
    else:
        marks[sm] += cost
    return marks[sm]


@part
def reached(queue: Any, marks: Any, changes: Any, mark: Any) -> Any:
    """The tick at which progress came to ``mark``, or will if nobody asks any more."""
    if mark > queue[PROGRESS]:
        left = np.int64(0)
        for sm in range(marks.shape[0]):
            left += max(np.int64(0), min(marks[sm], mark) - queue[PROGRESS])
        return queue[NOW] + _ticks(left)
    oldest, high = max(np.int64(0), queue[CHANGES] - KEPT), queue[CHANGES]
    low = oldest
    while low < high:  # the last change before it
        middle = (low + high) >> 1
        if changes[middle & (KEPT - 1), 1] < mark:
            low = middle + 1
        else:
            high = middle
    if low == oldest:
        return np.int64(0)  # long ago
    row = changes[(low - 1) & (KEPT - 1)]
    return row[0] + _ticks((mark - row[1]) * row[2])
