"""What the fast engine remembers: segments of an SM's life, from one machine row to another, by the answers from outside.

A segment begins and ends between two events. From a machine row (times taken from the moment's tick) a chain of questions is
kept, one node each, which branches where another answer was given; its last node names the row where the segment ends, how
long it took and what was counted. An SM that stands at a known row walks the chain, asks outside the same questions at the
same ticks, and adds up: nothing else happens, and nothing is approximated. Where an answer is new, the machine runs the
segment from its beginning, is given the answers that it has had, and goes on from there.

This is fast-forwarding by memoisation (Schnarr and Larus, "Fast out-of-order processor simulation using memoization", ASPLOS
1998).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# isort: off
from .fast_layout import (
    BEGAN, DUE, EVENT, HELD, HELD_UP, LAST, MODE, NODE, PATH, PLAIN, QUARTERS, RECORDING, SCRIPT, SEGMENT, TIME, TOTAL,
)  # fmt: skip
# isort: on
from .fast_outside import (
    COMPLETED,
    GROUPS_LEFT,
    LANDED,
    LEAVE,
    RELEASE,
    REQUEST,
    SPILLED,
    answer,
    board_of,
    certain,
    group_of,
    over_of,
)  # fmt: skip
from .fast_parts import NEVER, NEVER_ISSUED, part

LIVE, REPLAY = 0, 1  # State.control's MODE

#: Columns of a node: the question, its tick from the beginning, operands, and the first known answer with the node it leads to;
#: then the first of further answers. A LEAF: rows of `states` and `gains`, ticks that it took, and to its last resume.
KIND, AFTER, A, B, X, Y, VALUE, TO, MORE, NODE_SIZE = range(10)
LEAF = -1
#: Memo.counts: nodes, further answers, states, leaves; whether more is kept.
NODES, EDGES, STATES, LEAVES, KEEPS = range(5)

MOST_ANSWERS = 512  # of one segment
MOST_NODES, MOST_STATES, MOST_LEAVES = 1 << 17, 1 << 12, 1 << 13
TABLE = 1 << 14
PRIME = np.int64(1099511628211)  # of the FNV hash


class Memo(NamedTuple):
    """``states``: machine rows; ``roots``: the first node of each, or -1; ``table``: their numbers by hash; ``gains``: counts."""

    states: Any
    roots: Any
    table: Any
    nodes: Any
    edges: Any
    gains: Any
    counts: Any


def memo(machine_size: int, counted: int, *, keeps: bool, instead_of: Memo | None = None) -> Memo:
    """Empty. Memory is taken as it is used; that of ``instead_of``, which nobody needs any longer, is used again: to touch
    memory for the first time takes as long as to run thousands of events."""
    counts = np.zeros(5, np.int64)
    counts[KEEPS] = keeps
    small = 1 if keeps else 0
    return Memo(
        states=_room(MOST_STATES * small + 1, machine_size, instead_of and instead_of.states),
        roots=np.full(MOST_STATES * small + 1, -1), table=np.full(TABLE, -1),
        nodes=_room(MOST_NODES * small + 1, NODE_SIZE, instead_of and instead_of.nodes),
        edges=_room(MOST_NODES * small + 1, 3, instead_of and instead_of.edges),
        gains=_room(MOST_LEAVES * small + 1, counted, instead_of and instead_of.gains), counts=counts,
    )  # fmt: skip


def _room(rows: int, columns: int, used: Any) -> Any:
    """An array with anything in it, where ``used`` lies if that is large enough."""
    flat = None if used is None else used.base
    if flat is None or len(flat) < rows * columns:
        flat = np.empty(rows * columns, np.int64)
    return flat[: rows * columns].reshape(rows, columns)


@part
def _seen(plan: Any, state: Any, memo: Any, sm: int, t: Any) -> Any:
    """The number of the machine's row as seen from tick ``t``; a new one where it was never seen."""
    m, kinds, number = state.machine[sm], plan.kinds, memo.counts[STATES]
    row, size = memo.states[number], plan.kinds.shape[0]
    digest: Any = np.int64(0)
    for i in range(size):
        value = m[i]
        if kinds[i] == EVENT:
            if value != NEVER:
                value -= t
        elif kinds[i] == TIME:
            value = max(value - t, -1)
        elif kinds[i] == HELD:
            if value != NEVER_ISSUED:
                value += m[plan.first_quarter + quarter_of(plan, i) * plan.quarter_size + HELD_UP] - t
        elif kinds[i] == TOTAL:
            value = 0
        row[i] = value
        digest = (digest ^ value) * PRIME
    place = (digest ^ (digest >> 29)) & (TABLE - 1)
    while memo.table[place] >= 0:
        known = memo.table[place]
        same = True
        for i in range(size):
            if memo.states[known, i] != row[i]:
                same = False
                break
        if same:
            return known
        place = place + 1 if place + 1 < TABLE else 0
    memo.table[place] = number
    memo.roots[number] = -1
    memo.counts[STATES] += 1
    return number


