"""Timeline pictures: what is laid out agrees with the run, whatever the roles are, and the files hold what they should."""

from __future__ import annotations

import dataclasses
import re
import struct
import xml.etree.ElementTree as ET
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from machines import chip_for

import flashsim.cli as cli
from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.instructions import INSTRUCTIONS
from flashsim.model.ops import OPS
from flashsim.model.program import Role
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.engine import TICKS_PER_CYCLE
from flashsim.sim.picture import FAMILIES, RECORDS, Picture, family, picture
from flashsim.sim.plot import caption, ink_on, plot, subtitle, title
from flashsim.sim.predict import Result, simulate
from flashsim.sim.timeline import UNITS, WAITS

ALL_SCHEDULES = list(SCHEDULES)
#: Control flow, next to nothing on a picture, and what a CTA runs before its first load, which is of no one kind.
STRUCTURE = ["setup", "start_code", "loop_back", "branch", "loop", "end", "when", "end_when", "ending"]
PROBLEM = Attention(batch=2, heads_q=16, seqlen_q=2048, head_dim=64)
SHAPE = ["--gpu", "h100", "--batch", "1", "--heads", "2", "--seqlen", "512", "--head-dim", "64"]


@cache
def recorded(name: str, problem: Attention = PROBLEM) -> Result:
    return simulate(get_schedule(name), load_gpu(chip_for(name, "h100")), problem, record_limit=RECORDS)


def every_kernel(name: str, **window: Any) -> list[Picture]:
    result = recorded(name)
    return [picture(result, kernel=launch.program.name, **window) for launch in result.launches]


# --- what is laid out ---


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_lanes_are_ops_in_order_that_fill_the_window(name: str) -> None:
    for laid in every_kernel(name):
        assert laid.lanes
        assert [block for block in laid.blocks if block.end > block.start] == list(laid.blocks)
        for lane in laid.lanes:
            assert lane.slices
            for before, after in pairwise(lane.slices):
                assert before.end <= after.start + 1e-6
            assert all(x.end > laid.start and x.start < laid.end for x in lane.slices)
            assert all(x.family in FAMILIES and x.labels for x in lane.slices)


@pytest.mark.parametrize(("name", "gpu"), [*((name, chip_for(name, "h100")) for name in ALL_SCHEDULES), ("triton", "b200")])
def test_units_are_as_busy_as_the_engine_counted(name: str, gpu: str) -> None:
    """Over a whole recorded kernel, the areas hold the ticks of the engine's own books."""
    small = Attention(batch=1, heads_q=2, seqlen_q=512, head_dim=64)
    result = simulate(get_schedule(name), load_gpu(gpu), small, record_limit=1_000_000)
    for launch in result.launches:
        laid = picture(result, kernel=launch.program.name, span=(0, launch.run.ticks / TICKS_PER_CYCLE))
        busy = dict(zip((*UNITS[1:], "port"), launch.run.busy[0].sum(axis=0) / TICKS_PER_CYCLE, strict=True))
        life = launch.run.ticks / TICKS_PER_CYCLE * 4
        assert {unit for unit, held in busy.items() if held > 0.05 * life} <= {unit.name for unit in laid.units}
        for unit in laid.units:
            drawn = sum(share.sum() for share in unit.shares.values()) * (laid.edges[1] - laid.edges[0])
            counted = launch.run.shared[0][0] / TICKS_PER_CYCLE if unit.name == "smem" else busy[unit.name] / 4
            assert drawn == pytest.approx(counted, rel=0.05), unit.name


def test_the_window_is_three_blocks_in_the_middle_of_the_loop() -> None:
    laid = picture(recorded("fa2"))
    assert laid.trip == "block"
    assert laid.period is not None
    assert laid.view[1] - laid.view[0] == pytest.approx(3 * laid.period, rel=0.1)
    whole = [b for b in laid.blocks if b.slot == 0 and b.start >= laid.view[0] and b.end <= laid.view[1]]
    numbers = [int(block.label.removeprefix("block ")) for block in whole]
    assert len(numbers) == 3
    assert numbers[0] > 2
    assert sum("mma S" in x.labels for x in laid.lanes[0].slices) >= 3
    assert sum("mma Oacc" in x.labels for x in laid.lanes[0].slices) >= 3


