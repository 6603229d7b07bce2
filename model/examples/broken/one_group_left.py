"""Leave one product group in flight, as FlashAttention-3 does while softmax runs.

mma_wait counts what may be unfinished. How many groups are under way here when softmax reads the scores?
"""

from typing import Any

from flashsim.model.examples.single_consumer import SingleConsumer
from flashsim.model.schedule import Builder


class OneGroupLeft(SingleConsumer):
    name = "one_group_left"

    def product(self, b: Builder, ring: str, into: str, operands: tuple[str, str], **how: Any) -> None:
        b.op("mbarrier_wait", barrier=f"{ring}_full", ring=ring)
        b.op("wgmma", writes=into, reads=operands, **how)
        b.op("mma_commit")
        b.op("mma_wait", arg=1)
        b.op("mbarrier_arrive", barrier=f"{ring}_empty", ring=ring)
        b.op("advance", ring=ring)
