"""The space of a sweep: what is varied, over which values, as one numbered grid that is never written out.

space = parse_space(["block_kv=32:128:32", "gpu.pipe.ex2=4,8"], get_schedule("fa2"), load_gpu("h100"))
space.size, space.at(5)      # 8, {"block_kv": 96, "gpu.pipe.ex2": 8.0}

Whatever the schedule's dataclass has as a field can be varied, by the field's type; so can the clock, the problem and every
number of the chip.
"""

from __future__ import annotations

import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from ..model.gpu import GPU
from ..model.named import guess
from ..model.schedule import Schedule
from .predict import cap_mhz

Value = bool | int | float | str | None

#: Problem sizes and switches by the names of the command line's options.
PROBLEM: dict[str, Any] = {
    "batch": int, "heads": int, "heads_kv": int, "seqlen": int, "seqlen_kv": int, "head_dim": int, "head_dim_v": int,
    "causal": bool, "dtype": str, "pass": str,
}  # fmt: skip
CLOCK = float | Literal["boost", "power"]
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
LARGEST_SIZE = 2**31 - 1
MOST_COMBINATIONS = 2**63 - 1  # candidates are numbered in 64 bits
MOST_LISTED = 100_000  # values of one axis that are written out; a lone range is not
WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "none"}

#: Where nothing is asked for: values of fields that schedules have in one form or another, by the beginning of their name.
USUAL = (("block_", "32,64,128,256"), ("tile_", "32,64,128,256"), ("warps", "4,8"), ("stages", "1:4"), ("kv_stages", "2,3,4"))


@dataclass(frozen=True, kw_only=True)
class Steps:
    """start, start + step, ...: ``count`` numbers, whole ones as int. Decimal, so that 0.1:0.3:0.1 gives 0.3."""

    start: Decimal
    step: Decimal
    count: int
    whole: bool

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Value:
        if not 0 <= i < self.count:
            raise IndexError(i)
        value = self.start + i * self.step
        return int(value) if self.whole else float(value)

    def __str__(self) -> str:
        return f"{self.start}:{self.start + (self.count - 1) * self.step}:{self.step}"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One thing that varies. ``kind``: "schedule", "problem", "gpu" (``name`` is then "gpu." and the number) or "clock"."""

    name: str
    kind: str
    values: tuple[Value, ...] | Steps

    @property
    def ordered(self) -> bool:
        """Whether the values are numbers that rise, so that neighbours are alike."""
        if isinstance(self.values, Steps):
            return True
        numbers = [v for v in self.values if isinstance(v, int | float) and not isinstance(v, bool)]
        return len(numbers) == len(self.values) and all(a < b for a, b in zip(numbers, numbers[1:], strict=False))

    @property
    def text(self) -> str:
        """The values as they can be written behind ``--vary name=``."""
        return str(self.values) if isinstance(self.values, Steps) else ",".join(word(v) for v in self.values)


@dataclass(frozen=True, kw_only=True)
class Space:
    """Every combination of the axes' values. Candidates are numbered from 0; the last axis varies fastest."""

    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    def places(self, number: int) -> tuple[int, ...]:
        """Which value of each axis candidate ``number`` has."""
        if not 0 <= number < self.size:
            raise IndexError(number)
        out = []
        for axis in reversed(self.axes):
            number, place = divmod(number, len(axis.values))
            out.append(place)
        return tuple(reversed(out))

    def number(self, places: Iterable[int]) -> int:
        """The candidate whose values have these places: the inverse of :meth:`places`."""
        number = 0
        for axis, place in zip(self.axes, places, strict=True):
            number = number * len(axis.values) + place
        return number

    def at(self, number: int) -> dict[str, Value]:
        """The values of candidate ``number`` by axis name."""
        return {axis.name: axis.values[i] for axis, i in zip(self.axes, self.places(number), strict=True)}