def test_context_widens_what_is_laid_out_and_not_the_view() -> None:
    near, far = picture(recorded("fa2")), picture(recorded("fa2"), context=2)
    assert far.view == pytest.approx(near.view)
    assert far.start < near.start
    assert far.end > near.end
    assert (near.start, near.end) == pytest.approx(near.view)


def test_a_kernel_without_a_long_loop_shows_its_tiles() -> None:
    laid = picture(recorded("standard"), kernel="standard_softmax")
    assert laid.trip == "tile"
    assert all(re.fullmatch(r"tile \d+", block.label) for block in laid.blocks)


def test_the_longest_kernel_is_shown_unless_another_is_named() -> None:
    result = recorded("standard")
    assert picture(result).kernel == max(result.launches, key=lambda launch: launch.cycles).program.name
    names = ", ".join(launch.program.name for launch in result.launches)
    with pytest.raises(ValueError, match=f"^standard has no kernel 'pv'; it has {names}: change --kernel$"):
        picture(result, kernel="pv")


def test_a_span_in_cycles_is_heeded_and_clipped() -> None:
    result = recorded("fa2")
    assert picture(result, span=(2000, 5000)).view == (2000, 5000)
    width = picture(result).view[1] - picture(result).view[0]
    assert picture(result, span=(3000, None)).view == pytest.approx((3000, 3000 + width))
    assert picture(result, span=(None, 1e9)).view[1] < 1e9
    with pytest.raises(ValueError, match=r"^cycles 900 to 100 hold no records; cycles 0 to \d+ were recorded: change --from"):
        picture(result, span=(900, 100))


def test_nothing_recorded_is_refused() -> None:
    bare = simulate(get_schedule("fa2"), load_gpu("h100"), PROBLEM)
    with pytest.raises(ValueError, match=f"^fa2_fwd has no records: simulate with record_limit={RECORDS}$"):
        picture(bare)


def with_roles(*roles: tuple[str, int]) -> Result:
    """FA2's run as if its warps had these roles."""
    result = recorded("fa2")
    launch = result.launches[0]
    made = tuple(Role(name=name, warps=warps, registers=64, start=0) for name, warps in roles)
    program = dataclasses.replace(launch.program, roles=made)
    return dataclasses.replace(result, launches=(dataclasses.replace(launch, program=program),))


def test_each_role_has_lanes_of_its_own() -> None:
    laid = picture(with_roles(("producer", 1), ("consumer", 2), ("correction", 1)))
    names = ["producer warp 0", "consumer warps 0-1", "correction warp 0"]
    assert [lane.name for lane in laid.lanes] == names * len(laid.slots)
    every = picture(recorded("fa2"), every_warp=True)
    assert [lane.name for lane in every.lanes if lane.slot == 0] == [f"compute warp {i}" for i in range(4)]
    assert [unit.mean for unit in every.units] == [unit.mean for unit in picture(recorded("fa2")).units]


def test_every_op_and_wait_has_a_family() -> None:
    found = {name: family(name) for name in [*OPS, *WAITS.values()]}
    assert all(found[name] == "wait" for name in WAITS.values())
    assert found["mma"] == "matrix product"
    assert found["exp2"] == "exp2"
    assert found["load_async"] == "global load"
    assert found["barrier"] == found["commit"] == "sync"
    assert family("rescale+exp2+row_sum+convert") == "exp2"
    assert family("wgmma") == family("cross_warp+mma") == "matrix product"
    assert family("wgmma_wait") == family("tma_load_arrive") == "sync"
    assert family("an_op_to_come") == "other"
    assert [name for name in OPS if found[name] == "other"] == STRUCTURE


def linear(colour: str) -> Any:
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(np.dot([0.2126, 0.7152, 0.0722], linear(colour)))


