"""L2 as one LRU list of tiles with write-back: the access of one tile, for the replay of a launch and for chip scope."""

from __future__ import annotations

from typing import Any

from .fast_parts import part

#: Columns of the table of tiles: neighbours in the list, bytes held, whether they are dirty, tensor, at which mark HBM has filled
#: what was asked for, and bytes that nobody has asked for yet. The table's last row is the list's root: newer than it is the
#: oldest tile.
OLDER, NEWER, RESIDENT, DIRTY, OWNER, FILLED, TO_ASK, TILE_SIZE = range(8)
#: Columns of the table of tensors: first tile, blocks of a head plane, the tile argument that picks the plane, first block
#: size, and CTAs that one request serves.
BASE, BLOCKS, PLANE, FIRST_SIZE, SHARERS = range(5)
#: Columns of the traffic of a tensor.
L2_READ, L2_WRITE, HBM_READ, HBM_WRITE = range(4)


@part
def unlink(tiles: Any, i: Any) -> None:
    older, newer = tiles[i, OLDER], tiles[i, NEWER]
    tiles[newer, OLDER] = older
    tiles[older, NEWER] = newer


@part
def touch(tiles: Any, i: Any) -> None:
    """Put tile ``i`` at the recent end of the list."""
    root = tiles.shape[0] - 1
    newest = tiles[root, OLDER]
    tiles[i, OLDER], tiles[i, NEWER] = newest, root
    tiles[newest, NEWER] = i
    tiles[root, OLDER] = i


@part
def access(tiles: Any, held: Any, capacity: Any, out: Any, i: Any, size: Any, write: Any) -> None:
    """Tile ``i`` of ``size`` bytes is read or written: bring it in, let the oldest go.

    ``held[0]``: bytes in L2. ``out``: traffic by tensor, whose columns of HBM are counted here.
    """
    root = tiles.shape[0] - 1
    if tiles[root, OLDER] == i:  # the last one used: many CTAs read it in turn
        if write:
            tiles[i, DIRTY] = 1
        return
    if tiles[i, RESIDENT] > 0:
        unlink(tiles, i)
    else:
        tiles[i, RESIDENT] = size
        held[0] += size
        if not write:
            out[tiles[i, OWNER], HBM_READ] += size
    if write:
        tiles[i, DIRTY] = 1
    touch(tiles, i)
    while held[0] > capacity:
        victim = tiles[root, NEWER]
        unlink(tiles, victim)
        bytes_ = tiles[victim, RESIDENT]
        held[0] -= bytes_
        if tiles[victim, DIRTY]:
            out[tiles[victim, OWNER], HBM_WRITE] += bytes_
            tiles[victim, DIRTY] = 0
        tiles[victim, RESIDENT] = 0
