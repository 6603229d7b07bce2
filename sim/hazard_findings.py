"""What the checker says: where an op stands, what is wrong with it, and the verdict on a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

SHOWN = 3  # findings that a printed verdict gives in full

#: Kinds by how near they are to the cause, as a rule: what is miscounted, what goes wrong with data, what may, what comes of it.
KINDS = {
    "budget": 0,
    "bytes": 0,
    "arrival count": 0,
    "read before data": 1,
    "write before release": 1,
    "read without data": 1,
    "missing proxy fence": 1,
    "named barrier": 1,
    "unfinished at exit": 1,
    "early remote access": 1,
    "late remote access": 1,
    "write before write": 2,
    "phase": 2,
    "early arrival": 2,
    "deadlock": 3,
}


@dataclass(frozen=True, kw_only=True)
class Site:
    """One op as one warp runs it: ``loops`` are the loop counters, so they name the K/V block; ``warps`` names it, and its CTA
    where there are several."""

    role: str
    warps: str
    op: str
    tile: int
    loops: tuple[tuple[str, int], ...] = ()

    @property
    def block(self) -> str:
        return ", ".join([f"tile {self.tile}", *(f"{name}={value}" for name, value in self.loops)])

    def __str__(self) -> str:
        return f"{self.warps}: {self.op} ({self.block})"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One hazard. ``at``: the op that goes wrong; ``other``: the access, arrival or wait that it collides with.

    ``buffer`` with ``stage`` and ``barrier`` with ``phase`` are empty where none is concerned; a named barrier's phase counts
    how often it has been completed. ``events``: the last ordering ops of the warps concerned, oldest first.
    """

    kind: str
    sentence: str
    kernel: str
    at: Site | None = None
    other: Site | None = None
    buffer: str = ""
    stage: int | None = None
    barrier: str = ""
    phase: int | None = None
    events: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        return self.at.role if self.at else ""

    @property
    def op(self) -> str:
        return self.at.op if self.at else ""

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.sentence}"]
        for label, site in (("at", self.at), ("against", self.other)):
            if site:
                lines.append(f"  {label:<8} {site}")
        if self.buffer:
            lines.append(f"  buffer   {self.buffer}" + (f" stage {self.stage}" if self.stage is not None else ""))
        if self.barrier:
            lines.append(f"  barrier  {self.barrier}" + (f" phase {self.phase}" if self.phase is not None else ""))
        lines += [f"  {'before' if i == 0 else '':<8} {event}" for i, event in enumerate(self.events)]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Order:
    """Why one access comes after another, whatever the timing: ``by`` is the op through which the later warp knows."""

    earlier: str
    later: str
    buffer: str
    by: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What ``check`` found. ``followed``: ops interpreted; ``notes``: what was left out; ``orders``: what orders what."""

    schedule: str
    gpu: str
    problem: str
    kernels: tuple[str, ...]
    findings: tuple[Finding, ...]
    tiles: int
    followed: int
    notes: tuple[str, ...] = ()
    orders: tuple[Order, ...] = field(default=(), repr=False)

    @property
    def clean(self) -> bool:
        return not self.findings

    @property
    def sentence(self) -> str:
        what = f"{self.schedule} on {self.gpu}, {self.problem}"
        if self.clean:
            kernels = "1 kernel" if len(self.kernels) == 1 else f"{len(self.kernels)} kernels"
            return f"{what}: clean ({kernels}, {self.tiles} tiles, {self.followed:,} ops followed)"
        number = "1 hazard" if len(self.findings) == 1 else f"{len(self.findings)} hazards"
        return f"{what}: {number}; {self.findings[0].kind}: {self.findings[0].sentence}"

    def __str__(self) -> str:
        lines = [self.sentence.partition(";")[0]]
        for finding in self.findings[:SHOWN]:
            lines += ["", str(finding)]
        if len(self.findings) > SHOWN:
            lines += ["", f"and {len(self.findings) - SHOWN} more that may follow from these"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)
