"""Whether an implementation is right on a point, before anyone times it.

Owns the correctness phase: random and needle inputs of the point itself, small edge cases, two kinds of output poison,
inputs that must not change, null models that must fail. It also reads what the first calls cost (`convert`, `plan`,
`first_call`), because only here they are first. Exceptions of the implementation pass through: the trial boundary in
`measure.kernel` turns them into a status.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch import Tensor

from kbench.catalog import Point
from kbench.kernels.base import Attention
from kbench.ops.attention import AttentionSpec
from kbench.ops.correctness import Judgement, Standard, checksum, judge, null_report, standard
from kbench.ops.inputs import Inputs, InputSettings, Kind, build, edge_cases
from kbench.protocol import Status

POISONS = (float("nan"), 7.25)
"""What an output holds before the call: a value that no kernel may keep, and one that looks like an answer."""
SCOPE_REPEATS = 3
INPUTS_CHANGED = "inputs were changed: q, kv and tables are read-only"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Verification:
    status: Status
    message: str
    facts: dict[str, Any]
    """`rel_l2`, `limit` of the input with the worst ratio, `null_models_killed`, `null_models`, `edge_cases`."""
    scopes_us: dict[str, float] = field(default_factory=dict)
    """Host time with the device synchronised: `convert` and `plan` (medians after the first), `first_call`."""


def verify(
    implementation: Attention,
    op: str,
    point: Point,
    spec: AttentionSpec,
    settings: InputSettings,
    *,
    thorough: bool = True,
) -> Verification:
    """Hold `implementation` to the oracle on the point and, if `thorough`, on the edge cases of `op`.

    Without, it is the sharper of the two inputs of the point, the needle, and no null models: those judge the inputs,
    which are the same in every session.
    """
    kinds: tuple[Kind, ...] = ("random", "needle") if thorough else ("needle",)
    standards = tuple(standard(build(point, spec, settings, kind)) for kind in kinds)
    nulls = null_report(standards) if thorough else None
    before = checksum(standards[0].inputs.tensors())
    scopes = _first_calls(implementation, standards[0].inputs)
    if checksum(standards[0].inputs.tensors()) != before:
        return Verification(Status.INCORRECT, INPUTS_CHANGED, {}, scopes)
    judged: list[tuple[str, Judgement]] = [
        (kind, _check(implementation, own)) for kind, own in zip(kinds, standards, strict=True)
    ]
    worst = max((judgement for _, judgement in judged), key=lambda judgement: judgement.rel_l2 / judgement.limit)
    del standards
    passed, edges = 0, edge_cases(op, settings.page_size) if thorough else ()
    if all(judgement.ok for _, judgement in judged):
        for edge in edges:
            inputs = build(edge.point, spec, settings, edge.kind, aliased=edge.aliased)
            judgement = _check(implementation, standard(inputs))
            judged.append((f"edge case {edge.name!r} ({edge.point})", judgement))
            passed += judgement.ok
    facts = {
        "rel_l2": worst.rel_l2,
        "limit": worst.limit,
    }
    if nulls is not None:
        facts |= {"null_models_killed": len(nulls.killed), "null_models": nulls.total}
        facts |= {"edge_cases_passed": passed, "edge_cases": len(edges)}
    problems = [f"{kind}: {judgement.problem}" for kind, judgement in judged if not judgement.ok]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Verification(Status.INCORRECT, problems[0] + more, facts, scopes)
    if nulls is not None and nulls.survived:
        text = f"the error limit {worst.limit:.2e} would accept a wrong answer: {', '.join(nulls.survived)}"
        return Verification(Status.NON_DISCRIMINATING, text, facts, scopes)
    return Verification(Status.OK, "", facts, scopes)


def _check(implementation: Attention, own: Standard) -> Judgement:
    """The worst judgement over the poisons; changed inputs fail whatever the output is."""
    inputs = own.inputs
    before = checksum(inputs.tensors())
    kv = implementation.convert(inputs.kv)
    plan = implementation.plan(inputs.batch, inputs.spec, kv)
    judgements = []
    for poison in POISONS:
        out = torch.full_like(inputs.q, poison)
        judgements.append(judge(implementation.run(inputs.q, kv, plan, out), own))
    if checksum(inputs.tensors()) != before:
        return Judgement(float("inf"), own.limit, INPUTS_CHANGED)
    return max(judgements, key=lambda judgement: judgement.rel_l2)


def _first_calls(implementation: Attention, inputs: Inputs) -> dict[str, float]:
    out = torch.full_like(inputs.q, POISONS[0])
    kv, _ = timed(lambda: implementation.convert(inputs.kv), out)
    plan, _ = timed(lambda: implementation.plan(inputs.batch, inputs.spec, kv), out)
    _, first_call = timed(lambda: implementation.run(inputs.q, kv, plan, out), out)
    again = [
        (
            timed(lambda: implementation.convert(inputs.kv), out)[1],
            timed(lambda: implementation.plan(inputs.batch, inputs.spec, kv), out)[1],
        )
        for _ in range(SCOPE_REPEATS)
    ]
    return {
        "convert": median(convert for convert, _ in again),
        "plan": median(plan_us for _, plan_us in again),
        "first_call": first_call,
    }


def timed(action: Callable[[], T], on: Tensor) -> tuple[T, float]:
    """The action's result and its host time in µs, the device of `on` synchronised at both ends."""
    _synchronize(on)
    start = perf_counter_ns()
    result = action()
    _synchronize(on)
    return result, (perf_counter_ns() - start) / 1_000


def _synchronize(on: Tensor) -> None:
    if on.device.type == "cuda":
        torch.cuda.synchronize(on.device)
