"""O is stored to shared memory, all warps meet, TMA copies it out.

The stores are ordinary, the copy is not. What does TMA see of them?
"""

from flashsim.model.examples.single_consumer import SingleConsumer
from flashsim.model.program import Index
from flashsim.model.schedule import Builder


class TwoProxies(SingleConsumer):
    name = "two_proxies"

    def epilogue(self, b: Builder) -> None:
        b.op("divide", writes=("O", "LSEout"), reads=("l", "m"))
        b.op("convert", writes="Oout", reads="O")
        b.op("stmatrix", writes="Qs.O", reads="Oout")
        b.op("named_sync", barrier="epilogue")
        b.op("tma_store", writes="O", reads="Qs.O", index=Index(arg="q_block"), wait="read")
        b.op("store", writes="LSE", reads="LSEout", index=Index(arg="q_block"))
