"""The scores are done, the stage is given back: on with the values.

It runs for one K/V block, and for two. What does the warp's place in the ring say at the third?
"""

from typing import Any

from flashsim.model.examples.single_consumer import SingleConsumer
from flashsim.model.schedule import Builder


class StandingStill(SingleConsumer):
    name = "standing_still"

    def product(self, b: Builder, ring: str, into: str, operands: tuple[str, str], **how: Any) -> None:
        b.op("mbarrier_wait", barrier=f"{ring}_full", ring=ring)
        b.op("wgmma", writes=into, reads=operands, **how)
        b.op("mma_commit")
        b.op("mma_wait", arg=0)
        b.op("mbarrier_arrive", barrier=f"{ring}_empty", ring=ring)
        if ring == "k":
            b.op("advance", ring=ring)
