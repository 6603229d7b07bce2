"""K and V are tiles of equal size, so their bytes are announced alike.

What does a barrier wait for besides its arrivals?
"""

from flashsim.model.examples.single_consumer import BLOCK, SingleConsumer
from flashsim.model.program import Index
from flashsim.model.schedule import Builder


class NeverFull(SingleConsumer):
    name = "never_full"

    def produce(self, b: Builder) -> None:
        b.op("mbarrier_expect", barrier="q_full", ring="q", of=("Qs",))
        b.op("tma_load", writes="Qs", reads="Q", index=Index(arg="q_block"), barrier="q_full", ring="q")
        with b.loop("i", Index(arg="n_blocks")):
            for tensor, ring in (("K", "k"), ("V", "v")):
                b.op("mbarrier_wait", barrier=f"{ring}_empty", ring=ring, previous=True)
                b.op("mbarrier_expect", barrier=f"{ring}_full", ring=ring, of=("Ks", "Vs"))
                b.op("tma_load", writes=f"{tensor}s", reads=tensor, index=BLOCK, barrier=f"{ring}_full", ring=ring)
                b.op("advance", ring=ring)
