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
    """softmax(scale * Q K^T) V for ``batch`` x ``heads_q`` heads; Q is (seqlen_q, head_dim), K and V have ``seqlen_kv`` rows.

    ``heads_kv``, ``seqlen_kv`` and ``head_dim_v`` default to their query-side twins. ``causal`` is aligned bottom-right: query i
    sees the keys j <= i + seqlen_kv - seqlen_q. Raises ValueError with got, allowed and what to change.
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
                raise ValueError(f"{field} is {value!r}; it must be a whole number of at least 1")
        if self.heads_q % self.heads_kv:
            raise ValueError(
                f"heads_q is {self.heads_q} and heads_kv is {self.heads_kv}; heads_q must be a multiple of heads_kv: change either"
            )
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPE_BYTES)}")
        if self.pass_ not in PASSES:
            raise ValueError(f"pass is {self.pass_!r}; it must be one of {', '.join(PASSES)}")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the mask leaves."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_kv
        offset = self.seqlen_kv - self.seqlen_q
        first = max(0, -offset)  # the first query that sees a key
        seen_first = first + offset + 1
        rows = self.seqlen_q - first
        return max(0, rows * (2 * seen_first + rows - 1) // 2) if rows > 0 else 0

    def flops(self, convention: str = "paper") -> int:
        """Matrix FLOPs. "paper": 2 (d + d_v) N^2 a head, halved when causal (FA2, FA3, FA4); "exact": visible pairs only.

        Backward is 2 (3 d + 2 d_v) a pair, 2.5 times the forward where d = d_v (five products against two).
        """
        if convention not in CONVENTIONS:
            raise ValueError(f"FLOP convention is {convention!r}; it must be one of {', '.join(CONVENTIONS)}")
        d, dv = self.head_dim, self.head_dim_v
        per_pair = {"fwd": 2 * (d + dv), "bwd": 2 * (3 * d + 2 * dv)}
        per_pair["fwd+bwd"] = per_pair["fwd"] + per_pair["bwd"]
        heads = self.batch * self.heads_q
        if convention == "exact":
            return heads * per_pair[self.pass_] * self.visible_pairs
        return heads * per_pair[self.pass_] * self.seqlen_q * self.seqlen_kv // (2 if self.causal else 1)

    @property
    def _tensor_bytes(self) -> dict[str, int]:
        e, b = self.dtype_bytes, self.batch
        return {
            "Q": b * self.heads_q * self.seqlen_q * self.head_dim * e,
            "K": b * self.heads_kv * self.seqlen_kv * self.head_dim * e,
            "V": b * self.heads_kv * self.seqlen_kv * self.head_dim_v * e,
            "O": b * self.heads_q * self.seqlen_q * self.head_dim_v * e,
            "LSE": b * self.heads_q * self.seqlen_q * LSE_BYTES,
        }

    def compulsory_bytes(self) -> tuple[int, int]:
        """(read, written) bytes with every input read once and every output written once. Backward also reads O, dO and LSE."""
        t = self._tensor_bytes
        fwd = (t["Q"] + t["K"] + t["V"], t["O"] + t["LSE"])
        bwd = (t["Q"] + t["K"] + t["V"] + 2 * t["O"] + t["LSE"], t["Q"] + t["K"] + t["V"])
        if self.pass_ == "fwd":
            return fwd
        return bwd if self.pass_ == "bwd" else (fwd[0] + bwd[0], fwd[1] + bwd[1])

    @property
    def label(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        rows = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"{self.seqlen_q}x{self.seqlen_kv}"
        dim = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim},{self.head_dim_v}"
        return f"B{self.batch} H{heads} N{rows} D{dim} {self.dtype} {self.pass_}{' causal' if self.causal else ''}"
