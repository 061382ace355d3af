"""Sampling of FlashInfer. The package is imported when an instance is made."""

# mypy: disable-error-code="import-not-found"
# The package is installed where it is measured, not where types are checked.

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.kernels.sampling import NO_TOKEN, scaled
from kbench.ops.base import Outputs


class FlashInferTopK:
    """flashinfer.sampling.top_k_mask_logits."""

    name = "flashinfer-top-k"

    def __init__(self) -> None:
        from flashinfer.sampling import top_k_mask_logits

        self._mask: Any = top_k_mask_logits

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    def plan(self, state: dict[str, Any]) -> Tensor:
        """FlashInfer's k counts from 1; here 0 keeps all."""
        k, vocab = state["k"], state["logits"].shape[1]
        return torch.where((k <= 0) | (k > vocab), vocab, k).to(torch.int32)

    def run(self, state: dict[str, Any], plan: Tensor, out: Outputs) -> Tensor:
        return cast("Tensor", self._mask(state["logits"], plan))


class FlashInferDraw(PlainKernel):
    """flashinfer.sampling.sampling_from_logits, with its own generator."""

    name = "flashinfer-draw"
    own_generator = True

    def __init__(self) -> None:
        from flashinfer.sampling import sampling_from_logits

        self._draw: Any = sampling_from_logits

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        token = self._draw(scaled(state["logits"].float(), state["temperature"])).long()
        return torch.where(torch.isinf(state["logits"]).all(dim=-1), NO_TOKEN, token)
