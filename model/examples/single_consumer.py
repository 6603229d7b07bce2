"""A schedule of one's own: FlashAttention-3 with a single consumer warpgroup and no ping-pong. README.md explains each line.

flashsim check model/examples/single_consumer.py
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashsim.model.attention import Attention
from flashsim.model.gpu import GPU
from flashsim.model.program import Index, Program, Tiles
from flashsim.model.schedule import Builder
from flashsim.model.schedules.grid import ceil_div, kv_blocks, planes, qkv_tensors

ROWS = 64  # of Q a CTA: what one warpgroup's wgmma takes
BLOCK = Index(arg="n_blocks", const=-1, loop="i", coef=-1)  # n_blocks - 1 - i: the last K/V block first


@dataclass(frozen=True, kw_only=True)
class SingleConsumer:
    """Fields are switches: ``--set stages=3`` replaces one. ``stages`` of K and of V are in flight."""

    block_kv: int = 128
    stages: int = 2
    name = "single_consumer"  # no annotation: not a switch

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        if gpu.wgmma is None or attention.dtype not in ("bf16", "fp16") or attention.pass_ != "fwd":
            raise ValueError("single_consumer runs bf16 or fp16 forward on a chip with wgmma: choose gpu h100 or h200")
        d = ceil_div(max(attention.head_dim, attention.head_dim_v), 64) * 64  # TMA pads head_dim with zeros
        b = Builder(name="single_consumer_fwd", registers=168)  # a thread at launch
        b.ring("q", 1)  # a ring makes a circular buffer of one; each warp has its own place in it
        b.smem("Qs", rows=ROWS, cols=d, bytes_per_element=2)
        b.smem("Qs.O", rows=ROWS, cols=d, bytes_per_element=2)  # "X.Y" lies in X's memory: O leaves through Q's
        b.mbarrier("q_full", count=1)
        for name in ("k", "v"):
            b.ring(name, self.stages)
            b.smem(f"{name.upper()}s", rows=self.block_kv, cols=d, bytes_per_element=2, stages=self.stages, ring=name)
            b.mbarrier(f"{name}_full", count=1, stages=self.stages)  # the producer arrives, and the copy's bytes
            b.mbarrier(f"{name}_empty", count=4, stages=self.stages)  # the consumer's warps arrive
        for name, cols, size in (("S", self.block_kv, 4), ("P", self.block_kv, 2), ("O", d, 4), ("Oout", d, 2), ("LSEout", 1, 4)):
            b.registers_tile(name, rows=ROWS, cols=cols, bytes_per_element=size)
        b.named_barrier("epilogue", warps=4)
        with b.role("producer", warps=1, registers=96):
            self.produce(b)
        with b.role("consumer", warps=4, registers=240):  # setmaxnreg: 96 + 240 = 2 x 168, so that the trade adds up
            self.consume(b, d)
        tensors = qkv_tensors(attention, ROWS, self.block_kv, 2).values()
        return (b.build(tensors=tuple(tensors), tiles=self.tiles(attention), launch_registers=168, idle_warps=3),)

    def produce(self, b: Builder) -> None:
        b.op("mbarrier_expect", barrier="q_full", ring="q", of=("Qs",))  # announce the bytes, then copy
        b.op("tma_load", writes="Qs", reads="Q", index=Index(arg="q_block"), barrier="q_full", ring="q")
        with b.loop("i", Index(arg="n_blocks")):
            for tensor, ring in (("K", "k"), ("V", "v")):
                b.op("mbarrier_wait", barrier=f"{ring}_empty", ring=ring, previous=True)  # free since the turn before
                b.op("mbarrier_expect", barrier=f"{ring}_full", ring=ring, of=(f"{tensor}s",))
                b.op("tma_load", writes=f"{tensor}s", reads=tensor, index=BLOCK, barrier=f"{ring}_full", ring=ring)
                b.op("advance", ring=ring)

    def consume(self, b: Builder, d: int) -> None:
        for name, shape, value in (("O", (ROWS, d), 0.0), ("l", (ROWS,), 0.0), ("m", (ROWS,), -np.inf)):
            b.op("zero", writes=name, shape=shape, value=value)
        b.op("mbarrier_wait", barrier="q_full", ring="q")
        with b.loop("i", Index(arg="n_blocks")):
            self.product(b, "k", "S", ("Qs", "Ks"), transpose_b=True)
            b.op("mask", writes="S", index=BLOCK)
            b.op("row_max", writes=("m", "m_old"), reads="S")
            b.op("rescale", writes=("O", "l"), reads=("m", "m_old"))
            b.op("exp2", writes="S", reads=("S", "m"))
            b.op("row_sum", writes="l", reads="S")
            b.op("convert", writes="P", reads="S")
            self.product(b, "v", "O", ("P", "Vs"), accumulate=True)
        b.op("quad_sum", like="S")  # four threads share a row
        self.epilogue(b)

    def epilogue(self, b: Builder) -> None:
        b.op("divide", writes=("O", "LSEout"), reads=("l", "m"))
        b.op("convert", writes="Oout", reads="O")
        b.op("stmatrix", writes="Qs.O", reads="Oout")  # each warp's products have read its rows of Q
        b.op("fence_async")  # ordinary stores, then a copy by TMA: another proxy
        b.op("named_sync", barrier="epilogue")  # all four warps have stored
        b.op("tma_store", writes="O", reads="Qs.O", index=Index(arg="q_block"), wait="read")
        b.op("store", writes="LSE", reads="LSEout", index=Index(arg="q_block"))

    def product(self, b: Builder, ring: str, into: str, operands: tuple[str, str], **how: Any) -> None:
        b.op("mbarrier_wait", barrier=f"{ring}_full", ring=ring)
        b.op("wgmma", writes=into, reads=operands, **how)
        b.op("mma_commit")
        b.op("mma_wait", arg=0)  # the accumulator is there, and the operands are no longer read
        b.op("mbarrier_arrive", barrier=f"{ring}_empty", ring=ring)  # so that the stage may be filled again
        b.op("advance", ring=ring)

    def tiles(self, attention: Attention) -> Tiles:
        batch, head, q_block = np.indices((attention.batch, attention.heads_q, ceil_div(attention.seqlen_q, ROWS))).reshape(3, -1)
        columns = [*planes(attention, batch, head), q_block, kv_blocks(attention, ROWS, self.block_kv, q_block)[0]]
        return Tiles(names=("plane_q", "plane_kv", "q_block", "n_blocks"), values=np.stack(columns, axis=1))  # a row a CTA
