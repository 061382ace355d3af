"""When an attention output is right, and whether that question can tell right from wrong.

Owns the error rule and the null models. Error: relative L2 against the float64 oracle per output row (one query token
of one sequence, one head); the worst row decides. Limit: 3× the error that the same mathematics makes in the case's own
dtype on the same input, but not below the dtype's floor. Null models are wrong answers that must exceed the limit in
every sequence; where one would pass, the case cannot tell and says so. It does not know who computed the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from kbench.ops.attention import AttentionSpec, oracle, oracle_lse, same_dtype_lse
from kbench.ops.base import (
    FLOORS,
    REFERENCE_FACTOR,
    Judgement,
    NullReport,
    form_problem,
    largest,
    row_errors,
)
from kbench.ops.inputs import Inputs

NULL_MODELS = (
    "zeros",
    "dropped last page",
    "mask one short",
    "mask one ahead",
    "heads swapped",
    "stale output",
    "window one long",
    "window one short",
    "softcap left out",
    "sinks left out",
)
LSE_FLOORS: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
)
"""Error of a log-sum-exp that is forgiven, relative to the larger of it and 1."""
LSE_MODELS = ("lse in base 2",)
LN_2 = 0.6931471805599453
SAME_ANSWER = 1e-9
"""Below this float64 error a null model gives the right answer: on such an input it is no wrong model."""


@dataclass(frozen=True, slots=True)
class Standard:
    """The right answer for one input and how far from it an output may be."""

    inputs: Inputs
    expected: Tensor
    limit: float
    lse: Tensor | None = None
    """The right log-sum-exp, where the layer wants one."""
    lse_limit: float = 0.0


def standard(inputs: Inputs) -> Standard:
    """The oracle's answer and the limit for this input."""
    expected, lse = oracle_lse(inputs.q, inputs.kv, inputs.batch, inputs.spec)
    plain, plain_lse = same_dtype_lse(inputs.q, inputs.kv, inputs.batch, inputs.spec, torch.empty_like(inputs.q))
    limit = max(REFERENCE_FACTOR * largest(row_errors(plain, expected)), FLOORS[inputs.q.dtype])
    if not inputs.spec.lse:
        return Standard(inputs, expected, limit)
    lse_limit = max(REFERENCE_FACTOR * largest(lse_errors(plain_lse, lse)), LSE_FLOORS[inputs.q.dtype])
    return Standard(inputs, expected, limit, lse, lse_limit)


def judge(actual: object, against: Standard) -> Judgement:
    """Shape, type and device first, then the error of the worst row, with the place where it is."""
    if against.lse is None:
        return _judge_output(actual, against)
    if not isinstance(actual, tuple | list) or len(actual) != 2:
        return Judgement(float("inf"), against.limit, "returned no pair of output and log-sum-exp")
    judgement = _judge_output(actual[0], against)
    return judgement if not judgement.ok else _judge_lse(actual[1], against, judgement)


def _judge_output(actual: object, against: Standard) -> Judgement:
    problem = form_problem(actual, against.inputs.q)
    if problem or not isinstance(actual, Tensor):
        return Judgement(float("inf"), against.limit, problem)
    errors = row_errors(actual, against.expected)
    worst = largest(errors)
    if worst <= against.limit:
        return Judgement(worst, against.limit)
    place = _place(errors, against)
    token, head = divmod(int(errors.argmax()), errors.shape[1])
    if bool(torch.isnan(actual[token, head]).any()):
        return Judgement(worst, against.limit, f"NaN in {place}: an unused slot, page or output was read")
    rows = int((errors > against.limit).sum())
    text = f"relative L2 error {worst:.2e} in {place}, limit {against.limit:.2e}; {rows} of {errors.numel()} rows fail"
    return Judgement(worst, against.limit, text)


def _judge_lse(actual: object, against: Standard, output: Judgement) -> Judgement:
    """The output's judgement, unless the log-sum-exp is wrong."""
    assert against.lse is not None
    problem = form_problem(actual, against.lse.float())
    if problem or not isinstance(actual, Tensor):
        return Judgement(float("inf"), against.lse_limit, f"log-sum-exp: {problem}")
    errors = lse_errors(actual, against.lse)
    worst = largest(errors)
    if worst <= against.lse_limit:
        return output
    token, head = divmod(int(errors.argmax()), errors.shape[1])
    text = (
        f"log-sum-exp {float(actual[token, head]):.6g} instead of {float(against.lse[token, head]):.6g} (natural "
        f"logarithm) in {_place(errors, against)}, limit {against.lse_limit:.2e}"
    )
    return Judgement(worst, against.lse_limit, text)


