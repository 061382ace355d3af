"""An operation held to what a rule declares stricter than kbench's own limits (`[rule.tolerance.DTYPE]`).

Owns the narrowing of limits, for everyone who judges answers of one trial: the correctness phase, the answers of timed
calls, the tuner. It can only forgive less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from kbench.ops.base import Judgement, Op


def stricter(op: Op[Any, Any], limits: Mapping[str, float]) -> Op[Any, Any]:
    """`op`, but no output of a dtype in `limits` (by name) may be further off than it says there."""
    named = {getattr(torch, name): limit for name, limit in limits.items()}
    return cast("Op[Any, Any]", _Stricter(op, named)) if named else op


class _Stricter:
    """Everything is the operation's but the standard, and the words where a declared limit is missed."""

    def __init__(self, op: Op[Any, Any], limits: Mapping[torch.dtype, float]) -> None:
        self._op = op
        self._limits = limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def standard(self, inputs: Any) -> Any:
        return self._op.held_to(self._op.standard(inputs), self._limits)

    def judge(self, answer: object, against: Any) -> Judgement:
        judgement = self._op.judge(answer, against)
        if judgement.ok or judgement.limit not in self._limits.values():
            return judgement
        return replace(judgement, problem=f"{judgement.problem} (the limit is the rule's: rule.tolerance)")
