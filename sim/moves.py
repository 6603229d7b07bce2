"""What a modulo schedule does otherwise than the code it was made from, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..model.program import Program
from .dependence import PRODUCTS, Dependence
from .modulo import Placed, Schedule

#: Cycles, as a share of the shorter operation, from which two operations count as one under the other.
UNDER = 0.25
#: Operations of less than this share of the interval are not told in orders.
SHORT = 0.03


def blocks(program: Program, depends: Sequence[Dependence]) -> dict[int, int]:
    """For each statement of the loop, which block it works on in trip i: i plus this number.

    Read along dependences from the products that begin a block's work (those that do not add to what they write).
    """
    heads = [
        i for i, s in enumerate(program.statements)
        if s.kind in PRODUCTS and not s.attrs.get("accumulate") and any(d.before == i for d in depends)
    ]  # fmt: skip
    offset = dict.fromkeys(heads, 0)
    ahead = list(heads)
    while ahead:
        at = ahead.pop(0)
        for d in sorted(depends, key=lambda d: d.distance):
            if d.before == at and not d.buffer and d.after not in offset:
                offset[d.after] = offset[at] - d.distance
                ahead.append(d.after)
    for d in depends:  # loads, which come before what begins a block
        if d.after in offset and not d.buffer:
            offset.setdefault(d.before, offset[d.after] + d.distance)
    return offset


def overlaps(schedule: Schedule, a: Placed, b: Placed) -> int:
    """Cycles in which both run, in the interval that repeats."""
    period = schedule.interval
    return sum(
        max(0, min(a.start + a.cycles, b.start + turn * period + b.cycles) - max(a.start, b.start + turn * period))
        for turn in (-1, 0, 1)
    )


def products(schedule: Schedule) -> list[Placed]:
    return [p for p in schedule.placed if p.operation.kind == "product" or _multiplies(p)]


def vectors(schedule: Schedule) -> list[Placed]:
    return [p for p in schedule.placed if p.operation.kind == "vector" and not _multiplies(p)]


def _multiplies(p: Placed) -> bool:
    return p.operation.kind == "vector" and p.operation.name.startswith(("Q K^T", "P V"))


def moves(program: Program, schedule: Schedule, depends: Sequence[Dependence], own: Schedule | None = None) -> Iterator[str]:
    """Sentences: overlaps that the kernel's code forbids by its order, turns that tiles take, and orders that are not those of
    ``own``, a trip of the kernel's own timeline: nothing that it does already."""
    offset = blocks(program, depends)
    told: set[str] = set()
    for product in products(schedule):
        for vector in vectors(schedule):
            if product.operation.role != vector.operation.role or product.operation.cta != vector.operation.cta:
                continue
            if overlaps(schedule, product, vector) < UNDER * min(product.cycles, vector.cycles):
                continue
            ahead = _ahead(schedule, product, vector, offset)
            if ahead is not None and _code_forbids(product, vector, ahead, offset):
                block = f"block j{ahead:+d}" if ahead else "block j"
                sentence = f"issue {_plain(product)} of {block} before {_plain(vector)} of block j is done"
                if sentence not in told:
                    told.add(sentence)
                    yield sentence
    known = turns(own) if own is not None else {}
    for (one, other), (there, back) in turns(schedule).items():
        if (one, other) not in known:
            yield (
                f"{one} and {other} take turns: {100 * there:.0f} % of {one}'s vector work runs under {other}'s products,"
                f" {100 * back:.0f} % the other way round"
            )
    if own is not None:
        before = orders(own)
        for who, order in orders(schedule).items():
            if len(order) > 1 and set(order) == set(before.get(who, ())) and order != before[who]:
                yield f"order of {who}: {_row(order)}; the kernel has {_row(before[who])}"


def _plain(p: Placed) -> str:
    """An operation's name without the number of its tile."""
    words = p.operation.name.split(" ")
    return " ".join(word.rstrip("0123456789") if word[-1:].isdigit() and word[0].isalpha() else word for word in words)


def _ahead(schedule: Schedule, product: Placed, vector: Placed, offset: dict[int, int]) -> int | None:
    """How many blocks after the vector operation's the product's is while both run."""
    a, b = product.operation.statements[0], vector.operation.statements[0]
    if a not in offset or b not in offset:
        return None
    period = schedule.interval
    begin = (product.begin(period) - offset[a] * period, vector.begin(period) - offset[b] * period)  # of block 0
    for ahead in range(-3, 4):
        first = begin[0] + ahead * period
        if min(first + product.cycles, begin[1] + vector.cycles) - max(first, begin[1]) >= UNDER * min(
            product.cycles, vector.cycles
        ):
            return ahead
    return None


def _code_forbids(product: Placed, vector: Placed, ahead: int, offset: dict[int, int]) -> bool:
    """Whether the code issues the product of block ``ahead`` only after the vector operation of block 0."""
    a, b = product.operation.statements[0], vector.operation.statements[-1]
    return (ahead - offset[a], a) > (-offset[b], b)


def turns(schedule: Schedule) -> dict[tuple[str, str], tuple[float, float]]:
    """Tiles whose vector work runs under each other's products, and how much of it does."""
    shares: dict[tuple[str, str], float] = {}
    tiles = dict.fromkeys(tile_of(p) for p in vectors(schedule))
    for vector in vectors(schedule):
        for product in products(schedule):
            key = (tile_of(vector), tile_of(product))
            shares[key] = shares.get(key, 0.0) + overlaps(schedule, vector, product)
    work = {tile: sum(p.cycles for p in vectors(schedule) if tile_of(p) == tile) for tile in tiles}
    names = [tile for tile in tiles if tile and work[tile]]
    found = {}
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            there, back = (shares.get(key, 0.0) / work[key[0]] for key in ((one, other), (other, one)))
            if min(there, back) >= UNDER:
                found[one, other] = (there, back)
    return found


def orders(schedule: Schedule) -> dict[str, tuple[str, ...]]:
    """The order in which the tensor cores and each warp do their operations, from the first by name on; without short ones."""
    who: dict[str, list[Placed]] = {}
    for p in schedule.placed:
        if p.operation.cycles < SHORT * schedule.interval:
            continue
        if p.operation.kind == "product":
            who.setdefault("the tensor cores", []).append(p)
        elif p.operation.warp and not p.operation.issue:
            who.setdefault(p.operation.warp, []).append(p)
    out = {}
    for name, mine in who.items():
        row = [p.operation.name for p in sorted(mine, key=lambda p: p.start)]
        first = row.index(min(row))
        out[name] = (*row[first:], *row[:first])
    return out


def _row(order: Sequence[str]) -> str:
    return " > ".join(order)


def tile_of(p: Placed) -> str:
    """Which tile an operation belongs to: the number of what it writes, or its CTA."""
    words = p.operation.name.split(" ")
    number = next((w[-1] for w in words[1:] if w[:1].isalpha() and w[-1:].isdigit()), "")
    number = number or next((w.split(".")[0][-1] for w in words[1:] if w.split(".")[0][-1:].isdigit() and w[:1].isalpha()), "")
    return f"tile {number}" if number else f"CTA {p.operation.cta}"
