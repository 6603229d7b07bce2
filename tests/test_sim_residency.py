"""What L2 holds: bytes by hand where everything fits, the closed forms where nothing does, and each write-back once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import PAIRS, chip_for

from flashsim.model.attention import Attention
from flashsim.model.gpu import load_gpu
from flashsim.model.program import Program
from flashsim.model.schedules import SCHEDULES, get_schedule
from flashsim.model.traffic import Traffic, fa1_bytes, fa2_bytes, standard_bytes
from flashsim.sim.residency import HBM_READ, HBM_WRITE, L2_READ, L2_WRITE, LOCAL, Residency

CLOSED_FORMS = ["standard", "fa1", "fa2"]  # schedules whose traffic model.traffic has in closed form
ALL_SCHEDULES = list(SCHEDULES)
HUGE = 1 << 50
COLUMNS = (L2_READ, L2_WRITE, HBM_READ, HBM_WRITE)
SLOTS = 216
SHAPES: dict[str, dict[str, Any]] = {
    "square": {"batch": 2, "heads_q": 4, "seqlen_q": 1024, "head_dim": 64},
    "GQA": {"batch": 1, "heads_q": 8, "heads_kv": 2, "seqlen_q": 1024, "head_dim": 64},
    "ragged": {"batch": 1, "heads_q": 3, "seqlen_q": 777, "seqlen_kv": 1301, "head_dim": 64},
    "wide": {"batch": 1, "heads_q": 2, "seqlen_q": 1024, "head_dim": 128},
}
TENSOR_OF_LEDGER = {"Otmp": "O_partial"}


def ledger(name: str, a: Attention, capacity: int, *, slots: int = SLOTS, gpu: str = "a100-40gb") -> dict[str, list[int]]:
    """Bytes by storage ("S@tile" and "S@rows" are S) over all launches and the last write-back."""
    programs = get_schedule(name).lower(load_gpu(gpu), a)
    residency = Residency(programs, capacity)
    rows: dict[str, list[int]] = {}
    for traffic in [*(residency.launch(p, slots) for p in programs), residency.flush()]:
        for tensor, row in traffic.by_tensor.items():
            storage = tensor.split("@")[0]
            if storage == LOCAL:  # spilled registers: of the binary, not of the algorithm
                continue
            total = rows.setdefault(storage, [0, 0, 0, 0])
            rows[storage] = [x + y for x, y in zip(total, row, strict=True)]
    return rows


def closed_form(name: str, a: Attention, gpu: str = "a100-40gb") -> Traffic:
    if name == "standard":
        return standard_bytes(a)
    schedule: Any = get_schedule(name)
    if name == "fa1":
        blocks = schedule.tile(a)[:2]
    else:
        tile = schedule.tile(load_gpu(gpu), a)
        blocks = tile.block_q, tile.block_kv
    return (fa1_bytes if name == "fa1" else fa2_bytes)(a, block_q=blocks[0], block_kv=blocks[1])


def problem(shape: str, causal: bool) -> Attention:
    return Attention(**SHAPES[shape], causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fa2_moves_what_it_must_where_everything_fits(shape: str, causal: bool) -> None:
    a = problem(shape, causal)
    rows = ledger("fa2", a, HUGE)
    assert {name: row[HBM_READ] for name, row in rows.items()} == {
        "Q": a.tensor_bytes["Q"],
        "K": a.tensor_bytes["K"],
        "V": a.tensor_bytes["V"],
        "O": 0,
        "LSE": 0,
    }
    written = {name: row[HBM_WRITE] for name, row in rows.items() if row[HBM_WRITE]}
    assert written == {"O": a.tensor_bytes["O"], "LSE": a.tensor_bytes["LSE"]}


def test_fa2_by_hand() -> None:
    """One head, 256 x 64 in bf16: 2 Q blocks of 128 and 2 K/V blocks of 128 (16 KiB each)."""
    a = Attention(batch=1, heads_q=1, seqlen_q=256, head_dim=64)
    block = 128 * 64 * 2
    assert ledger("fa2", a, HUGE)["K"] == [4 * block, 0, 2 * block, 0]
    assert ledger("fa2", a, HUGE)["O"] == [0, 2 * block, 0, 2 * block]
    # one tile of room, CTAs one after the other: each of the four reads of K misses
    assert ledger("fa2", a, block, slots=1)["K"] == [4 * block, 0, 4 * block, 0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_requests_are_the_closed_form_by_tensor(name: str, shape: str, causal: bool) -> None:
    """What the SMs ask for, tensor by tensor, within 5 % (to the byte for FA2)."""
    a = problem(shape, causal)
    rows, expected = ledger(name, a, HUGE), closed_form(name, a)
    tolerance = 0.0 if name == "fa2" else 0.05
    for tensor, row in rows.items():
        known = TENSOR_OF_LEDGER.get(tensor, tensor)
        assert row[L2_READ] == pytest.approx(expected.reads.get(known, 0), rel=tolerance), f"{tensor} read"
        assert row[L2_WRITE] == pytest.approx(expected.writes.get(known, 0), rel=tolerance), f"{tensor} written"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["fa1", "fa2"])
def test_nothing_fits_then_hbm_sees_every_request(name: str, shape: str, causal: bool) -> None:
    a = problem(shape, causal)
    rows, expected = ledger(name, a, 0, slots=1), closed_form(name, a)
    read, written = (sum(row[column] for row in rows.values()) for column in (HBM_READ, HBM_WRITE))
    assert read == pytest.approx(expected.at_hbm(l2_bytes=0).read_bytes, rel=0.05)
    assert written == pytest.approx(expected.at_hbm(l2_bytes=0).write_bytes, rel=0.05)
    for row in rows.values():
        assert (row[HBM_READ], row[HBM_WRITE]) == (row[L2_READ], row[L2_WRITE])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["fa1", "fa2"])
def test_everything_fits_then_hbm_is_the_closed_form(name: str, shape: str, causal: bool) -> None:
    a = problem(shape, causal)
    rows, expected = ledger(name, a, HUGE), closed_form(name, a).at_hbm(l2_bytes=HUGE)
    read, written = (sum(row[column] for row in rows.values()) for column in (HBM_READ, HBM_WRITE))
    assert read == pytest.approx(expected.read_bytes, rel=0.05)
    assert written == pytest.approx(expected.write_bytes, rel=0.05)


def test_a_block_written_twice_is_written_back_once() -> None:
    """FA1's scratch is rewritten at every K/V block; with room it reaches HBM once, when all is flushed."""
    a = Attention(batch=1, heads_q=1, seqlen_q=512, seqlen_kv=1024, head_dim=64)
    rows = ledger("fa1", a, HUGE)
    scratch = 512 * 64 * 4
    assert rows["Otmp"] == [3 * scratch, 3 * scratch, 0, scratch]
    assert rows["m"] == rows["l"] == [3 * 512 * 4, 3 * 512 * 4, 0, 512 * 4]
    assert rows["O"] == [0, 512 * 64 * 2, 0, 512 * 64 * 2]


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_a_second_flush_writes_nothing(name: str) -> None:
    programs = get_schedule(name).lower(load_gpu(chip_for(name)), problem("square", False))
    residency = Residency(programs, HUGE)
    for program in programs:
        residency.launch(program, SLOTS)
    assert residency.flush().total(HBM_WRITE) > 0
    assert [residency.flush().total(column) for column in COLUMNS] == [0, 0, 0, 0]


