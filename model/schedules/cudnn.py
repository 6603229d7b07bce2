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
from ..schedule import Schedule
from .fa2 import FA2
from .fa3 import FA3
from .fa4 import FA4

FA4_LIKE = (9, 19)
ASSUMED = "assumed: cuDNN taken as {} (its kernels are closed)"
AS_BEFORE = "fa4 without emulated exponentials and conditional rescale"


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
        like, schedule = self._like(gpu)
        programs = schedule.lower(gpu, attention)
        return tuple(replace(p, name=f"cudnn_{p.name}", profile=ASSUMED.format(like)) for p in programs)

    def _like(self, gpu: GPU) -> tuple[str, Schedule]:
        """The pipeline that it borrows on this chip, in words and as a schedule."""
        release = self._release()
        if gpu.tcgen05 is not None and release >= FA4_LIKE:
            return "fa4", FA4(cta_pair=self.cta_pair)
        if gpu.tcgen05 is not None:
            return AS_BEFORE, FA4(exp2_emulation=0.0, rescale_threshold=0.0, cta_pair=self.cta_pair)
        return ("fa3", FA3()) if gpu.wgmma is not None else ("fa2", FA2(build="flash-attn"))

    def assumption(self, gpu: GPU) -> str:
        return f"an assumption: cuDNN's kernels are closed, and here {self._like(gpu)[0]} stands for them"

    def _release(self) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in self.version.split("."))
        except ValueError:
            raise ValueError(f"cudnn has version={self.version!r}; write a release as 9.13: change version") from None
