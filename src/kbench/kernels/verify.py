"""Whether an implementation is right on a case, before anyone times it.

Owns the correctness phase: every kind of input of the case itself, small edge cases, two kinds of output poison between
guard bytes, inputs that must not change, answers that are complete when the call returns and live in memory of their
own, null models that must fail. It also reads what the first
calls cost (`convert`, `plan`, `first_call`), because only here they are first. Exceptions of the implementation pass
through: the trial boundary in `measure.kernel` turns them into a status.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any, TypeVar

import torch

from kbench.catalog import Resolved
from kbench.kernels.defences import ALL, Defences
from kbench.kernels.guarding import Rest, between_guards, copies, written_over
from kbench.kernels.holding import hold
from kbench.ops.base import InputSettings, Judgement, Op, Outputs, aliases, checksum
from kbench.protocol import Status

POISONS = (float("nan"), 7.25)
"""What an output holds before the call: a value that no kernel may keep, and one that looks like an answer."""
SCOPE_REPEATS = 3
INPUTS_CHANGED = "inputs were changed: they are read-only"
ALIASED = "the answer lives in the memory of an input"
LATE = "the answer was still being written when the call had returned"
WRITTEN_OVER = "memory beside an output was written"
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
    implementation: Any,
    op: Op[Any, Any],
    shape: Resolved,
    settings: InputSettings,
    *,
    thorough: bool = True,
    defences: Defences = ALL,
) -> Verification:
    """Hold `implementation` to the oracle on the case and, if `thorough`, on the edge cases of `op`.

    Without, it is the sharpest kind of input of the case, and no null models: those judge the inputs, which are the
    same in every session.
    """
    kinds = op.kinds if thorough else op.kinds[-1:]
    standards = tuple(op.standard(_made(op, shape, settings, kind, defences)) for kind in kinds)
    nulls = op.nulls(standards) if thorough and defences.null_models else None
    first = _made(op, shape, settings, kinds[0], defences)
    before = checksum(op.read_only(first))
    scopes = _first_calls(implementation, op, first, settings.device, defences)
    if defences.unchanged_inputs and checksum(op.read_only(first)) != before:
        return Verification(Status.INCORRECT, INPUTS_CHANGED, {}, scopes)
    del first
    rest = Rest(settings.device)
    asked = tuple(zip(kinds, standards, strict=True))[: None if defences.sharp_inputs else 1]
    judged: list[tuple[str, Judgement]] = [
        (kind, check(implementation, op, own, rest, defences)) for kind, own in asked
    ]
    worst = max((judgement for _, judgement in judged), key=lambda own: own.rel_l2 / own.limit if own.limit else 0.0)
    del standards, asked
    passed, edges = 0, op.edges(shape, settings) if thorough and defences.edges else ()
    skipped = {edge.name: edge.skipped for edge in edges if edge.skipped}
    edges = tuple(edge for edge in edges if not edge.skipped)
    if all(judgement.ok for _, judgement in judged):
        for edge in edges:
            inputs = _made(op, edge.shape, settings, edge.kind, defences, **edge.options)
            judgement = check(implementation, op, op.standard(inputs), rest, defences)
            judged.append((str(edge), judgement))
            passed += judgement.ok
    facts: dict[str, Any] = {"rel_l2": worst.rel_l2, "limit": worst.limit}
    if nulls is not None:
        facts |= {"null_models_killed": len(nulls.killed), "null_models": nulls.total}
        facts |= {"edge_cases_passed": passed, "edge_cases": len(edges)}
        facts |= {"edge_cases_skipped": skipped} if skipped else {}
    problems = [f"{kind}: {judgement.problem}" for kind, judgement in judged if not judgement.ok]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return Verification(Status.INCORRECT, problems[0] + more, facts, scopes)
    if nulls is not None and nulls.survived:
        text = f"the error limit {worst.limit:.2e} would accept a wrong answer: {', '.join(nulls.survived)}"
        return Verification(Status.NON_DISCRIMINATING, text, facts, scopes)
    return Verification(Status.OK, "", facts, scopes)


def check(
    implementation: Any, op: Op[Any, Any], own: Any, rest: Rest | None = None, defences: Defences = ALL
) -> Judgement:
    """The worst judgement over the poisons; changed inputs, memory that is not the call's and work that goes on after
    the call fail whatever the answer is."""
    inputs = own.inputs
    read_only = op.read_only(inputs)
    rest = rest or Rest(read_only[0].device)
    before = checksum(read_only)
    steps = op.bind(implementation, inputs)
    state = steps.convert()
    plan = steps.plan(state)
    judgements = []
    for value in POISONS if defences.varied_poison else POISONS[:1]:
        op.restore(inputs)
        out = between_guards(op.outputs(inputs))
        poison(out, value if defences.poison else 0.0)
        answer = steps.run(state, plan, out)
        late = copies(answer if defences.at_rest else ())
        rest()
        judgements.append(hold(op, answer, own, defences))
        problem = LATE if late.changed() else ""
        if not problem and defences.guards and written_over(out):
            problem = WRITTEN_OVER
        if not problem and defences.own_memory and aliases(answer, read_only):
            problem = ALIASED
        if problem:
            return Judgement(float("inf"), judgements[0].limit, problem)
    if defences.unchanged_inputs and checksum(read_only) != before:
        return Judgement(float("inf"), judgements[0].limit, INPUTS_CHANGED)
    return max(judgements, key=lambda judgement: judgement.rel_l2)


def _made(
    op: Op[Any, Any], shape: Resolved, settings: InputSettings, kind: str, defences: Defences, **options: Any
) -> Any:
    """One set of inputs; without a defence what must not be read holds zeros."""
    inputs = op.build(shape, settings, kind, **options)[0]
    if not defences.unused_nan:
        without_nan(op, inputs)
    return inputs


def without_nan(op: Op[Any, Any], inputs: Any) -> None:
    for tensor in op.read_only(inputs):
        if tensor.dtype.is_floating_point:
            tensor.masked_fill_(torch.isnan(tensor), 0.0)


def poison(out: Outputs, value: float) -> None:
    """Fill outputs with `value`, integers with numbers that are no index; 0 fills them with zeros."""
    for tensor in out:
        if tensor.dtype.is_floating_point or not value:
            tensor.fill_(value)
        elif tensor.dtype != torch.bool:
            tensor.fill_(-7 if value == value else -1)


def _first_calls(
    implementation: Any, op: Op[Any, Any], inputs: Any, device: torch.device, defences: Defences
) -> dict[str, float]:
    steps = op.bind(implementation, inputs)
    out = between_guards(op.outputs(inputs))
    poison(out, POISONS[0] if defences.poison else 0.0)
    state, _ = timed(steps.convert, device)
    plan, _ = timed(lambda: steps.plan(state), device)
    _, first_call = timed(lambda: steps.run(state, plan, out), device)
    again = [
        (timed(steps.convert, device)[1], timed(lambda: steps.plan(state), device)[1]) for _ in range(SCOPE_REPEATS)
    ]
    return {
        "convert": median(convert for convert, _ in again),
        "plan": median(plan_us for _, plan_us in again),
        "first_call": first_call,
    }


def timed(action: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The action's result and its host time in µs, the device synchronised at both ends."""
    _synchronize(device)
    start = perf_counter_ns()
    result = action()
    _synchronize(device)
    return result, (perf_counter_ns() - start) / 1_000


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
