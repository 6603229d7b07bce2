"""Chips: each shipped file loads and says where every number is from; a bad file is refused in one sentence."""

from __future__ import annotations

import copy
import pickle
import re
from importlib import resources
from pathlib import Path

import pytest

from flashsim.model.gpu import ARCHITECTURES, GPUS, KINDS, ChipError, Sourced, load_gpu, parse_gpu

ALL_GPUS = list(GPUS)
PLACEHOLDER = re.compile(r"^\W*(x+|n/?a|none|tbd|unknown|source|\?+|-+|\.+)\W*$", re.IGNORECASE)
NUMBER_LINE = re.compile(r'^(\w+) = \{ value = ([^,]+), unit = "([^"]+)", kind = "([^"]+)", source = "([^"]+)" \}$', re.MULTILINE)
#: FMA streams were measured a little faster than one a cycle; a slot of the issue port is one cycle.
MEASURED_BELOW_A_SLOT = {"ffma", "fmul", "fadd"}
OPTIONAL = {"wgmma", "beside", "async_", "tcgen05", "tmem", "packed"}
SECTIONS = {
    "sm_80": set[str](),
    "sm_90": {"wgmma", "beside", "async_"},
    "sm_100": {"async_", "tcgen05", "tmem", "packed"},
    "sm_103": {"async_", "tcgen05", "tmem", "packed"},
}
UNITS = {"count", "bytes", "cycles", "bytes/clk", "bytes/s", "ms", "ns", "us", "MHz", "W", "ratio", "pJ"}


def text_of(name: str) -> str:
    return (resources.files("flashsim.model") / "gpus" / f"{name}.toml").read_text()


H200 = text_of("h200")
ALL = "every field is needed: flashsim gpus h200 --toml has all"


def edited(old: str, new: str) -> bytes:
    """The H200's file with the one place that reads ``old`` changed."""
    assert H200.count(old) == 1, f"{old!r} occurs {H200.count(old)} times"
    return H200.replace(old, new).encode()


def with_field(section: str, field: str, new_line: str) -> bytes:
    """The H200's file with one field's line replaced ("" drops it)."""
    head, rest = H200.split(f"[{section}]\n")
    lines = rest.split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{field} = "))
    lines[at : at + 1] = [new_line] if new_line else []
    return (head + f"[{section}]\n" + "\n".join(lines)).encode()


def refusal(text: bytes) -> str:
    with pytest.raises(ChipError) as error:
        parse_gpu(text, "mine.toml")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ALL_GPUS)
def test_every_number_has_unit_kind_and_source(name: str) -> None:
    gpu = load_gpu(name)
    assert (gpu.name, gpu.architecture in ARCHITECTURES) == (name, True)
    numbers = dict(gpu.numbers())
    assert len(numbers) == len(NUMBER_LINE.findall(text_of(name))) > 90
    for field, number in numbers.items():
        assert isinstance(number, Sourced), field
        assert number.unit in UNITS, field
        assert number.kind in KINDS, field
        assert len(number.source) >= 7, f"{field}: {number.source!r} says nothing"
        assert not PLACEHOLDER.match(number.source), f"{field}: {number.source!r} is a placeholder"


@pytest.mark.parametrize("name", ALL_GPUS)
def test_the_file_is_what_the_chip_says(name: str) -> None:
    """Value by value: the parser neither scales nor swaps anything."""
    in_file = [(float(value), unit, kind, source) for _, value, unit, kind, source in NUMBER_LINE.findall(text_of(name))]
    loaded = [(float(n), n.unit, n.kind, n.source) for _, n in load_gpu(name).numbers()]
    assert sorted(in_file) == sorted(loaded)


def test_registry_and_folder_agree() -> None:
    files = {path.name.removesuffix(".toml") for path in (resources.files("flashsim.model") / "gpus").iterdir()}
    assert files == set(GPUS)


