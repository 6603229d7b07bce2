"""The copy is on its way, and nothing is left to do: the CTA ends.

What is the shared memory worth that the copy still reads?
"""

from flashsim.model.examples.single_consumer import SingleConsumer
from flashsim.model.program import Index
from flashsim.model.schedule import Builder


class GoneTooSoon(SingleConsumer):
    name = "gone_too_soon"

    def epilogue(self, b: Builder) -> None:
        b.op("divide", writes=("O", "LSEout"), reads=("l", "m"))
        b.op("convert", writes="Oout", reads="O")
        b.op("stmatrix", writes="Qs.O", reads="Oout")
        b.op("fence_async")
        b.op("named_sync", barrier="epilogue")
        b.op("tma_store", writes="O", reads="Qs.O", index=Index(arg="q_block"))
        b.op("store", writes="LSE", reads="LSEout", index=Index(arg="q_block"))
