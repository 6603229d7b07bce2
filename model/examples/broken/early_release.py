"""Give the stage back early, so that the next copy starts sooner.

The product is issued and its group is closed: the warps have nothing more to do with the stage. Or do they?
"""

from typing import Any

from flashsim.model.examples.single_consumer import SingleConsumer
from flashsim.model.schedule import Builder


class EarlyRelease(SingleConsumer):
    name = "early_release"

    def product(self, b: Builder, ring: str, into: str, operands: tuple[str, str], **how: Any) -> None:
        b.op("mbarrier_wait", barrier=f"{ring}_full", ring=ring)
        b.op("wgmma", writes=into, reads=operands, **how)
        b.op("mma_commit")
        b.op("mbarrier_arrive", barrier=f"{ring}_empty", ring=ring)
        b.op("mma_wait", arg=0)
        b.op("advance", ring=ring)