@pytest.mark.parametrize(
    ("name", "sms", "boost", "peak_tflops"),
    [
        ("a100-40gb", 108, 1410, 312),
        ("a100-80gb", 108, 1410, 312),
        ("h100", 132, 1980, 989.4),
        ("h100-pcie", 114, 1755, 756),
        ("h200", 132, 1980, 989.4),
        ("b200", 148, 1965, 2250),
        ("gb200", 152, 2062, 2304),
        ("b300", 148, 2032, 2250),
        ("gb300", 152, 2070, 2304),
    ],
)
def test_datasheet_identities(name: str, sms: int, boost: int, peak_tflops: float) -> None:
    """SMs x FLOP a clock x the tensor clock is the dense 16-bit peak of the datasheet."""
    gpu = load_gpu(name)
    assert (gpu.sm.count, gpu.clock.boost_mhz) == (sms, boost)
    assert gpu.sm.count * gpu.sm.tensor_flop_per_clk * gpu.clock.tensor_peak_mhz * 1e6 == pytest.approx(
        peak_tflops * 1e12, rel=0.005
    )


@pytest.mark.parametrize("name", ALL_GPUS)
def test_numbers_hang_together(name: str) -> None:
    gpu = load_gpu(name)
    sm, hbm = gpu.sm, gpu.hbm
    assert sm.registers == 65536
    assert (sm.subpartitions, sm.max_warps, sm.max_ctas) == (4, 64, 32)
    assert sm.smem_per_cta_bytes == sm.smem_bytes - sm.smem_reserved_per_cta_bytes
    assert 0 < hbm.read_bytes_per_s <= hbm.peak_bytes_per_s
    assert max(hbm.copy_bytes_per_s, hbm.write_bytes_per_s) <= hbm.peak_bytes_per_s
    assert gpu.l2.latency_near_ns <= gpu.l2.latency_far_ns < hbm.latency_ns
    assert gpu.l2.bytes_per_clk <= gpu.l2.bytes_per_clk_one_sm * sm.count
    assert gpu.clock.tensor_peak_mhz <= gpu.clock.boost_mhz
    assert gpu.power.idle_w < gpu.power.limit_w
    assert gpu.power.voltage_floor <= 1
    for cost in type(gpu.pipe).model_fields:
        allowed = 1.05 if cost in MEASURED_BELOW_A_SLOT else 1.001
        assert getattr(gpu.port, cost) <= getattr(gpu.pipe, cost) * allowed or cost == "mov", cost


@pytest.mark.parametrize("name", ALL_GPUS)
def test_a_chip_has_the_sections_of_its_architecture(name: str) -> None:
    """wgmma is Hopper's, tcgen05 with its tensor memory and packed FP32 Blackwell's; both have bulk copies."""
    gpu = load_gpu(name)
    held = {section for section in OPTIONAL if getattr(gpu, section) is not None}
    assert held == SECTIONS[gpu.architecture]
    named = {section.rstrip("_") for section in OPTIONAL} & {number.split(".")[0] for number, _ in gpu.numbers()}
    assert named == {section.rstrip("_") for section in held}


@pytest.mark.parametrize("name", ALL_GPUS)
def test_optional_sections_hang_together(name: str) -> None:
    gpu = load_gpu(name)
    if gpu.beside:  # nothing gets cheaper because a product runs beside it
        assert gpu.beside.alu >= gpu.pipe.int_alu
        assert gpu.beside.mufu >= gpu.pipe.ex2
        assert gpu.beside.port_fma >= gpu.port.ffma
        assert gpu.beside.port_mufu >= gpu.port.ex2
    if gpu.wgmma:  # 64 rows x 16 of K, 2 FLOP each, for each column
        rate = 2 * 64 * 16 / gpu.wgmma.cycles_per_column
        assert rate == pytest.approx(float(gpu.sm.tensor_flop_per_clk))
    if gpu.tcgen05:
        rate = 2 * 128 * 16 / gpu.tcgen05.cycles_per_column
        assert rate == pytest.approx(float(gpu.sm.tensor_flop_per_clk))
        assert gpu.tcgen05.latency_a_tmem_cycles <= gpu.tcgen05.latency_cycles
        assert gpu.tcgen05.pair_latency_a_tmem_cycles <= gpu.tcgen05.pair_latency_cycles
    if gpu.tmem:
        assert gpu.tmem.columns == 512
    if gpu.packed:  # two values for no more than twice the cost of one
        assert gpu.pipe.ffma <= gpu.packed.pipe <= 2 * gpu.pipe.ffma
        assert gpu.packed.port <= gpu.packed.pipe


