"""One answer against its standard, with the defences that are on.

With all of them this is the operation's own judgement. What it is without one of them is here, so that operations need
not know: what a harness without this defence would have said.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbench.kernels.defences import Defences
from kbench.ops.base import Judgement, Op, Outputs, form_problem

LOOSE = 2e-2
"""Relative L2 error that passes where limits do not come from the dtype."""


def hold(op: Op[Any, Any], answer: object, own: Any, defences: Defences) -> Judgement:
    if not defences.form:
        answer = _brought_into_form(answer, _forms(op, own.inputs))
    if not defences.finite:
        answer = _without_nan(answer, _expected(own))
    judgement = op.judge(answer, own)
    if judgement.ok:
        return judgement
    if not defences.limits and judgement.rel_l2 <= LOOSE:
        return Judgement(judgement.rel_l2, LOOSE)
    if not defences.values and not _form(answer, _forms(op, own.inputs)):
        return Judgement(0.0, judgement.limit)
    return judgement


def _forms(op: Op[Any, Any], inputs: Any) -> Outputs:
    return op.outputs(inputs) or op.written(inputs)


def _form(answer: object, forms: Outputs) -> str:
    answers = tuple(part for part in _each(answer) if not isinstance(part, str))  # a note beside them is no answer
    if len(answers) != len(forms):
        return f"returned {len(answers)} outputs instead of {len(forms)}"
    return next(filter(None, (form_problem(have, want) for have, want in zip(answers, forms, strict=True))), "")


def _expected(own: Any) -> Outputs:
    if isinstance(own.expected, tuple):
        return own.expected
    return (own.expected,) if own.lse is None else (own.expected, own.lse)


def _brought_into_form(answer: object, forms: Outputs) -> object:
    def shaped(have: object, want: Tensor) -> object:
        if not isinstance(have, Tensor) or have.numel() != want.numel():
            return have
        return torch.add(have, 0).as_subclass(Tensor).reshape(want.shape).to(want.dtype).to(want.device)

    return _again(answer, tuple(shaped(have, want) for have, want in zip(_each(answer), forms, strict=False)))


def _without_nan(answer: object, expected: Outputs) -> object:
    def filled(have: object, want: Tensor) -> object:
        if type(have) is not Tensor or have.shape != want.shape or not have.dtype.is_floating_point:
            return have
        return torch.where(torch.isnan(have), want.to(have.dtype), have)

    return _again(answer, tuple(filled(have, want) for have, want in zip(_each(answer), expected, strict=False)))


def _each(answer: object) -> tuple[object, ...]:
    return tuple(answer) if isinstance(answer, tuple | list) else (answer,)


def _again(answer: object, parts: tuple[object, ...]) -> object:
    return parts if isinstance(answer, tuple | list) else parts[0]
