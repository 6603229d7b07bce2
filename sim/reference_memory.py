"""The reference engine's L2 and HBM of a whole chip: tiles in the order of their last use, filled and written back in time."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from .engine import CHIP_RATE, HBM_LATENCY, HBM_RATE, L2_LATENCY, Job
from .fast_lru import BASE, BLOCKS, DIRTY, FILLED, FIRST_SIZE, L2_READ, L2_WRITE, NEWER, OLDER, OWNER, PLANE, RESIDENT
from .fast_lru import HBM_READ as READ
from .fast_lru import HBM_WRITE as WRITTEN

HBM_PORT = 2


@dataclass
class Tile:
    """A tile that L2 holds."""

    size: int
    dirty: bool


class ChipMemory:
    """L2 and HBM that all SMs share. ``tiles``: what L2 holds, oldest first."""

    def __init__(self, job: Job) -> None:
        assert job.l2 is not None
        self.job, self.l2 = job, job.l2
        self.rate, self.latency = job.rate.tolist(), job.latency.tolist()
        self.l2_free = self.hbm_free = 0
        self.held = self.l2.held
        self.owner = self.l2.tiles[:, OWNER].tolist()
        self.filled = self.l2.tiles[:, FILLED].tolist()
        self.traffic = [[0] * 4 for _ in self.l2.tensors]
        self.tiles: OrderedDict[int, Tile] = OrderedDict()
        root = len(self.owner) - 1
        i = int(self.l2.tiles[root, NEWER])
        while i != root:
            self.tiles[i] = Tile(int(self.l2.tiles[i, RESIDENT]), bool(self.l2.tiles[i, DIRTY]))
            i = int(self.l2.tiles[i, NEWER])

    def request(
        self, tick: int, size: int, tensor: int, bundle: int, block: int, args: list[int], used: list[int], left: int
    ) -> int:
        """When a request at ``tick`` for ``size`` bytes of the tensor's ``block`` is answered; ``used``: of the SM's ports, its
        own port to L2 has served it at ``left``."""
        arrives = max(left, self.l2_queue(tick, size)) + int(self.latency[L2_LATENCY])
        if tensor < 0:
            return arrives
        number = int(self.l2.numbers[tensor])
        row, write = self.l2.tensors[number].tolist(), bool(self.l2.writes[bundle])
        self.traffic[number][L2_WRITE if write else L2_READ] += size
        if not 0 <= block < row[BLOCKS]:
            return arrives
        i = row[BASE] + args[row[PLANE]] * row[BLOCKS] + block
        fills = i not in self.tiles and not write
        moved = self.access(i, int(self.l2.sizes[row[FIRST_SIZE] + block]), write)
        if moved:
            cost = moved * self.rate[HBM_RATE][0] // self.rate[HBM_RATE][1]
            self.hbm_free = max(tick, self.hbm_free) + cost
            used[HBM_PORT] += cost
            if fills:
                self.filled[i] = self.hbm_free + self.latency[HBM_LATENCY]
        return arrives if write else max(arrives, self.filled[i])

    def l2_queue(self, tick: int, size: int) -> int:
        """When L2 has served a request."""
        numerator, denominator = self.rate[CHIP_RATE]
        self.l2_free = max(tick, self.l2_free) + size * numerator // denominator
        return self.l2_free

    def access(self, i: int, size: int, write: bool) -> int:
        """Use tile ``i`` last, let the oldest go where room is short; bytes that HBM moves."""
        moved = 0
        if i not in self.tiles:
            self.tiles[i] = Tile(size, False)
            self.held += size
            if not write:
                self.traffic[self.owner[i]][READ] += size
                moved += size
        self.tiles.move_to_end(i)
        self.tiles[i].dirty |= write
        while self.held > self.l2.capacity:
            victim, tile = self.tiles.popitem(last=False)
            self.held -= tile.size
            if tile.dirty:
                self.traffic[self.owner[victim]][WRITTEN] += tile.size
                moved += tile.size
        return moved

    def table(self) -> list[list[int]]:
        """The table of tiles at the end, as the fast engine keeps it."""
        rows: list[list[int]] = self.l2.tiles.tolist()
        root = len(rows) - 1
        order = [root, *self.tiles, root]
        for i, row in enumerate(rows[:-1]):
            row[FILLED] = self.filled[i]
            row[OLDER] = row[NEWER] = root
            row[RESIDENT], row[DIRTY] = (self.tiles[i].size, int(self.tiles[i].dirty)) if i in self.tiles else (0, 0)
        for older, newer in zip(order, order[1:], strict=False):
            rows[older][NEWER], rows[newer][OLDER] = newer, older
        return rows
