"""The problem: one attention call, its FLOPs in both conventions and the bytes it cannot avoid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "fp32": 4}
PASSES = ("fwd", "bwd", "fwd+bwd")
CONVENTIONS = ("paper", "exact")
LSE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Attention:
    """softmax(scale * Q K^T) V for ``batch`` x ``heads_q`` heads, forward, backward or both.

    Of one head, Q is (seqlen_q, head_dim), K (seqlen_kv, head_dim), V (seqlen_kv, head_dim_v) and O (seqlen_q,
    head_dim_v), all of ``dtype``; LSE is (seqlen_q) in fp32. ``heads_kv``, ``seqlen_kv`` and ``head_dim_v`` default
    to ``heads_q``, ``seqlen_q`` and ``head_dim``; heads_q / heads_kv query heads share a K/V head. ``causal`` is
    aligned bottom-right: query i sees the keys j <= i + seqlen_kv - seqlen_q. Raises ValueError: what was got, what
    is allowed, what to change.
    """

    batch: int
    heads_q: int
    heads_kv: int = cast(int, None)
    seqlen_q: int
    seqlen_kv: int = cast(int, None)
    head_dim: int
    head_dim_v: int = cast(int, None)
    causal: bool = False
    dtype: str = "bf16"
    pass_: str = "fwd"

    def __post_init__(self) -> None:
        for field, twin in (("heads_kv", "heads_q"), ("seqlen_kv", "seqlen_q"), ("head_dim_v", "head_dim")):
            if getattr(self, field) is None:
                object.__setattr__(self, field, getattr(self, twin))
        for field in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a whole number of at least 1: change {field}")
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal is {self.causal!r}; it must be True or False: change causal")
        if self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q is {self.heads_q} and heads_kv is {self.heads_kv};"
                " heads_q must be a multiple of heads_kv: change either"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}: change dtype")
        if self.pass_ not in PASSES:
            raise ValueError(f"pass is {self.pass_!r}; it must be one of {', '.join(PASSES)}: change pass_")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of Q, K, V, O and their gradients."""
        return DTYPE_BYTES[self.dtype]

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head_dim), the factor on Q K^T."""
        return float(self.head_dim**-0.5)

    @property
    def group(self) -> int:
        """Query heads that share one K/V head."""
        return self.heads_q // self.heads_kv

    def visible_keys(self, row: int) -> int:
        """How many keys query ``row`` sees: the first ones, 0 to seqlen_kv. Raises ValueError for no such row."""
        if not 0 <= row < self.seqlen_q:
            raise ValueError(f"row is {row}; it must be from 0 to seqlen_q - 1 = {self.seqlen_q - 1}: change row")
        if not self.causal:
            return self.seqlen_kv
        return min(max(row + 1 + self.seqlen_kv - self.seqlen_q, 0), self.seqlen_kv)

    @property
    def unmasked_pairs(self) -> int:
        """(query, key) pairs of one head that the mask leaves: the sum of ``visible_keys`` in closed form."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_kv
        rows = min(self.seqlen_q, self.seqlen_kv)  # the rows above see no key when there are more queries than keys
        least = self.seqlen_kv - rows + 1  # keys of the first row that sees any
        return rows * (least + self.seqlen_kv) // 2

    def flops(self, convention: str = "paper") -> int:
        """Matrix FLOPs of the pass over all heads; a multiply-add is two.

        "paper": 2 (d + d_v) N_q N_kv a head, exactly halved when causal (FA2, FA3 and FA4); "exact": unmasked pairs
        only (as NVIDIA's cudnn-frontend counts). Backward has five products where forward has two: 2 (3 d + 2 d_v)
        a pair, 2.5 times the forward where d = d_v. Raises ValueError for another convention.
        """
        if convention not in CONVENTIONS:
            allowed = ", ".join(CONVENTIONS)
            raise ValueError(f"FLOP convention is {convention!r}; it must be one of {allowed}: change convention")
        d, dv = self.head_dim, self.head_dim_v
        per_pair = {"fwd": 2 * (d + dv), "bwd": 2 * (3 * d + 2 * dv)}
        per_pair["fwd+bwd"] = per_pair["fwd"] + per_pair["bwd"]
        heads = self.batch * self.heads_q
        if convention == "exact":
            return heads * per_pair[self.pass_] * self.unmasked_pairs
        return heads * per_pair[self.pass_] * self.seqlen_q * self.seqlen_kv // (2 if self.causal else 1)

    @property
    def tensor_bytes(self) -> dict[str, int]:
        """Bytes of Q, K, V, O (gradients are as large as their tensors) and of LSE, over all heads and the batch."""
        e, b = self.dtype_bytes, self.batch
        return {
            "Q": b * self.heads_q * self.seqlen_q * self.head_dim * e,
            "K": b * self.heads_kv * self.seqlen_kv * self.head_dim * e,
            "V": b * self.heads_kv * self.seqlen_kv * self.head_dim_v * e,
            "O": b * self.heads_q * self.seqlen_q * self.head_dim_v * e,
            "LSE": b * self.heads_q * self.seqlen_q * LSE_BYTES,
        }

    @property
    def compulsory_read_bytes(self) -> int:
        """Bytes read if every input is read once: Q, K, V forward; Q, K, V, O, dO, LSE backward; the sum for both."""
        t = self.tensor_bytes
        qkv = t["Q"] + t["K"] + t["V"]
        by_pass = {"fwd": qkv, "bwd": qkv + 2 * t["O"] + t["LSE"]}
        return by_pass.get(self.pass_, sum(by_pass.values()))

    @property
    def compulsory_write_bytes(self) -> int:
        """Bytes written if every output is written once: O, LSE forward; dQ, dK, dV backward; the sum for both."""
        t = self.tensor_bytes
        by_pass = {"fwd": t["O"] + t["LSE"], "bwd": t["Q"] + t["K"] + t["V"]}
        return by_pass.get(self.pass_, sum(by_pass.values()))

    @property
    def label(self) -> str:
        """The problem in a few words, e.g. "B4 H16/4 N1024x2048 D128 bf16 fwd causal"."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        rows = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"{self.seqlen_q}x{self.seqlen_kv}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim},{self.head_dim_v}"
        return f"B{self.batch} H{heads} N{rows} D{dim} {self.dtype} {self.pass_}{' causal' if self.causal else ''}"