def lse_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Error of every log-sum-exp relative to the larger of it and 1; -inf must be met exactly."""
    wide = actual.to(torch.float64)
    error = (wide - expected).abs() / expected.abs().clamp_min(1.0)
    error = torch.where(wide == expected, 0.0, error)
    return torch.where(torch.isfinite(error), error, float("inf"))


def _place(errors: Tensor, against: Standard) -> str:
    """Where the worst of `[tokens, heads]` is."""
    token, head = divmod(int(errors.argmax()), errors.shape[1])
    batch = against.inputs.batch
    sequence = int(torch.searchsorted(batch.query_start, token, right=True)) - 1
    return f"sequence {sequence} (KV length {batch.kv_lens[sequence]}), head {head}"


# ---------------------------------------------------------------------------------------- null models


def null_report(standards: tuple[Standard, ...]) -> NullReport:
    """Hold every null model against all inputs of a case; one input that rejects it in a sequence is enough there.

    A sequence on which the model is right on every input (two heads that see one key give one answer) is left out; a
    model that is right everywhere is not counted.
    """
    killed: list[str] = []
    survived: list[str] = []
    for name in (*NULL_MODELS, *LSE_MODELS):
        if not all(_is_a_question(name, own) for own in standards):
            continue
        verdicts = [_null_rows(name, own, standards[index - 1]) for index, own in enumerate(standards)]
        wrong = torch.stack([is_wrong for is_wrong, _ in verdicts]).any(dim=0)
        caught = torch.stack([is_caught for _, is_caught in verdicts]).any(dim=0)
        if not bool(wrong.any()):
            continue
        (killed if bool(caught[wrong].all()) else survived).append(name)
    return NullReport(tuple(killed), tuple(survived))


def _is_a_question(name: str, own: Standard) -> bool:
    """Whether a null model means anything on an input: there is no key ahead of the last query, no window to miss."""
    spec = own.inputs.spec
    return {
        "mask one ahead": not own.inputs.batch.is_decode,
        "window one long": spec.window > 0,
        "window one short": spec.window > 1,
        "softcap left out": spec.softcap > 0,
        "sinks left out": spec.sinks is not None,
        "lse in base 2": own.lse is not None,
    }.get(name, True)


def _null_rows(name: str, own: Standard, other: Standard) -> tuple[Tensor, Tensor]:
    """Per sequence: whether the null model is wrong on this input, and whether its error exceeds the limit."""
    if name in LSE_MODELS and own.lse is not None:
        errors, limit = lse_errors(own.lse / LN_2, own.lse).amax(dim=1), own.lse_limit
    else:
        errors, limit = row_errors(null_output(name, own, other), own.expected).amax(dim=1), own.limit
    worst = torch.stack([rows.max() for rows in torch.split(errors, list(own.inputs.batch.query_lens))])
    return worst > SAME_ANSWER, worst > limit


def null_output(name: str, own: Standard, other: Standard) -> Tensor:
    """What the wrong model answers, in float64: its error is its idea, not its rounding."""
    source = own.inputs
    if name == "zeros":
        return torch.zeros_like(own.expected)
    if name == "heads swapped":
        swapped = own.expected.clone()
        swapped[:, 0], swapped[:, -1] = own.expected[:, -1], own.expected[:, 0]
        return swapped
    if name == "stale output":
        return other.expected
    shift = {"mask one short": -1, "mask one ahead": 1}.get(name, 0)
    return oracle(
        source.q,
        source.kv,
        source.batch,
        _wrong_layer(name, source.spec),
        shift=shift,
        drop_last_page=name == "dropped last page",
    )


def _wrong_layer(name: str, spec: AttentionSpec) -> AttentionSpec:
    if name in ("window one long", "window one short"):
        return replace(spec, window=spec.window + (1 if name == "window one long" else -1))
    if name == "softcap left out":
        return replace(spec, softcap=0.0)
    return replace(spec, sinks=None) if name == "sinks left out" else spec
