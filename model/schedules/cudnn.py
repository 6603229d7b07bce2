"""cuDNN's fused attention, forward, as an assumption: its kernels are closed, so it borrows the nearest open pipeline.

Blackwell: FA4's without what FA4 added (emulated exponentials, conditional rescale) for releases before 9.19, FA4's own from then
on: the FA4 paper says that newer cuDNN has its ideas too. Hopper: FA3's. Ampere: FA2's. Nothing of it was read in a binary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..attention import Attention
from ..gpu import GPU
from ..program import Program
from .fa2 import FA2
from .fa3 import FA3
from .fa4 import FA4

FA4_LIKE = (9, 19)
ASSUMED = "assumed: cuDNN taken as {} (its kernels are closed)"


@dataclass(frozen=True, kw_only=True)
class CuDNN:
    """``version``: from 9.19 on Blackwell's kernels are taken as FA4's own; ``cta_pair``: FA4's switch there."""

    version: str = "9.13"
    cta_pair: bool | None = None

    @property
    def name(self) -> str:
        return "cudnn"

    def lower(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        try:
            return self._borrowed(gpu, attention)
        except ValueError as error:
            raise ValueError(re.sub(r"^fa[234]\b", self.name, str(error))) from None

    def _borrowed(self, gpu: GPU, attention: Attention) -> tuple[Program, ...]:
        if gpu.tcgen05 is not None and self._release() >= FA4_LIKE:
            like, programs = "fa4", FA4(cta_pair=self.cta_pair).lower(gpu, attention)
        elif gpu.tcgen05 is not None:
            like = "fa4 without emulated exponentials and conditional rescale"
            programs = FA4(exp2_emulation=0.0, rescale_threshold=0.0, cta_pair=self.cta_pair).lower(gpu, attention)
        elif gpu.wgmma is not None:
            like, programs = "fa3", FA3().lower(gpu, attention)
        else:
            like, programs = "fa2", FA2(build="flash-attn").lower(gpu, attention)
        self._release()
        return tuple(replace(p, name=f"cudnn_{p.name}", profile=ASSUMED.format(like)) for p in programs)

    def _release(self) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in self.version.split("."))
        except ValueError:
            raise ValueError(f"cudnn has version={self.version!r}; write a release as 9.13: change version") from None
