"""The CTAs that the checker follows together: a cluster's warps and barriers, and what crosses from one CTA to another.

A CTA's barriers and memory are there for another CTA from the first ``cluster_sync`` on, which tells it that they are
initialised, and until the CTA ends. What reaches a CTA from outside must be known to be over to one of its own warps by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..model.program import Program
from .hazard_clocks import TIME, At, Mbarrier, Named, Places, Warp

#: Ops at which the CTAs of a cluster meet: all of their warps, or a pair's two that allocate tensor memory together.
ALL_WARPS, ALLOCATION = "cluster_sync", "tmem_alloc"
MEETINGS = (ALL_WARPS, ALLOCATION)


@dataclass(frozen=True, slots=True)
class Remote:
    """Something that an op of another CTA does to this one: over for those whose clock has ``value`` in ``place``."""

    place: int
    value: int
    at: At
    what: str


@dataclass(eq=False, kw_only=True)
class Cta:
    """One CTA. ``start``: the clock's place of the initialisation of its barriers, which its own warps know of."""

    rank: int
    start: int
    warps: list[Warp] = field(default_factory=list)
    mbarriers: dict[str, list[Mbarrier]] = field(default_factory=dict)
    named: dict[str, Named] = field(default_factory=dict)
    remote: dict[tuple[int, str], Remote] = field(default_factory=dict)

    def barriers(self) -> list[Mbarrier | Named]:
        return [*(b for stages in self.mbarriers.values() for b in stages), *self.named.values()]

    def unknown(self) -> list[Remote]:
        """What other CTAs do that no warp of this one knows to be over, now that all have ended."""
        return [r for r in self.remote.values() if max(warp.clock[r.place] for warp in self.warps) < r.value]


def cluster(program: Program) -> list[Cta]:
    """The CTAs of one cluster (or the CTA alone), with fresh clocks."""
    places = Places()
    assert places.new() == TIME
    ctas = [_cta(program, rank, places) for rank in range(program.cluster)]
    warps = [warp for cta in ctas for warp in cta.warps]
    counts = {ALL_WARPS: sum(warp.weight for warp in warps), ALLOCATION: len(ctas)}
    meetings = {name: Named(name, count, places.new()) for name, count in counts.items()}
    for cta in ctas:
        cta.named |= meetings
        for warp in cta.warps:
            warp.begin(places.size, tuple(ring.name for ring in program.rings))
            warp.clock[cta.start] = 1
    return ctas


def _cta(program: Program, rank: int, places: Places) -> Cta:
    of_cta = f" of CTA {rank}" if program.cluster > 1 else ""
    cta = Cta(rank=rank, start=places.new())
    cta.warps = [
        Warp(number, role, lead, places, rank=rank, of_cta=of_cta)
        for number, role in enumerate(program.roles)
        for lead in ((True, False) if role.warps > 1 else (True,))
    ]
    for b in program.barriers:
        if b.kind == "mbarrier":
            shown = b.stages > 1
            cta.mbarriers[b.name] = [
                Mbarrier(b.name, i if shown else None, b.count, places.new(), rank, of_cta) for i in range(b.stages)
            ]
        else:
            cta.named[b.name] = Named(b.name, b.count, places.new(), rank, of_cta)
    return cta