def test_standard_hands_s_over_in_l2_where_it_fits() -> None:
    """S and P that stay in L2 are never read from HBM; S that does not fit goes out and comes back in each kernel."""
    a = Attention(batch=1, heads_q=2, seqlen_q=1024, head_dim=64)
    scores = a.heads_q * 1024 * 1024 * a.dtype_bytes
    fits, spills = ledger("standard", a, HUGE), ledger("standard", a, scores // 4)
    for tensor in ("S", "P"):
        assert fits[tensor][L2_READ] == fits[tensor][L2_WRITE] == scores
        assert fits[tensor][HBM_READ] == 0
        assert fits[tensor][HBM_WRITE] <= scores
        assert spills[tensor] == [scores, scores, scores, scores]


def test_a_mask_kernel_adds_a_round_trip_of_s() -> None:
    a = Attention(batch=1, heads_q=2, seqlen_q=1024, head_dim=64)
    masked = Attention(batch=1, heads_q=2, seqlen_q=1024, head_dim=64, causal=True)
    scores = a.heads_q * 1024 * 1024 * a.dtype_bytes
    plain, more = (ledger("standard", x, 0) for x in (a, masked))
    for column in COLUMNS:
        assert more["S"][column] - plain["S"][column] == scores


@pytest.mark.parametrize("name", ALL_SCHEDULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bytes_stay_between_compulsory_and_requested(name: str, data: st.DataObject) -> None:
    """Whatever L2's size: HBM reads no input less than once (of what is needed) nor more often than it is requested."""
    a = Attention(
        batch=1,
        heads_q=2,
        heads_kv=data.draw(st.sampled_from([1, 2])),
        seqlen_q=data.draw(st.integers(1, 600)),
        seqlen_kv=data.draw(st.integers(1, 600)),
        head_dim=64,
        causal=data.draw(st.booleans()),
    )
    gpu = chip_for(name, "a100-40gb")
    rows = ledger(name, a, data.draw(st.integers(0, 1 << 20)), slots=data.draw(st.integers(1, 300)), gpu=gpu)
    for tensor in ("O", "LSE"):
        if tensor in rows:
            assert rows[tensor][HBM_WRITE] == rows[tensor][L2_WRITE] == a.tensor_bytes[tensor]
    for tensor in ("Q", "K", "V"):
        assert rows[tensor][HBM_READ] <= rows[tensor][L2_READ]
        assert a.causal or rows[tensor][HBM_READ] >= a.tensor_bytes[tensor]


@pytest.mark.parametrize("name", ["fa1", "fa2"])
def test_a_larger_l2_never_moves_more(name: str) -> None:
    a = Attention(batch=1, heads_q=4, seqlen_q=1024, head_dim=64)
    moved = []
    for capacity in (0, 1 << 16, 1 << 18, 1 << 20, 1 << 22, HUGE):
        rows = ledger(name, a, capacity, slots=16)
        moved.append(sum(row[HBM_READ] + row[HBM_WRITE] for row in rows.values()))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < moved[0]


@pytest.mark.parametrize(("name", "gpu"), PAIRS)
def test_miss_shares_are_what_hbm_serves(name: str, gpu: str) -> None:
    programs: tuple[Program, ...] = get_schedule(name).lower(load_gpu(gpu), problem("square", True))
    residency = Residency(programs, int(load_gpu(gpu).l2.size_bytes))
    for program in programs:
        traffic = residency.launch(program, SLOTS)
        for tensor, ppm in zip(program.tensors, traffic.miss_ppm(program), strict=True):
            row = traffic.by_tensor[tensor.name]
            assert 0 <= ppm <= 1_000_000
            asked, served = row[L2_READ] + row[L2_WRITE], row[HBM_READ] + row[HBM_WRITE]
            assert ppm == pytest.approx(min(1e6, 1e6 * served / asked) if asked else 0, abs=1)
