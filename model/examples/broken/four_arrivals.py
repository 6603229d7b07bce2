"""Four warps consume a stage, so its barrier is given four arrivals.

The barrier was made with count=4. Each of the four warps runs this code. Who counts what?
"""

from typing import Any

from flashsim.model.examples.single_consumer import SingleConsumer
from flashsim.model.schedule import Builder


class FourArrivals(SingleConsumer):
    name = "four_arrivals"

    def product(self, b: Builder, ring: str, into: str, operands: tuple[str, str], **how: Any) -> None:
        b.op("mbarrier_wait", barrier=f"{ring}_full", ring=ring)
        b.op("wgmma", writes=into, reads=operands, **how)
        b.op("mma_commit")
        b.op("mma_wait", arg=0)
        b.op("mbarrier_arrive", barrier=f"{ring}_empty", ring=ring, count=4)
        b.op("advance", ring=ring)
