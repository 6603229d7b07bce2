"""V always comes after K, and the producer has just waited for K's stage: one wait will do for both.

Is a stage of V free when the one of K is?
"""

from flashsim.model.examples.single_consumer import BLOCK, SingleConsumer
from flashsim.model.program import Index
from flashsim.model.schedule import Builder


class EagerProducer(SingleConsumer):
    name = "eager_producer"

    def produce(self, b: Builder) -> None:
        b.op("mbarrier_expect", barrier="q_full", ring="q", of=("Qs",))
        b.op("tma_load", writes="Qs", reads="Q", index=Index(arg="q_block"), barrier="q_full", ring="q")
        with b.loop("i", Index(arg="n_blocks")):
            for tensor, ring in (("K", "k"), ("V", "v")):
                if ring == "k":
                    b.op("mbarrier_wait", barrier=f"{ring}_empty", ring=ring, previous=True)
                b.op("mbarrier_expect", barrier=f"{ring}_full", ring=ring, of=(f"{tensor}s",))
                b.op("tma_load", writes=f"{tensor}s", reads=tensor, index=BLOCK, barrier=f"{ring}_full", ring=ring)
                b.op("advance", ring=ring)