@part
def quarter_of(plan: Any, i: Any) -> Any:
    """The sub-partition that a number of the machine's row belongs to, its own or its warp's."""
    if i >= plan.first_quarter:
        return (i - plan.first_quarter) // plan.quarter_size
    return (i - plan.first_warp) // plan.warp_size % QUARTERS


@part
def _find(memo: Any, node: Any, value: Any) -> Any:
    """Where the answer leads from a node; -1 for an answer that it has not had."""
    nodes = memo.nodes
    if nodes[node, VALUE] == value:
        return nodes[node, TO]
    edge = nodes[node, MORE]
    while edge >= 0:
        if memo.edges[edge, 0] == value:
            return memo.edges[edge, 1]
        edge = memo.edges[edge, 2]
    return -1


@part
def _keep(plan: Any, state: Any, memo: Any, sm: int, t: Any, end: Any) -> None:
    """Add the segment that ends at ``t`` in state ``end`` to the chains of the state where it began."""
    control, path, nodes, counts = state.control[sm], state.path[sm], memo.nodes, memo.counts
    began, node = control[BEGAN], memo.roots[control[SEGMENT]]
    from_node, k = np.int64(-1), 0
    while node >= 0 and k < control[PATH]:
        from_node = node
        node = _find(memo, node, path[k, 6])
        k += 1
    if node >= 0:
        return  # another SM was here
    for j in range(k - 1 if k > 0 else 0, control[PATH] + 1):
        if j == k - 1:  # the known node that has had another answer
            edge = counts[EDGES]
            memo.edges[edge, 0], memo.edges[edge, 1], memo.edges[edge, 2] = path[j, 6], counts[NODES], nodes[from_node, MORE]
            nodes[from_node, MORE] = edge
            counts[EDGES] += 1
            continue
        node = counts[NODES]
        counts[NODES] += 1
        if j == 0:
            memo.roots[control[SEGMENT]] = node
        if j < control[PATH]:
            nodes[node, KIND], nodes[node, AFTER] = path[j, 0], path[j, 1] - began
            nodes[node, A], nodes[node, B], nodes[node, X], nodes[node, Y] = path[j, 2], path[j, 3], path[j, 4], path[j, 5]
            nodes[node, VALUE], nodes[node, TO], nodes[node, MORE] = path[j, 6], node + 1, -1
        else:
            nodes[node, KIND], nodes[node, AFTER] = LEAF, t - began
            nodes[node, A], nodes[node, B], nodes[node, X] = end, counts[LEAVES], control[LAST] - began
            for i in range(memo.gains.shape[1]):
                memo.gains[counts[LEAVES], i] = state.counted[sm, i]
            counts[LEAVES] += 1


@part
def checkpoint(plan: Any, state: Any, memo: Any, sm: int, t: Any) -> Any:
    """Between two events, the next at ``t``: end the segment and begin another; whether the memo knows how it goes on."""
    control, counts = state.control[sm], memo.counts
    room = MOST_ANSWERS + 1
    full = counts[NODES] + room > MOST_NODES or counts[STATES] + 1 > MOST_STATES or counts[LEAVES] + 1 > MOST_LEAVES
    if full:
        counts[KEEPS] = 0
    if counts[KEEPS] == 0:
        control[RECORDING] = control[DUE] = 0
        return False
    number = _seen(plan, state, memo, sm, t)
    if control[SEGMENT] >= 0 and control[PATH] <= MOST_ANSWERS:
        _keep(plan, state, memo, sm, t, number)
    for i in range(state.counted.shape[1]):
        state.totals[sm, i] += state.counted[sm, i]
        state.counted[sm, i] = 0
    control[SEGMENT], control[BEGAN] = number, t
    control[PATH] = control[SCRIPT] = control[DUE] = 0
    control[NODE] = memo.roots[number]
    control[MODE] = REPLAY if control[NODE] >= 0 else LIVE
    return control[MODE] == REPLAY


