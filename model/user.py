"""A user's schedule: one Python file that defines a class with ``name`` and ``lower(gpu, attention)``, or an object ``schedule``.

The file runs as a module of its own name (MODULE and its stem), so it imports what it needs from flashsim by absolute names. Its
schedule goes to other processes as the file's path and the fields: they run the file again.
"""

from __future__ import annotations

import copyreg
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from .named import guess
from .schedule import Schedule

MODULE = "flashsim_user_"


def is_file(name: str) -> bool:
    """Whether a schedule argument means a file rather than a shipped schedule."""
    return name.endswith(".py") or "/" in name


def load(path: Path) -> Schedule:
    """The schedule that a file defines, made with its defaults.

    Raises ValueError, in a sentence: no such file, it does not run (with the line), it defines none or several.
    """
    module = _run(path)
    found = vars(module).get("schedule")
    if found is not None:
        return _checked(path, found() if isinstance(found, type) else found, "schedule")
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__ and _has_both(v)]
    if not own:
        raise ValueError(f"{path} defines no schedule: write a class with name and lower(gpu, attention), or an object schedule")
    if len(own) > 1:
        names = ", ".join(each.__name__ for each in own)
        raise ValueError(f"{path} defines {len(own)} schedules ({names}): leave one, or call one object schedule")
    try:
        made = own[0]()
    except TypeError as error:
        raise ValueError(f"{path}: {error}: give the fields of {own[0].__name__} defaults") from None
    return _checked(path, made, own[0].__name__)


def with_fields(schedule: Schedule, values: Mapping[str, Any]) -> Schedule:
    """``schedule`` with these fields set. Raises ValueError with the nearest known field, or where it has none."""
    cls = type(schedule)
    known: list[str] = [field.name for field in fields(cls)] if is_dataclass(cls) else []
    for name in values:
        if name not in known:
            close = guess(name, known) if known else ":"
            ending = f" Its fields are {', '.join(known)}" if known else " make its class a dataclass to give it fields"
            raise ValueError(f"{schedule.name} has no field {name!r}{close}{ending}")
    changed: Any = replace(schedule, **values) if values else schedule  # type: ignore[type-var]
    return _checked(Path(cls.__module__), changed, cls.__name__)


def blame(error: BaseException) -> str | None:
    """A sentence for an error that a user's file raised, with its line; None where no line of one took part."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__", "")).startswith(MODULE):
            return f"{frame.f_code.co_filename} line {line}: {type(error).__name__}: {error}"
    return None


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no file {path}; give a shipped schedule's name, or the path of a Python file with one")
    name = MODULE + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{path} line {error.lineno}: {error.msg}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(blame(error) or f"{path}: {type(error).__name__}: {error}") from None
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == name:
            copyreg.pickle(cls, _by_path)
    return module


def _by_path(schedule: Any) -> tuple[Any, ...]:
    """How a user's schedule is pickled."""
    values = {f.name: getattr(schedule, f.name) for f in fields(schedule) if f.init} if is_dataclass(schedule) else {}
    return _again, (str(Path(str(sys.modules[type(schedule).__module__].__file__)).resolve()), values)


def _again(path: str, values: dict[str, Any]) -> Schedule:
    return with_fields(_loaded(path), values)


@cache
def _loaded(path: str) -> Schedule:
    return load(Path(path))


def _has_both(cls: type[Any]) -> bool:
    return callable(getattr(cls, "lower", None)) and (hasattr(cls, "name") or "name" in getattr(cls, "__annotations__", {}))


def _checked(path: Path, made: object, what: str) -> Schedule:
    if not isinstance(made, Schedule) or not callable(made.lower):
        raise ValueError(f"{path}: {what} is a {type(made).__name__} without name or lower(gpu, attention): add what is missing")
    try:
        inspect.signature(made.lower).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{path}: {what}.lower cannot be called as lower(gpu, attention): {error}") from None
    if not isinstance(made.name, str) or not made.name:
        raise ValueError(f"{path}: {what} has the name {made.name!r}; it must be text")
    return made