def word(value: Value) -> str:
    """A value as the command line writes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def knobs(schedule: Schedule, gpu: GPU) -> dict[str, tuple[str, Any]]:
    """Everything that can be varied: name -> (kind, type). A field of the schedule hides a size of the problem of that name."""
    out: dict[str, tuple[str, Any]] = {name: ("problem", hint) for name, hint in PROBLEM.items()}
    out["clock"] = ("clock", CLOCK)
    if is_dataclass(schedule):
        hints = typing.get_type_hints(type(schedule))
        out |= {f.name: ("schedule", hints[f.name]) for f in fields(schedule) if f.init}
    return out | {f"gpu.{name}": ("gpu", float) for name, _ in gpu.numbers()}


def parse_space(texts: Iterable[str], schedule: Schedule, gpu: GPU, *, fixed: Collection[str] = ()) -> Space:
    """Read ``name=values`` texts: lists ``a=1,2,3``, ranges ``a=2:8`` and ``a=64:256:64`` (the stop belongs to it), and the
    bare name of a switch for all its values.

    ``fixed``: names that are set to one value already. Raises ValueError with what was got, what is allowed and what to change.
    """
    known, axes = knobs(schedule, gpu), dict[str, Axis]()
    for text in texts:
        raw_name, equals, raw = text.partition("=")
        name = _known_name(raw_name.strip(), known, schedule)
        if name in axes or name in fixed:
            where = "varied twice: write all its values in one list" if name in axes else "also set to one value: drop either"
            raise ValueError(f"{name} is {where}")
        kind, hint = known[name]
        values = _values(name, raw, _reader(name, kind, hint, gpu), hint) if equals else _all_values(name, hint)
        axes[name] = Axis(name=name, kind=kind, values=values)
    space = Space(axes=tuple(axes.values()))
    if space.size > MOST_COMBINATIONS:
        raise ValueError(
            f"the space has about 1e{len(str(space.size)) - 1} combinations; candidates are numbered up to"
            f" {MOST_COMBINATIONS:.1e}: vary fewer fields or use coarser steps"
        )
    return space


def usual_space(schedule: Schedule, fixed: Collection[str] = ()) -> list[str]:
    """Texts for :func:`parse_space` where nothing was asked for: tile, warps and stages by name, switches by type.

    Raises ValueError where the schedule has no such field.
    """
    hints: dict[str, Any] = typing.get_type_hints(type(schedule)) if is_dataclass(schedule) else {}
    texts = []
    for name, hint in hints.items():
        if name in fixed:
            continue
        usual = next((values for start, values in USUAL if name.startswith(start)), "")
        if usual and int in _allowed(hint):
            texts.append(f"{name}={usual}")
        elif bool in _allowed(hint):
            texts.append(name)
    if not texts:
        raise ValueError(f"there is nothing to vary in {schedule.name}: give --vary name=values")
    return texts


def _known_name(name: str, known: dict[str, tuple[str, Any]], schedule: Schedule) -> str:
    if name in known:
        return name
    if f"gpu.{name}" in known:
        return f"gpu.{name}"
    own = [n for n in known if not n.startswith("gpu.")]
    close = guess(name, known if "." in name else own)
    raise ValueError(
        f"{name or 'a name'!r} cannot be varied{close} {schedule.name} varies {', '.join(own)}"
        " and the chip's numbers as gpu.section.number"
    )


def _values(name: str, raw: str, read: Callable[[str], Value], hint: Any) -> tuple[Value, ...] | Steps:
    parts = [part.strip() for part in raw.split(",")]
    if not all(parts):
        raise ValueError(f"--vary {name} got {raw!r}, which has an empty value: write {name}=a,b,c or {name}=start:stop:step")
    numeric = bool({int, float} & set(_allowed(hint)))
    pieces = [_steps(name, part, read, hint) if numeric and ":" in part else (read(part),) for part in parts]
    if len(pieces) == 1:
        return pieces[0]
    if sum(len(piece) for piece in pieces) > MOST_LISTED:
        raise ValueError(f"--vary {name} lists more than {MOST_LISTED} values: write one range, or fewer values")
    values = tuple(piece[i] for piece in pieces for i in range(len(piece)))
    seen = set()
    for value in values:
        if (type(value), value) in seen:
            raise ValueError(f"--vary {name} has {word(value)} twice: write each value once")
        seen.add((type(value), value))
    return values


def _steps(name: str, text: str, read: Callable[[str], Value], hint: Any) -> Steps:
    """``start:stop`` or ``start:stop:step``, stop included."""
    ends = text.split(":")
    whole = int in _allowed(hint) and all(WHOLE.fullmatch(end.strip()) for end in ends)
    try:
        if len(ends) not in (2, 3) or any(len(end) > 40 for end in ends):
            raise ValueError
        start, stop, step = (Decimal(end.strip()) for end in (*ends, "1")[:3])
        if not (start.is_finite() and stop.is_finite() and step.is_finite() and step > 0):
            raise ValueError
    except (ValueError, InvalidOperation):
        message = f"--vary {name} got the range {text!r}; write start:stop or start:stop:step with a step above zero"
        raise ValueError(message) from None
    if stop < start:
        raise ValueError(f"--vary {name} got {text!r}, an empty range: its stop is below its start")
    count = int(min((stop - start) / step, Decimal(2 * MOST_COMBINATIONS))) + 1
    if count > MOST_COMBINATIONS:
        raise ValueError(f"--vary {name} got {text!r}, a range of more than {MOST_COMBINATIONS:.1e} values: use a larger step")
    if not whole and float not in _allowed(hint):
        raise ValueError(f"--vary {name} got {text!r}; it takes whole numbers")
    steps = Steps(start=start, step=step, count=count, whole=whole)
    for i in (0, count - 1):
        read(word(steps[i]))
    return steps


def _allowed(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of the literals among a type's members."""
    return tuple(v for kind in _allowed(hint) if typing.get_origin(kind) is Literal for v in typing.get_args(kind))


