"""The space of a sweep: lists, ranges and switches, and every field of every schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from small_sweeps import FA2, GPU, GRID, PROBLEM

from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.sim.explore import Sweep
from flashsim.sim.space import Steps, knobs, parse_space, usual_space


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("block_q=64,128", "block_q", [64, 128]),
        ("warps=none,4", "warps", [None, 4]),
        ("block_kv=2:4", "block_kv", [2, 3, 4]),
        ("block_kv=64:256:64", "block_kv", [64, 128, 192, 256]),
        ("block_kv=64:200:64", "block_kv", [64, 128, 192]),
        ("block_kv=16,64:128:32", "block_kv", [16, 64, 96, 128]),
        ("counts=binary,ideal", "counts", ["binary", "ideal"]),
        ("causal", "causal", [False, True]),
        ("causal=true,false", "causal", [True, False]),
        ("clock=1000:1400:200", "clock", [1000.0, 1200.0, 1400.0]),
        ("clock=boost,1500", "clock", ["boost", 1500.0]),
        ("gpu.pipe.ex2=4,8", "gpu.pipe.ex2", [4.0, 8.0]),
        ("pipe.ex2=0.1:0.3:0.1", "gpu.pipe.ex2", [0.1, 0.2, 0.3]),
        ("seqlen=512,1024", "seqlen", [512, 1024]),
    ],
)
def test_values_are_lists_ranges_and_switches(text: str, name: str, values: list[Any]) -> None:
    (axis,) = parse_space([text], FA2, GPU).axes
    assert axis.name == name
    assert [axis.values[i] for i in range(len(axis.values))] == values


def test_candidates_are_numbered_like_digits() -> None:
    space = parse_space(GRID, FA2, GPU)
    assert space.size == 16
    assert [space.at(n)["block_q"] for n in range(4)] == [64, 100, 64, 100]
    assert [space.number(space.places(n)) for n in range(16)] == list(range(16))
    assert len({tuple(space.at(n).values()) for n in range(16)}) == 16
    with pytest.raises(IndexError):
        space.at(16)


def test_a_huge_range_takes_no_memory() -> None:
    space = parse_space(["block_q=1:1000000000", "block_kv=1:1000000000"], FA2, GPU)
    assert space.size == 10**18
    assert space.at(10**18 - 1) == {"block_q": 10**9, "block_kv": 10**9}
    assert isinstance(space.axes[0].values, Steps)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_field_of_every_schedule_can_be_varied(name: str) -> None:
    schedule = get_schedule(name)
    known = knobs(schedule, GPU)
    assert set(SCHEDULES[name].__dataclass_fields__) <= known.keys()
    assert {f"gpu.{number}" for number, _ in GPU.numbers()} <= known.keys()
    assert parse_space(usual_space(schedule), schedule, GPU).size > 1


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A schedule as they may come: switches, choices and stages."""

    stages: int = 2
    pingpong: bool = True
    order: Literal["lpt", "linear"] = "lpt"
    tile_n: int | None = None
    share: float = 0.1

    @property
    def name(self) -> str:
        return "pipelined"

    def lower(self, gpu: Any, attention: Any) -> Any:
        return FA2.lower(gpu, attention)


def test_fields_of_a_schedule_not_known_here() -> None:
    texts = ["stages=2:4", "pingpong", "order", "tile_n=none,64", "share=0:0.5:0.25"]
    space = parse_space(texts, Pipelined(), GPU)
    assert space.size == 3 * 2 * 2 * 2 * 3
    assert space.at(space.size - 1) == {"stages": 4, "pingpong": True, "order": "linear", "tile_n": 64, "share": 0.5}
    sweep = Sweep(schedule=Pipelined(), gpu=GPU, problem=PROBLEM, space=space)
    assert sweep.candidate(space.size - 1)[0] == Pipelined(stages=4, order="linear", tile_n=64, share=0.5)
    assert usual_space(Pipelined(), ["tile_n"]) == ["stages=1:4", "pingpong"]
    with pytest.raises(ValueError, match=r"^--vary order got 'lifo'; it takes lpt or linear$"):
        parse_space(["order=lifo"], Pipelined(), GPU)