@part
def _wake(plan: Any, state: Any, memo: Any, sm: int) -> None:
    """Set the machine to where the segment began, and let it run with the answers that it has had."""
    control, m, kinds = state.control[sm], state.machine[sm], plan.kinds
    began, row = control[BEGAN], memo.states[control[SEGMENT]]
    for i in range(kinds.shape[0]):
        alone = kinds[i] == PLAIN or kinds[i] == TOTAL or row[i] in (NEVER, NEVER_ISSUED)
        m[i] = row[i] if alone else row[i] + began
    control[MODE], control[SCRIPT], control[PATH] = LIVE, control[PATH], 0
    control[DUE] = 0
    control[RECORDING] = memo.counts[KEEPS]
    for i in range(state.counted.shape[1]):
        state.counted[sm, i] = 0


@part
def replay(plan: Any, state: Any, memo: Any, sm: int, horizon: Any) -> Any:
    """Walk through known segments, up to a question that comes after ``horizon`` (its key is returned) or a new answer (-1)."""
    control, nodes, path = state.control[sm], memo.nodes, state.path[sm]
    node = control[NODE]
    while True:
        kind, a = nodes[node, KIND], nodes[node, A]
        if kind == LEAF:
            control[LAST] = control[BEGAN] + nodes[node, X]
            control[BEGAN] += nodes[node, AFTER]
            for i in range(state.totals.shape[1]):
                state.totals[sm, i] += memo.gains[nodes[node, B], i]
            control[SEGMENT], control[PATH] = a, 0
            node = memo.roots[a]
            if node < 0:
                break
            continue
        t = control[BEGAN] + nodes[node, AFTER]
        key = order_key(plan, state, sm, t, kind, a, nodes[node, B], nodes[node, X], nodes[node, Y])
        if key > horizon:
            control[NODE] = node
            return key
        value = answer(plan, state, sm, t, kind, a, nodes[node, B], nodes[node, X], nodes[node, Y])
        path[control[PATH], 6] = value
        control[PATH] += 1
        node = _find(memo, node, value)
        if node < 0:
            break
    _wake(plan, state, memo, sm)
    return -1


@part
def order_key(plan: Any, state: Any, sm: int, t: Any, kind: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """The place among all SMs' events of a question that touches what they share; -1 where it does not."""
    if plan.sms > 1:
        if kind == LEAVE:
            order = state.order_of[sm, a]
            last = state.left_of[order] == 1 and not plan.persistent
            if last or (plan.dynamic and plan.persistent and state.follows[order] < 0):
                return event_key(plan, sm, t, a)
        elif plan.chip and kind in (REQUEST, SPILLED):
            return event_key(plan, sm, t, plan.warps + a % QUARTERS)
        elif plan.chip and kind == RELEASE:
            return event_key(plan, sm, t, y)
        elif plan.chip and _delayed(plan, state, sm, kind, a, b):
            return event_key(plan, sm, t, x if kind == COMPLETED else a)
    return np.int64(-1)


@part
def _delayed(plan: Any, state: Any, sm: int, kind: Any, a: Any, b: Any) -> Any:
    """Whether it is asked when something lands that what other SMs ask for may still delay."""
    place = np.int64(-1)
    if kind == GROUPS_LEFT:
        place = group_of(state, sm, a, b)
    elif kind == LANDED:
        place = board_of(a, b)
    elif kind == COMPLETED:
        place = over_of(plan, a, b)
    return place >= 0 and not certain(state, sm, place)


@part
def event_key(plan: Any, sm: int, t: Any, who: Any) -> Any:
    """The place of an event among those of all SMs; ``who``: a warp, or the number of warps plus a sub-partition."""
    warps, keys = plan.sms * plan.warps, plan.sms * (plan.warps + QUARTERS)
    if who < plan.warps:
        return t * keys + sm * plan.warps + who
    return t * keys + warps + sm * QUARTERS + who - plan.warps