def test_the_tensor_cores_reach_their_peak_through_mma_sync_on_a100_only() -> None:
    """m16n8k16 is 4096 FLOP: one every 8 cycles on each of 4 sub-partitions is the A100's peak; Hopper's needs wgmma, and
    Blackwell's tcgen05."""
    shares = {"sm_80": 1, "sm_90": pytest.approx(0.65, abs=0.04), "sm_100": 0.25, "sm_103": 0.25}
    for name in ALL_GPUS:
        gpu = load_gpu(name)
        share = 4096 * gpu.sm.subpartitions / gpu.pipe.hmma / gpu.sm.tensor_flop_per_clk
        assert share == shares[gpu.architecture], name


@pytest.mark.parametrize("name", ALL_GPUS)
def test_what_was_measured_elsewhere_says_so(name: str) -> None:
    """A reading of the H200 is a guess about an A100, and says on what chip it was made on every other one."""
    for field, number in load_gpu(name).numbers():
        if name != "h200" and "_h200." in number.source and number.kind != "assumed":
            assert load_gpu(name).architecture == "sm_90", f"{field} is {number.kind}, from another architecture"
            assert "H200" in number.source, field


def test_twins_differ_only_where_they_should() -> None:
    """The two A100 are one die with two memories; the H200 is an H100 with another memory and L2 figures."""
    small, large = load_gpu("a100-40gb"), load_gpu("a100-80gb")
    assert (small.sm, small.pipe, small.port, small.warp) == (large.sm, large.pipe, large.port, large.warp)
    assert small.hbm.peak_bytes_per_s < large.hbm.peak_bytes_per_s
    h100, h200 = load_gpu("h100"), load_gpu("h200")
    for section in ("sm", "clock", "pipe", "port", "warp", "result", "smem"):
        mine, theirs = getattr(h100, section), getattr(h200, section)
        assert dict(mine) == dict(theirs), section
    assert h100.hbm.peak_bytes_per_s < h200.hbm.peak_bytes_per_s


def test_a_missing_field() -> None:
    assert refusal(with_field("sm", "count", "")) == f"mine.toml: sm.count is missing; {ALL}"


def test_a_missing_section() -> None:
    text = H200.split("[power]")[0].encode()
    assert refusal(text) == f"mine.toml: power is missing; {ALL}"


def test_an_unknown_field() -> None:
    line = 'l3_latency = { value = 1, unit = "ns", kind = "assumed", source = "a guess" }\n'
    text = edited("[hbm]\n", f"[hbm]\n{line}")
    assert refusal(text) == "mine.toml: hbm.l3_latency is not a field of a chip; did you mean latency_ns?"


def test_an_unknown_section() -> None:
    assert refusal(H200.encode() + b"\n[clocks]\n") == "mine.toml: clocks is not a field of a chip; did you mean clock?"