def _all_values(name: str, hint: Any) -> tuple[Value, ...]:
    values: tuple[Value, ...] = (*((False, True) if bool in _allowed(hint) else ()), *_choices(hint))
    if not values or {int, float, str} & set(_allowed(hint)):
        raise ValueError(f"--vary got {name!r} without values: write {name}=a,b,c or {name}=start:stop:step")
    return values


def read_value(name: str, raw: str, hint: Any, option: str = "--vary") -> Value:
    """``raw`` as a value of the type ``hint``. Raises ValueError with what the name takes, as behind ``option``."""
    allowed, text = _allowed(hint), raw.lower()
    if type(None) in allowed and text in ("none", "null"):
        return None
    for choice in _choices(hint):
        if text == str(choice).lower():
            return typing.cast(Value, choice)
    if bool in allowed and text in BOOLEANS:
        return BOOLEANS[text]
    value: float = math.nan
    if int in allowed and WHOLE.fullmatch(raw):
        value = int(raw)
    elif float in allowed and len(raw) <= 40:
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
    if math.isfinite(value):
        if value < 0:
            raise ValueError(f"{option} {name} got {raw}; it must be zero or more")
        if value == 0 and int in allowed and type(None) in allowed:
            raise ValueError(f"{option} {name} got 0; it must be at least 1, or none for the schedule's own")
        return value
    if str in allowed:
        return raw
    takes = " or ".join([*(WORDS[kind] for kind in allowed if kind in WORDS), *(word(c) for c in _choices(hint))])
    raise ValueError(f"{option} {name} got {raw!r}; it takes {takes or hint}")


def _reader(name: str, kind: str, hint: Any, gpu: GPU) -> Callable[[str], Value]:
    """Reads and checks one value, so that a sweep refuses at once what no candidate could use."""

    def read(raw: str) -> Value:
        value = read_value(name, raw, hint)
        if kind == "gpu":
            gpu.replace_number(name.removeprefix("gpu."), typing.cast(float, value))
        if kind == "clock":
            cap_mhz(gpu, typing.cast("float | str", value))
        if kind == "problem" and isinstance(value, int) and value > LARGEST_SIZE:
            raise ValueError(f"--vary {name} got {value}; it must be at most {LARGEST_SIZE}")
        return value

    return read
