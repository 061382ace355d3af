"""Norms of installed packages: FlashInfer and Liger. Packages are imported when an instance is made."""

# mypy: disable-error-code="import-not-found"
# The packages are installed where they are measured, not where types are checked.

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs


class FlashInferRmsNorm(PlainKernel):
    """flashinfer.norm.rmsnorm."""

    name = "flashinfer-rmsnorm"

    def __init__(self) -> None:
        from flashinfer.norm import rmsnorm

        self._norm: Any = rmsnorm

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        self._norm(state["x"], state["weight"], state["eps"], out=out[0])
        return out


class LigerRmsNorm(PlainKernel):
    """LigerRMSNormFunction, the forward half, in Llama's casting."""

    name = "liger-rmsnorm"

    def __init__(self) -> None:
        from liger_kernel.transformers.functional import liger_rms_norm

        self._norm: Any = liger_rms_norm

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        x = state["x"]
        return cast("Tensor", self._norm(x.contiguous(), state["weight"], state["eps"], in_place=False))


class LigerAddRmsNorm(PlainKernel):
    """LigerFusedAddRMSNormFunction, the forward half, in Llama's casting."""

    name = "liger-add-rmsnorm"

    def __init__(self) -> None:
        from liger_kernel.transformers.functional import liger_fused_add_rms_norm

        self._norm: Any = liger_fused_add_rms_norm

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Outputs:
        x, residual = state["x"].contiguous(), state["residual"]
        return cast("Outputs", self._norm(x, residual, state["weight"], state["eps"], in_place=False))