NUMBER = 'count = { value = 132, unit = "count", kind = "datasheet", source = "a paper" }'
BAD_NUMBERS = {
    "value = -132": ("value = 132", "has the value -132; it must be more than zero"),
    "value = 0": ("value = 132", "has the value 0; it must be more than zero"),
    "value = nan": ("value = 132", "has the value nan; it must be a number"),
    "value = inf": ("value = 132", "has the value inf; it must be finite, at most 1.8e+308"),
    f"value = {'9' * 400}": ("value = 132", "has the value inf; it must be finite, at most 1.8e+308"),
    "value = 1e18": ("value = 132", "has the value 1e+18; it must be at most 1e+06 count"),
    "value = 132.5": ("value = 132", "has the value 132.5; it must be a whole number"),
    "value = true": ("value = 132", "has the value True; it must be a number"),
    'value = "132"': ("value = 132", "has the value '132'; it must be a number"),
    'unit = "cycles"': ('unit = "count"', "has the unit 'cycles'; it must be 'count'"),
    'kind = "guessed"': ('kind = "datasheet"', "has the kind 'guessed'; it must be one of datasheet, measured, derived, assumed"),
    'source = ""': (
        'source = "a paper"',
        "has no source; say which datasheet, paper, file or microbenchmark it comes from",
    ),
    'source = "  "': (
        'source = "a paper"',
        "has no source; say which datasheet, paper, file or microbenchmark it comes from",
    ),
    "source = 3": ('source = "a paper"', "has no source; say which datasheet, paper, file or microbenchmark it comes from"),
    "": (', source = "a paper"', "has no source; a number needs value, unit, kind and source"),
    'from = "here", kind': ("kind", "has the unknown key 'from'; allowed are value, unit, kind and source"),
}


@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_a_bad_number(bad: str) -> None:
    good, sentence = BAD_NUMBERS[bad]
    assert NUMBER.count(good) == 1
    assert refusal(with_field("sm", "count", NUMBER.replace(good, bad))) == f"mine.toml: sm.count {sentence}"


@pytest.mark.parametrize("key", ["value", "unit", "kind", "source"])
def test_a_number_without_one_of_its_keys(key: str) -> None:
    keys = {"value": "132", "unit": '"count"', "kind": '"datasheet"', "source": '"a paper"'}
    body = ", ".join(f"{name} = {value}" for name, value in keys.items() if name != key)
    expected = f"mine.toml: sm.count has no {key}; a number needs value, unit, kind and source"
    assert refusal(with_field("sm", "count", f"count = {{ {body} }}")) == expected


@pytest.mark.parametrize("text", ["132", '"many"'])
def test_a_bare_value_for_a_number(text: str) -> None:
    got = text.replace('"', "'")
    expected = f'mine.toml: sm.count got {got}; write {{ value = ..., unit = "count", kind = ..., source = ... }}'
    assert refusal(with_field("sm", "count", f"count = {text}")) == expected


def test_zero_is_allowed_where_it_means_something() -> None:
    """A cost may be zero, never negative."""
    line = 'mov = {{ value = {}, unit = "cycles", kind = "assumed", source = "a free move" }}'
    assert parse_gpu(with_field("pipe", "mov", line.format(0)), "mine.toml").pipe.mov == 0
    sentence = refusal(with_field("pipe", "mov", line.format(-1)))
    assert sentence == "mine.toml: pipe.mov has the value -1; it must be zero or more"


def test_an_unknown_architecture() -> None:
    sentence = refusal(edited('architecture = "sm_90"', 'architecture = "sm_42"'))
    assert sentence == "mine.toml: architecture is 'sm_42'; it must be one of sm_80, sm_90, sm_100, sm_103"


@pytest.mark.parametrize(("value", "got"), [("3", "3"), ('""', "''"), ('"  "', "'  '"), ("true", "True")])
def test_a_name_that_is_no_text(value: str, got: str) -> None:
    assert refusal(edited('name = "h200"', f"name = {value}")) == f"mine.toml: name is {got}; it must be text in quotes"


@pytest.mark.parametrize(("old", "new", "got"), [("[sm]\n", "[[sm]]\n", "list"), ("[sm]\n", "sm = 3\n[clock.x]\n", "int")])
def test_a_section_that_is_no_table(old: str, new: str, got: str) -> None:
    sentence = f"mine.toml: sm is of type {got}; it must be a table, its fields below a line [sm]"
    assert refusal(edited(old, new)) == sentence


