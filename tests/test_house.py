"""The house rules: sizes, arrows, leftovers and registries that agree with the files beside them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flashsim.model.gpu import GPUS, load_gpu
from flashsim.model.instructions import COUNTERS, INSTRUCTION_ID, INSTRUCTIONS, PIPES
from flashsim.model.ops import OPS
from flashsim.model.rows import EXTRA_INSTRUCTION
from flashsim.model.schedule import Schedule
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.limiter import UNIT_WORDS
from flashsim.sim.predict import ENGINES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("model", "sim", "validate")
SOURCES = sorted(path for path in [*ROOT.glob("*.py"), *(p for name in PACKAGES for p in (ROOT / name).rglob("*.py"))])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TOMLS = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.toml"))

FILE_LINES, FUNCTION_LINES = 400, 60

#: What each package may import of the others.
ALLOWED = {
    "model": {"model"},
    "sim": {"model", "sim"},
    "validate": {"model", "sim", "validate"},
    "": {"model", "sim", "validate", ""},
}
LEFTOVER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b")
#: Paths of one machine; where a system keeps its tools (CUDA's default place) is no such path.
ABSOLUTE = re.compile(r"""["'(\s=](/(?:home|root|work|tmp|mnt|Users)/[\w.])""")


def ids(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=ids(paths))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 25
    assert {path.parent.name for path in SOURCES} >= {"model", "sim", "validate", "schedules"}


@each([*SOURCES, *TESTS])
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < FILE_LINES


@each(SOURCES)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


@each([*SOURCES, *TESTS, *TOMLS])
def test_nothing_is_left_for_later(path: Path) -> None:
    found = [line for line in path.read_text().splitlines() if LEFTOVER.search(line)]
    assert not found


@each([*SOURCES, *TOMLS])
def test_no_absolute_paths(path: Path) -> None:
    assert not ABSOLUTE.findall(path.read_text())


@each(SOURCES)
def test_every_file_with_code_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


@each(SOURCES)
def test_no_catch_all_names(path: Path) -> None:
    assert not re.search(r"utils|common|helpers|^new_|v2$", path.stem)


def package_of(path: Path) -> str:
    top = path.relative_to(ROOT).parts[0]
    return top if top in PACKAGES else ""


def imported(path: Path) -> set[str]:
    """Packages of the project that a file imports, at any depth of its code ("" is the root)."""
    here = ["flashsim", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{stem}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "flashsim":
                found.add(parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "")
    return found


@each(SOURCES)
def test_arrows_point_down(path: Path) -> None:
    extra = imported(path) - ALLOWED[package_of(path)]
    assert not extra, f"{package_of(path) or 'the root'} imports {', '.join(name or 'the root' for name in extra)}"


def test_arrows_are_seen() -> None:
    """The check above reads relative imports: it finds those that are there."""
    assert imported(ROOT / "sim" / "predict.py") == {"model", "sim"}
    assert imported(ROOT / "model" / "schedules" / "fa2.py") == {"model"}


@each([p for p in SOURCES if package_of(p) == "model"])
def test_the_model_imports_no_engine(path: Path) -> None:
    assert not re.search(r"^\s*(import|from) (simpy|numba)\b", path.read_text(), re.MULTILINE)


def test_every_schedule_has_a_file_and_every_file_a_schedule() -> None:
    """A schedule's own parts are files beside it that begin with its name."""
    files = {path.stem for path in (ROOT / "model" / "schedules").glob("*.py")} - {"__init__", "grid"}
    parts = {stem for stem in files if stem.rpartition("_")[0] in SCHEDULES}
    assert files - parts == set(SCHEDULES)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_knows_its_name_and_is_frozen(name: str) -> None:
    schedule = get_schedule(name)
    assert isinstance(schedule, Schedule)
    assert schedule.name == name
    assert type(schedule).__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_unknown_schedules_and_fields_get_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"^schedule 'fa22' is unknown; did you mean fa2\? Known are "):
        get_schedule("fa22")
    with pytest.raises(ValueError, match=r"^fa2 has no field 'block_k'; did you mean block_kv\? Its fields are block_q, "):
        get_schedule("fa2", block_k=64)


def test_instructions_are_priced_and_counted() -> None:
    """Every row names a pipe, a counter and a cost that the chips have; numbers follow the order of the rows.

    Only the pseudo instruction of a stall is counted by nothing: nothing is executed.
    """
    costs = set(type(load_gpu(GPUS[0]).pipe).model_fields)
    assert {row.cost for row in INSTRUCTIONS.values()} == costs
    assert {row.pipe for row in INSTRUCTIONS.values()} == set(PIPES)
    assert {row.counter for row in INSTRUCTIONS.values() if row.name not in ("stall", "refetch")} == set(COUNTERS)
    assert INSTRUCTIONS["stall"].counter == "none"
    assert [INSTRUCTION_ID[name] for name in INSTRUCTIONS] == list(range(len(INSTRUCTIONS)))
    assert all(name == row.name and row.sass for name, row in INSTRUCTIONS.items())


def test_registries_name_what_exists() -> None:
    assert all(name == op.name and op.source for name, op in OPS.items())
    assert set(EXTRA_INSTRUCTION.values()) <= set(INSTRUCTIONS)
    assert set(UNIT_WORDS) >= {pipe for pipe in PIPES if pipe != "control"}
    assert {"fast", "simpy"} <= set(ENGINES)
