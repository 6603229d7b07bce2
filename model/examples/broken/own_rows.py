"""Each warp has stored its rows of O and fenced them: TMA may copy.

Which rows does the copy take?
"""

from flashsim.model.examples.single_consumer import SingleConsumer
from flashsim.model.program import Index
from flashsim.model.schedule import Builder


class OwnRows(SingleConsumer):
    name = "own_rows"

    def epilogue(self, b: Builder) -> None:
        b.op("divide", writes=("O", "LSEout"), reads=("l", "m"))
        b.op("convert", writes="Oout", reads="O")
        b.op("stmatrix", writes="Qs.O", reads="Oout")
        b.op("fence_async")
        b.op("tma_store", writes="O", reads="Qs.O", index=Index(arg="q_block"), wait="read")
        b.op("store", writes="LSE", reads="LSEout", index=Index(arg="q_block"))
