"""What one warp issues for the asynchronous operations of Hopper: bulk copies, mbarriers, named barriers, warpgroup products."""

from __future__ import annotations

from collections.abc import Mapping

from .instructions import INSTRUCTIONS, WARP_VECTOR_BYTES, wgmma
from .lowering import Emitter, portion
from .program import Buffer, Statement

K_STEP_BYTES = 32
MMA_WARPGROUP_ROWS = 64


def tma_load(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """``copies`` bulk copies of a warp's part of a tile, counted by mbarrier ``barrier`` at the stage of ``ring``.

    ``ctas``: the barrier counts this many CTAs' parts of the tile, of which this buffer is one. ``multicast``: each of so many
    CTAs of a cluster copies its part of the tile to all of them. ``to``: as in :func:`mbarrier_arrive`.
    The stage that is filled is that of ``ring`` too: a role that also reads the buffer has two places in it.
    """
    size = buffers[s.writes[0]].size_bytes * int(s.attrs.get("ctas", 1)) // warps
    emit.issue(
        "utmaldg", int(s.attrs.get("copies", 1)), total_bytes=size, barrier=s.attrs["barrier"], ring=s.attrs["ring"]
    )  # fmt: skip


def tma_store(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """A warp's part of the tile, as a group of its own; ``wait="read"``: until shared memory has been read and may be written."""
    emit.issue("utmastg", 1, total_bytes=max(1, buffers[s.reads[0]].size_bytes // warps))
    emit.marker("commit", 0)
    if s.attrs.get("wait"):
        emit.marker("wait_group", 0)


def store_wait(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """Until shared memory has been read by all bulk stores that the warp has issued."""
    emit.issue("control", 1)
    emit.marker("wait_group", 0)


def mbarrier_expect(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """One arrival a warp, and its part of the bytes of the tiles named in ``of`` (or ``bytes``).

    ``leader``: only the cluster's first CTA does it, for the tiles of ``each`` CTAs, of which a timing of one sees its own.
    """
    emit.issue("control", 1)
    size = expected_bytes(s, buffers) * int(s.attrs.get("ctas", 1)) // warps
    emit.order("mbarrier_arrive", s.attrs["barrier"], s.attrs["ring"], count=1, total_bytes=size)


def expected_bytes(s: Statement, buffers: Mapping[str, Buffer]) -> int:
    return int(s.attrs.get("bytes", sum(buffers[name].size_bytes for name in s.attrs.get("of", ()))))


def mbarrier_arrive(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """``products``: when all that the warp has issued to the tensor cores so far is done (tcgen05.commit).

    ``to``: the barrier of that name in "all" CTAs of the cluster, in its "leader" (the first), or in the "peer" (the other one).
    """
    emit.issue("control", 1)
    arg = 1 if s.attrs.get("products") else -1
    emit.order("mbarrier_arrive", s.attrs["barrier"], s.attrs["ring"], count=arrivals(s), arg=arg)


def arrivals(s: Statement) -> int:
    """Arrivals of one warp; where ``ctas`` CTAs arrive, a timing of one counts those of the others, in step, as well."""
    return int(s.attrs.get("count", 1)) * int(s.attrs.get("ctas", 1))


def mbarrier_wait(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """``previous``: the phase before the ring's own, which is how a producer waits for a stage to be empty; ``elected``: one lane
    waits for its warp, and hears of it later.

    The answer that a phase is over takes its time too: the warp goes on with it, or when the phase ends.
    """
    emit.issue("try_wait", 1)
    previous, arg = int(bool(s.attrs.get("previous", False))), 1 if s.attrs.get("elected") else -1
    emit.order("mbarrier_wait", s.attrs["barrier"], s.attrs["ring"], count=previous, arg=arg)
    emit.depend()


def advance(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.order("advance", ring=s.attrs["ring"])


def tile(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.order("tile")


def transpose(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """8-bit tile: ldmatrix.trans, four byte permutes and stmatrix on 512 bytes at a time, through one set of registers."""
    for _ in range(-(-buffers[s.reads[0]].size_bytes // warps // WARP_VECTOR_BYTES)):
        emit.issue("ldsm", 1, scoreboard=3)
        emit.wait_scoreboard(3)
        emit.issue("int_alu", 4)
        emit.depend()
        emit.issue("stsm", 1)


def named(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("control", 1)
    emit.order(s.kind, s.attrs["barrier"], count=int(s.attrs.get("count", 0)))


def product(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """A tile in k-steps of 32 bytes: the warpgroups of a role share its rows, and rows above 64 each repeat the steps.

    Raises ValueError where rows do not make whole m64 products, or no wgmma is as wide as the tile.
    """
    a, dst = buffers[s.reads[0]], buffers[s.writes[0]]
    element, rows = a.bytes_per_element, MMA_WARPGROUP_ROWS * (warps // 4)
    if warps % 4 or dst.rows % rows:
        raise ValueError(
            f"{s.writes[0]} has {dst.rows} rows for {warps} warps; a warpgroup is four warps and its wgmma has"
            f" {MMA_WARPGROUP_ROWS} rows, so it takes a multiple of {rows or MMA_WARPGROUP_ROWS}: change rows or the role's warps"
        )
    name = wgmma(dst.cols, fp8=element == 1, from_register=a.space == "register")
    if name not in INSTRUCTIONS:
        raise ValueError(f"{s.writes[0]} has {dst.cols} columns; wgmma's N is a multiple of 8 up to 256: change cols")
    steps = int(a.cols * element) // K_STEP_BYTES * (dst.rows // rows)
    for _ in range(portion(steps, s)):
        emit.issue(name, 1)


def product_group(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    emit.issue("control", 1)
    emit.order(s.kind, arg=int(s.attrs.get("arg", 0)))


def stmatrix(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """``halves``: 16 bits a lane at a time, where columns are permuted."""
    size = buffers[s.reads[0]].size_bytes // warps
    if s.attrs.get("halves"):
        emit.issue("st16", size // 64)
    else:
        emit.issue("stsm", max(1, -(-size // WARP_VECTOR_BYTES)))


def loop_back(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """A loop's taken branch: it is among the instructions counted in the binary, what its target takes to come is not."""
    emit.issue("refetch", 1)


def control(emit: Emitter, s: Statement, buffers: Mapping[str, Buffer], warps: int) -> None:
    """setmaxnreg, proxy fences: one instruction; what they order is checked by ``sim.hazards``."""
    emit.issue("control", 1)