#: Machado, Oliveira and Fernandes 2009, on linear light: every cone, no green cones, no red cones.
EYES = (
    np.eye(3),
    np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
)


def seen(colour: str, eye: Any) -> Any:
    """Where a colour lies in OKLab for such eyes."""
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    axes = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return axes @ np.cbrt(cones @ np.clip(eye @ linear(colour), 0, 1))


def test_colours_differ_for_colour_blind_readers_and_carry_readable_words() -> None:
    colours = [colour for colour, _ in FAMILIES.values()]
    for a, b in combinations(colours, 2):
        assert min(np.linalg.norm(seen(a, eye) - seen(b, eye)) for eye in EYES) > 0.07, (a, b)
    for colour in colours:
        ink = 1.0 if ink_on(colour) == "white" else luminance("#1a1a1a")
        ground = luminance(colour)
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, colour


# --- files ---


def test_a_png_is_wide_enough_for_a_talk(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(recorded("fa2"), tmp_path / "out.png")
    data = (tmp_path / "out.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width == 3200
    assert 1000 < height < 2600


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_an_svg_says_all_of_it_in_words(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = recorded(name)
    laid = plot(result, tmp_path / "out.svg")
    words = " ".join(ET.parse(tmp_path / "out.svg").getroot().itertext())
    for part in (title(result), subtitle(result), caption(laid, result)):
        assert " ".join(part.split()) in " ".join(words.split())
    for part in (*laid.families, *(unit.label for unit in laid.units), *(lane.name for lane in laid.lanes)):
        assert part in words
    assert "SM cycles since the kernel began" in words
    plot(result, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "out.svg").read_bytes()


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_no_words_overlap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from flashsim.sim.plot import DPI, draw

    result = recorded(name)
    figure = draw(picture(result), result, Figure)
    figure.set_dpi(DPI)
    drawn: list[Text] = []  # an axis keeps labels of ticks out of view, and draws none of them
    draw_text = Text.draw
    monkeypatch.setattr(Text, "draw", lambda text, renderer: (drawn.append(text), draw_text(text, renderer)))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    frame, words = figure.bbox, [text for text in dict.fromkeys(drawn) if text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in words]
    assert len(boxes) > 20
    for text, box in boxes:
        assert box.x0 >= 0, text
        assert box.x1 <= frame.x1 + 1, text
    for (one, a), (other, b) in combinations(boxes, 2):
        width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert width <= 2 or height <= 2, (one, other)


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.main, list(args))
    return result.exit_code, result.stdout, result.stderr.strip()


def test_the_command_draws_and_says_what(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = run("plot", "fa2", *SHAPE, "--from", "1000", "--to", "4000", "-o", str(tmp_path / "out.svg"))
    assert code == 0
    assert out == f"{tmp_path / 'out.svg'}: fa2_fwd, cycles 1,000 to 4,000\n"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["-o", "out.gif"], "flashsim: cannot draw out.gif: the name must end in .png, .svg, .pdf; change -o"),
        (["-o", "out.png", "--blocks", "0"], "flashsim: blocks is 0; it must be a whole number of at least 1: change --blocks"),
        (["-o", "out.png", "--kernel", "qk"], "flashsim: fa2 has no kernel 'qk'; it has fa2_fwd: change --kernel"),
        (["-o", "no/where.png"], "flashsim: cannot write no/where.png: no such file or directory; choose another path for -o"),
    ],
)
def test_bad_input_is_a_sentence(extra: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert run("plot", "fa2", *SHAPE, *extra) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, said = run("plot", "fa2", *SHAPE, "-o", "out.png")
    assert code == 2
    assert said == "flashsim: a timeline picture needs matplotlib, which is not installed: pip install '.[plot]'"


def test_instructions_of_a_slice_are_named() -> None:
    product = next(x for x in picture(recorded("fa2")).lanes[0].slices if "mma S" in x.labels)
    named = dict(reversed(part.split(" ")) for part in product.instructions.split(", "))
    assert set(named) <= set(INSTRUCTIONS)
    assert int(named["hmma"]) > 0
