"""The reference engine's L2 and HBM of a whole chip: tiles in the order of their last use, filled and written back in time."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

from .engine import CHIP_RATE, HBM_LATENCY, HBM_RATE, L2_LATENCY, Job
from .fast_lru import BASE, BLOCKS, DIRTY, FILLED, FIRST_SIZE, L2_READ, L2_WRITE, NEWER, OLDER, OWNER, PLANE, RESIDENT, TO_ASK
from .fast_lru import HBM_READ as READ
from .fast_lru import HBM_WRITE as WRITTEN
from .fast_share import MOST_TURNS, UNIT

HBM_PORT, MILLION = 2, 1_000_000


@dataclass(frozen=True)
class Landing:
    """When something lands: at a tick, and where L2 and HBM are shared not before each has come to a mark."""

    at: int = 0
    l2: int = 0
    hbm: int = 0

    def with_(self, other: Landing) -> Landing:
        return Landing(max(self.at, other.at), max(self.l2, other.l2), max(self.hbm, other.hbm))


@dataclass
class Share:
    """A queue that serves all SMs that wait evenly, and each SM's requests in order. Amounts are UNITs of a tick of service.

    ``progress``: what an SM has been served that never stopped asking; a request is done when it comes to its mark. ``asked``: of
    each SM from which mark to which it waits, in order. ``rides``: from which mark to which SMs wait for what others have asked
    for, before they go on. ``changes``: (when, progress, SMs that wait from then on).
    """

    asked: list[list[tuple[int, int]]]
    now: int = 0
    progress: int = 0
    rides: list[tuple[int, int]] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)

    def left(self, mark: int) -> int:
        """Service of all SMs until progress comes to ``mark``, if nobody asks any more."""
        spans = (span for spans in self.asked for span in spans)
        return sum(max(0, min(end, mark) - max(begin, self.progress)) for begin, end in spans)

    def waiting(self) -> int:
        return sum(begin <= self.progress < end for spans in self.asked for begin, end in spans)

    def go_on(self, tick: int) -> None:
        """Serve up to ``tick``."""
        while marks := [mark for spans in self.asked for span in spans for mark in span if mark > self.progress]:
            ends = min(marks)
            at = self.now - -self.left(ends) // UNIT
            if at > tick:
                self.progress += (tick - self.now) * UNIT // self.waiting()
                break
            self.now, self.progress = at, ends
            self.asked = [[span for span in spans if span[1] > ends] for spans in self.asked]
            self.rides = [ride for ride in self.rides if ride[1] > ends]
            self.changes.append((self.now, self.progress, self.waiting()))
        self.now = tick

    def ask(self, sm: int, cost: int, ride: int) -> int:
        """A request at the tick up to which all is served, after a ride to a mark; returns its own mark."""
        spans = self.asked[sm]
        idle = not spans
        begin = self.progress if idle else spans[-1][1]
        to_come = sum(end > self.progress for span in self.rides for end in span)
        if ride > begin and to_come + 2 <= MOST_TURNS * len(self.asked):
            self.rides.append((begin, ride))
            begin = ride
        if idle or begin > spans[-1][1]:
            spans.append((begin, begin + cost))
        else:
            spans[-1] = (spans[-1][0], begin + cost)
        if idle:
            self.changes.append((self.now, self.progress, self.waiting()))
        return begin + cost

    def reached(self, mark: int) -> int:
        """The tick at which progress came to ``mark``, or will if nobody asks any more."""
        if mark > self.progress:
            return self.now - -self.left(mark) // UNIT
        place = bisect_left(self.changes, mark, key=lambda change: change[1])
        if place == 0:
            return 0
        then, progress, waiting = self.changes[place - 1]
        return then - (progress - mark) * waiting // UNIT


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
        self.queues = tuple(Share([[] for _ in range(job.sms)]) for _ in range(2))  # L2's and HBM's
        self.rides = [0] * job.sms  # up to which mark of HBM each SM's last tile is filled, by whomever
        self.held = self.l2.held
        self.owner = self.l2.tiles[:, OWNER].tolist()
        self.filled: list[int] = self.l2.tiles[:, FILLED].tolist()
        self.to_ask: list[int] = self.l2.tiles[:, TO_ASK].tolist()
        self.traffic = [[0] * 4 for _ in self.l2.tensors]
        self.tiles: OrderedDict[int, Tile] = OrderedDict()
        root = len(self.owner) - 1
        i = int(self.l2.tiles[root, NEWER])
        while i != root:
            self.tiles[i] = Tile(int(self.l2.tiles[i, RESIDENT]), bool(self.l2.tiles[i, DIRTY]))
            i = int(self.l2.tiles[i, NEWER])

    def request(
        self, tick: int, sm: int, size: int, whole: int, tensor: int, bundle: int, block: int, args: list[int], used: list[int],
        left: int,
    ) -> Landing:  # fmt: skip
        """How a request at ``tick`` for ``size`` bytes of the tensor's ``block`` lands.

        ``whole``: what its row asks for in all, where this is the row's last; ``used``: of the SM's ports, of which its own to L2
        has served the request at ``left``.
        """
        self.serve(tick)
        landing = Landing(left + int(self.latency[L2_LATENCY]), self.queue(CHIP_RATE, sm, size))
        if tensor < 0:
            return landing
        number = int(self.l2.numbers[tensor])
        row, write = self.l2.tensors[number].tolist(), bool(self.l2.writes[bundle])
        self.traffic[number][L2_WRITE if write else L2_READ] += size
        if not 0 <= block < row[BLOCKS]:
            return landing
        i = row[BASE] + args[row[PLANE]] * row[BLOCKS] + block
        held = int(self.l2.sizes[row[FIRST_SIZE] + block])
        if write:
            self.write(sm, i, held, used)
            return landing
        share = int(self.job.miss_ppm[tensor])
        part = whole - (whole - size) * share // MILLION if whole else size * share // MILLION
        return landing.with_(Landing(hbm=self.read(sm, i, held, part, used)))

    def write(self, sm: int, i: int, held: int, used: list[int]) -> None:
        """The first write to tile ``i`` takes all of it to HBM."""
        clean = i not in self.tiles or not self.tiles[i].dirty
        if i not in self.tiles:
            self.to_ask[i] = 0
        self.access(i, held, write=True)
        if clean:
            self.ask_hbm(sm, held, used)

    def read(self, sm: int, i: int, held: int, part: int, used: list[int]) -> int:
        """Ask HBM for a part of tile ``i``, as far as nobody has; the mark at which all that was asked for is there."""
        if i not in self.tiles:
            self.to_ask[i] = held
        self.access(i, held, write=False)
        asked = min(part, self.to_ask[i])
        if asked:
            self.to_ask[i] -= asked
            self.filled[i] = max(self.filled[i], self.ask_hbm(sm, asked, used))
        if asked < part:
            self.rides[sm] = max(self.rides[sm], self.filled[i])
        return self.filled[i]

    def ask_hbm(self, sm: int, size: int, used: list[int]) -> int:
        """The mark of a request at HBM, after what the SM rides with."""
        used[HBM_PORT] += size * self.rate[HBM_RATE][0] // self.rate[HBM_RATE][1]
        return self.queue(HBM_RATE, sm, size, self.rides[sm])

    def spill(self, tick: int, sm: int, size: int) -> None:
        """Registers written through: nothing waits for them but what is asked for later."""
        self.serve(tick)
        self.queue(CHIP_RATE, sm, size)

    def serve(self, tick: int) -> None:
        for queue in self.queues:
            queue.go_on(tick)

    def queue(self, rate: int, sm: int, size: int, ride: int = 0) -> int:
        """The mark of an SM's request at L2 or HBM, after a ride to a mark."""
        numerator, denominator = self.rate[rate]
        return self.queues[rate == HBM_RATE].ask(sm, size * numerator * UNIT // denominator, ride)

    def until(self, landing: Landing, after: int) -> int:
        """When it lands if nobody else asks; ``after``: ticks from the answers of L2 and HBM on."""
        at, latencies = landing.at, (self.latency[L2_LATENCY], self.latency[HBM_LATENCY])
        for queue, mark, latency in zip(self.queues, (landing.l2, landing.hbm), latencies, strict=True):
            if mark:
                at = max(at, queue.reached(mark) + latency + after)
        return at

    def access(self, i: int, size: int, write: bool) -> None:
        """Use tile ``i`` last, let the oldest go where room is short."""
        if i not in self.tiles:
            self.tiles[i] = Tile(size, False)
            self.held += size
            if not write:
                self.traffic[self.owner[i]][READ] += size
        self.tiles.move_to_end(i)
        self.tiles[i].dirty |= write
        while self.held > self.l2.capacity:
            victim, tile = self.tiles.popitem(last=False)
            self.held -= tile.size
            if tile.dirty:
                self.traffic[self.owner[victim]][WRITTEN] += tile.size

    def table(self) -> list[list[int]]:
        """The table of tiles at the end, as the fast engine keeps it."""
        rows: list[list[int]] = self.l2.tiles.tolist()
        root = len(rows) - 1
        order = [root, *self.tiles, root]
        for i, row in enumerate(rows[:-1]):
            row[FILLED], row[TO_ASK] = self.filled[i], self.to_ask[i]
            row[OLDER] = row[NEWER] = root
            row[RESIDENT], row[DIRTY] = (self.tiles[i].size, int(self.tiles[i].dirty)) if i in self.tiles else (0, 0)
        for older, newer in zip(order, order[1:], strict=False):
            rows[older][NEWER], rows[newer][OLDER] = newer, older
        return rows
