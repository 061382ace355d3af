"""Fused sampling in Triton: workspaces and the launch. The kernel is `kernels.sample_row`, imported when it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kbench.ops.base import Outputs

CHUNK = 4_096
SHORT = 2_048
"""Candidates that fit into the registers of one program: 16 values a thread at 128 threads."""


@dataclass(frozen=True, slots=True)
class Workspace:
    values: Tensor
    """float32 `[rows, vocab]`: masked and penalised logits; it stays in L2 for up to a hundred rows."""
    short_values: Tensor
    short_tokens: Tensor


class TritonFusedSampling:
    """The whole chain in one kernel, one program a row: a batch of 1 uses one multiprocessor."""

    name = "triton-fused-sampling"

    def __init__(self) -> None:
        from kbench.kernels import sample_row

        self._kernel: Any = sample_row._sample_row

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    def plan(self, state: dict[str, Any]) -> Workspace:
        values = state["logits"]
        rows, device = len(values), values.device
        return Workspace(
            torch.empty(values.shape, dtype=torch.float32, device=device),
            torch.empty((rows, SHORT), dtype=torch.float32, device=device),
            torch.empty((rows, SHORT), dtype=torch.int32, device=device),
        )

    def run(self, state: dict[str, Any], plan: Workspace, out: Outputs) -> Tensor:
        values, history = state["logits"], state["history"]
        rows, vocab = values.shape
        if rows:
            self._kernel[(rows,)](
                values,
                history,
                *(state[name] for name in ("prompt", "repetition", "presence", "frequency")),
                state["bits"],
                *(state[name] for name in ("temperature", "k", "p", "uniform")),
                out[0],
                plan.values,
                plan.short_values,
                plan.short_tokens,
                vocab,
                history.shape[1],
                values.stride(0),
                state["bits"].shape[1],
                CHUNK=min(CHUNK, max(16, 1 << (vocab - 1).bit_length())),
                SHORT=SHORT,
                HISTORY=max(16, 1 << max(0, history.shape[1] - 1).bit_length()),
                num_warps=8,
            )
        return out[0]
