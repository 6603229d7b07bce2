"""L2 and HBM of a whole chip as processor sharing, compiled: SMs that wait are served evenly, each SM's requests in order.

What an SM has been served since the launch began, had it never stopped asking, is a queue's *progress*: it grows by 1 / n while n
SMs wait. A request is done when progress comes to its *mark*. Requests that come later do not move the mark; they put off when
progress is there. So when a load lands is known for certain only afterwards, and before as when it would if nobody else asked.
(Progress is the virtual time of A. Parekh and R. Gallager, "A generalized processor sharing approach to flow control", 1993.)

An SM that reads what others have asked for already *rides* along: what it asks for next is served after their mark, and up to
there it is not among those that wait. Its ride lies in progress from the end of its own requests to that mark. At any moment at
least one SM waits: where a ride ends somebody's request does, before which that SM may ride in its turn, but to an earlier mark.
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
#: Of a queue: the tick up to which it is known, its progress then, SMs that wait or ride, how often the number of those that wait
#: has changed, how many ride, and how many beginnings and ends of rides are to come.
NOW, PROGRESS, THERE, CHANGES, RIDING, TURNS, QUEUE_SIZE = range(7)
#: Changes that are kept: when, progress, and how many SMs wait from then on. A latency's worth is asked for.
KEPT = 1 << KEPT_BITS
#: Beginnings and ends of rides that may be to come, for each SM there is; with more, a request follows the SM's own at once.
MOST_TURNS = 32


@part
def _ticks(amount: Any) -> Any:
    """Whole ticks of service that an amount takes, rounded up."""
    return (amount + UNIT - 1) >> UNIT_BITS


@part
def _change(queue: Any, changes: Any) -> None:
    row = changes[queue[CHANGES] & (KEPT - 1)]
    row[0], row[1], row[2] = queue[NOW], queue[PROGRESS], queue[THERE] - queue[RIDING]
    queue[CHANGES] += 1


@part
def go_on(queue: Any, marks: Any, heap: Any, turns: Any, changes: Any, t: Any) -> None:
    """Serve up to tick ``t``.

    ``marks``: of each SM's last request; ``heap``: SMs that wait or ride, by a mark not above that one; ``turns``: marks at which
    rides begin and end, twice the mark and 1 for an end.
    """
    while queue[THERE] > 0:
        mark, sm = heap[0] >> SM_BITS, heap[0] & ((1 << SM_BITS) - 1)
        if marks[sm] > mark:  # it has asked again
            pop(heap, queue[THERE])
            push(heap, queue[THERE] - 1, marks[sm] << SM_BITS | sm)
            continue
        turn = queue[TURNS] > 0 and turns[0] >> 1 <= mark
        if turn:
            mark = turns[0] >> 1
        n = queue[THERE] - queue[RIDING]
        at = queue[NOW] + _ticks((mark - queue[PROGRESS]) * n)
        if at > t:
            queue[PROGRESS] += (t - queue[NOW]) * UNIT // n
            break
        if turn:
            queue[RIDING] += 1 - 2 * (turns[0] & 1)
            queue[TURNS] = pop(turns, queue[TURNS])
        else:
            queue[THERE] = pop(heap, queue[THERE])
        queue[NOW], queue[PROGRESS] = at, mark
        _change(queue, changes)
    queue[NOW] = t


@part
def ask(queue: Any, marks: Any, heap: Any, turns: Any, changes: Any, sm: int, cost: Any, ride: Any) -> Any:
    """A request of ``cost`` from an SM, at the tick up to which the queue is known, after a ``ride`` to a mark; its own mark."""
    idle = marks[sm] <= queue[PROGRESS]
    if idle:
        marks[sm] = queue[PROGRESS]
    if ride > marks[sm] and queue[TURNS] + 2 <= MOST_TURNS * marks.shape[0]:
        if idle:
            queue[RIDING] += 1
        else:
            queue[TURNS] = push(turns, queue[TURNS], marks[sm] << 1)
        queue[TURNS] = push(turns, queue[TURNS], ride << 1 | 1)
        marks[sm] = ride
    marks[sm] += cost
    if idle:
        queue[THERE] = push(heap, queue[THERE], marks[sm] << SM_BITS | sm)
        _change(queue, changes)
    return marks[sm]


@part
def reached(queue: Any, marks: Any, turns: Any, changes: Any, mark: Any) -> Any:
    """The tick at which progress came to ``mark``, or will if nobody asks any more."""
    if mark > queue[PROGRESS]:
        left = np.int64(0)
        for sm in range(marks.shape[0]):
            left += max(np.int64(0), min(marks[sm], mark) - queue[PROGRESS])
        for i in range(queue[TURNS]):
            ridden = min(turns[i] >> 1, mark) - queue[PROGRESS]
            left += ridden if turns[i] & 1 == 0 else -ridden
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
