"""L2 and HBM as queues that serve SMs evenly: rides, and both engines' queues against each other."""

from __future__ import annotations

import random
from typing import Any

import numba as nb
import numpy as np
import pytest

from flashsim.sim import fast_share
from flashsim.sim.fast_share import KEPT, MOST_TURNS, QUEUE_SIZE, UNIT
from flashsim.sim.reference_memory import Share

SMS = 3


# Parts of the engine have no wrapper by which Python could call them.


@nb.njit
def go_on(queue: Any, marks: Any, heap: Any, turns: Any, changes: Any, tick: int) -> None:
    fast_share.go_on(queue, marks, heap, turns, changes, tick)


@nb.njit
def ask(queue: Any, marks: Any, heap: Any, turns: Any, changes: Any, sm: int, cost: int, ride: int) -> Any:
    return fast_share.ask(queue, marks, heap, turns, changes, sm, cost, ride)


@nb.njit
def reached(queue: Any, marks: Any, turns: Any, changes: Any, mark: int) -> Any:
    return fast_share.reached(queue, marks, turns, changes, mark)


class Fast:
    """The compiled queue, called as the reference's."""

    def __init__(self, sms: int) -> None:
        self.queue, self.marks = np.zeros(QUEUE_SIZE, np.int64), np.zeros(sms, np.int64)
        self.heap, self.turns = np.zeros(sms + 1, np.int64), np.zeros(MOST_TURNS * sms + 1, np.int64)
        self.changes = np.zeros((KEPT, 3), np.int64)

    def go_on(self, tick: int) -> None:
        go_on(self.queue, self.marks, self.heap, self.turns, self.changes, tick)

    def ask(self, sm: int, cost: int, ride: int) -> int:
        return int(ask(self.queue, self.marks, self.heap, self.turns, self.changes, sm, cost, ride))

    def reached(self, mark: int) -> int:
        return int(reached(self.queue, self.marks, self.turns, self.changes, mark))


def both(sms: int = SMS) -> tuple[Any, Any]:
    return Share([[] for _ in range(sms)]), Fast(sms)


@pytest.mark.parametrize("queue", both())
def test_who_rides_is_served_after_what_it_rides_with(queue: Any) -> None:
    """SM 0 asks for 100 ticks, SM 1 rides along and then wants 50, SM 2 wants 100 of its own."""
    first = queue.ask(0, 100 * UNIT, 0)
    assert queue.reached(first) == 100
    second = queue.ask(1, 50 * UNIT, first)
    assert second == first + 50 * UNIT
    assert queue.reached(first) == 100, "who rides takes nothing from the fill"
    assert queue.reached(second) == 150
    own = queue.ask(2, 100 * UNIT, 0)
    assert queue.reached(own) == queue.reached(first) == 200
    assert queue.reached(second) == 250
    queue.go_on(220)
    assert queue.reached(first) == 200
    assert queue.reached(second) == 250


@pytest.mark.parametrize("queue", both())
def test_a_ride_leaves_the_others_what_the_rider_does_not_use(queue: Any) -> None:
    """SM 1's own 30 ticks, then a ride to SM 0's 100: from progress 30 on SM 0 is alone."""
    first = queue.ask(0, 100 * UNIT, 0)
    own = queue.ask(1, 30 * UNIT, 0)
    last = queue.ask(1, 10 * UNIT, first)
    assert [queue.reached(mark) for mark in (own, first, last)] == [60, 130, 140]
    queue.go_on(70)
    assert [queue.reached(mark) for mark in (own, first, last)] == [60, 130, 140]


@pytest.mark.parametrize("seed", range(20))
def test_both_queues_tell_the_same(seed: int) -> None:
    """Any requests and rides: marks, and when progress came or comes to each."""
    draw, (reference, fast), now, marks = random.Random(seed), both(), 0, [0]
    for _ in range(400):
        now += draw.choice((0, 0, 0, 1, 7, 60))
        sm, cost, ride = draw.randrange(SMS), draw.randrange(1, 40 * UNIT), draw.choice((0, draw.choice(marks[-12:])))
        for queue in (reference, fast):
            queue.go_on(now)
        asked = {queue.ask(sm, cost, ride) for queue in (reference, fast)}
        assert len(asked) == 1
        marks += asked
        seen = draw.choice(marks[-30:])
        assert reference.reached(seen) == fast.reached(seen)


@pytest.mark.parametrize("queue", both(2))
def test_rides_beyond_those_that_are_kept_follow_at_once(queue: Any) -> None:
    """SM 1 asks for a tick after each of SM 0's requests of 10: each but the first ride begins and ends after what is served."""
    kept = (2 * MOST_TURNS - 1) // 2 + 1  # that of an SM that asks for nothing yet has begun already
    marks, own = [queue.ask(0, 10 * UNIT, 0) for _ in range(kept + 5)], []
    for mark in marks:
        own.append(queue.ask(1, UNIT, mark))
    assert own[:kept] == [mark + UNIT for mark in marks[:kept]]
    assert own[kept:] == [own[kept - 1] + (i + 1) * UNIT for i in range(5)]
    assert queue.reached(marks[-1]) == 10 * len(marks) + len(own)