@pytest.mark.parametrize("text", [b"[sm\n", b"name = \n", b"\xff\xfe", b'name = "a"\nname = "b"\n', b"x = " + b"9" * 5000])
def test_broken_toml(text: bytes) -> None:
    assert re.fullmatch(r"mine\.toml is not valid TOML: .+", refusal(text))


def test_an_empty_file() -> None:
    assert refusal(b"") == f"mine.toml: name is missing; {ALL}"


def test_a_missing_file(tmp_path: Path) -> None:
    path = str(tmp_path / "gone.toml")
    expected = f"chip file {path} does not exist; give a readable .toml file or one of {', '.join(GPUS)}"
    with pytest.raises(ChipError, match=f"^{re.escape(expected)}$"):
        load_gpu(path)


def test_no_part_is_larger_than_the_whole() -> None:
    line = 'read_bytes_per_s = { value = 36e12, unit = "bytes/s", kind = "assumed", source = "a slip" }'
    expected = "mine.toml: hbm.read_bytes_per_s is 3.6e+13; it must be at most hbm.peak_bytes_per_s, which is 4.8e+12"
    assert refusal(with_field("hbm", "read_bytes_per_s", line)) == expected
    line = 'resident_bytes = { value = 1e9, unit = "bytes", kind = "assumed", source = "a slip" }'
    expected = "mine.toml: l2.resident_bytes is 1e+09; it must be at most l2.size_bytes, which is 6.29146e+07"
    assert refusal(with_field("l2", "resident_bytes", line)) == expected


def test_a_folder_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "folder.toml"
    path.mkdir()
    expected = f"chip file {path} cannot be read (Is a directory); give a readable .toml file or one of {', '.join(GPUS)}"
    with pytest.raises(ChipError, match=f"^{re.escape(expected)}$"):
        load_gpu(path)


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("h20", "; did you mean h200?"), ("h100pcie", "; did you mean h100-pcie?"), ("foo", "."),
        ("a100", "; did you mean a100-40gb or a100-80gb?"), ("H200", "; did you mean h200?"),
    ],
)  # fmt: skip
def test_an_unknown_chip_gets_the_names_that_it_may_mean(name: str, close: str) -> None:
    expected = f"gpu {name!r} is unknown{close} Known are {', '.join(GPUS)}, or a .toml file"
    with pytest.raises(ChipError, match=f"^{re.escape(expected)}$"):
        load_gpu(name)


def test_a_chip_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(edited('name = "h200"', 'name = "mine"'))
    assert load_gpu(str(path)).name == load_gpu(path).name == "mine"


@pytest.mark.parametrize("name", ALL_GPUS)
def test_a_chip_survives_copying_and_another_process(name: str) -> None:
    gpu = load_gpu(name)
    facts = [(field, float(n), n.unit, n.kind, n.source) for field, n in gpu.numbers()]
    for twin in (copy.deepcopy(gpu), pickle.loads(pickle.dumps(gpu))):
        assert [(field, float(n), n.unit, n.kind, n.source) for field, n in twin.numbers()] == facts


def test_replacing_a_number() -> None:
    gpu = load_gpu("h200")
    changed = gpu.replace_number("pipe.ex2", 4)
    assert (changed.pipe.ex2, changed.pipe.ex2.kind, changed.pipe.ex2.unit) == (4, "assumed", "cycles")
    assert gpu.pipe.ex2 == 8
    others = {name: n for name, n in changed.numbers() if name != "pipe.ex2"}
    assert others == {name: n for name, n in gpu.numbers() if name != "pipe.ex2"}


def test_replacing_what_is_not_there_or_not_allowed() -> None:
    gpu = load_gpu("h200")
    with pytest.raises(ChipError, match=re.escape("h200 has no number 'pipe.exp2'; did you mean pipe.ex2?")):
        gpu.replace_number("pipe.exp2", 4)
    with pytest.raises(ChipError, match=re.escape("h200: sm.count has the value -1; it must be more than zero")):
        gpu.replace_number("sm.count", -1)
