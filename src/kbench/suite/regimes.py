"""Whether the regimes of a suite can be told apart, and whether their evidence can exist.

Owns what is checked between a regime, its range and its points before anything is measured. It reads the suite only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from kbench.catalog import Point, op_applies, parse_shape
from kbench.suite.rule_schema import Clause, Regime, When
from kbench.suite.schema import Suite, Variant

KeyPath = tuple[str | int, ...]
Found = tuple[KeyPath, str, str]

LEAST_SEGMENTS = 20
"""Paired segments that a workload clause needs to be judged at all."""
SHARED = ("page_size", "layout")
"""Settings of a variant that all sequences of a deployment share, whichever kernel serves them."""


def regime_problems(suite: Suite, regime: Regime, index: int) -> Iterator[Found]:
    """What makes the range of a regime mean nothing, or what cannot be done."""
    path: KeyPath = ("regime", index)
    if regime.when is None:
        return
    if regime.trace_class:
        yield (
            (*path, "trace_class"),
            "a regime is ranges (when) or trace classes, not both",
            "split it: a range is switched per step, a trace class per deployment",
        )
    if regime.when.context is None and regime.when.batch is None:
        yield (*path, "when"), "when names no range", "add context or batch, e.g. context = [1024, 8192]"
    shared = _shared_settings(suite)
    if shared and not suite.claim.changes_shared_state:
        yield (
            (*path, "when"),
            f"the variants differ in {', '.join(shared)}, which cannot be switched per step",
            "set claim.changes_shared_state and use trace_class",
        )


def regime_warnings(suite: Suite) -> Iterator[Found]:
    """Regimes that overlap, evidence that will be missing, and ranges wider than what is measured."""
    yield from _overlaps(suite)
    for index, regime in enumerate(suite.regime):
        for text in regime.points:
            point = parse_shape(text).point
            if regime.when is not None and point is not None and not _inside(regime.when, point):
                yield ("regime", index, "points"), f"{text} lies outside of when", "it gates the regime nonetheless"
        yield from _edges(regime, index)
        yield from _unmeasured(suite, regime, index)
        for place, clause in enumerate(regime.require):
            yield from _clause_evidence(suite, regime, clause, ("regime", index, "require", place))


def _unmeasured(suite: Suite, regime: Regime, index: int) -> Iterator[Found]:
    """Points that a timing clause needs and its level does not measure."""
    for level in dict.fromkeys(clause.level for clause in regime.require):
        settings = suite.kernel if level == "kernel" else suite.step
        if level == "workload" or settings is None:
            continue
        measured = {parse_shape(text) for text in settings.points}
        for text in regime.points:
            shape = parse_shape(text)
            if shape not in measured and (level == "kernel" or shape.is_batch):
                yield (
                    ("regime", index, "points"),
                    f"{text} is not measured at level {level}",
                    f"add it to [{level}] points; as it is, the verdict is missing-evidence",
                )


def _clause_evidence(suite: Suite, regime: Regime, clause: Clause, path: KeyPath) -> Iterator[Found]:
    if clause.level == "workload" and clause.metric != "output_divergence":
        if suite.workload and suite.workload.segments < LEAST_SEGMENTS:
            yield (
                path,
                f"{clause.metric} needs {LEAST_SEGMENTS} segments, the suite has {suite.workload.segments}",
                "raise workload.segments; as it is, the verdict is missing-evidence",
            )
    elif clause.level == "kernel" and suite.kernel and regime.points:
        shapes = [parse_shape(text) for text in regime.points]
        if not any(op_applies(op, shape) for op in suite.kernel.ops for shape in shapes):
            ops = ", ".join(suite.kernel.ops)
            yield path, f"{ops} serves no point of this regime", "add an operation that does to kernel.ops"


def _edges(regime: Regime, index: int) -> Iterator[Found]:
    """A range speaks about all that lies in it; a point in its middle says nothing about its edges."""
    points = [shape.point for shape in map(parse_shape, regime.points) if shape.point is not None]
    if regime.when is None or not points:
        return
    for name, bounds, value in _ranges(regime.when):
        found = sorted({value(point) for point in points})
        for edge in dict.fromkeys(bounds):
            if edge not in found:
                yield (
                    ("regime", index, "points"),
                    f"no point at {name} {edge:,}, an edge of {regime.id!r}",
                    f"add one; as it is, the verdict speaks of {name} {found[0]:,} to {found[-1]:,}",
                )


def _overlaps(suite: Suite) -> Iterator[Found]:
    """Two regimes that speak about the same step or trace: the selector asks both."""
    for (_, first), (index, second) in combinations(enumerate(suite.regime), 2):
        both = [name for name in second.trace_class if name in first.trace_class]
        if both:
            yield (
                ("regime", index, "trace_class"),
                f"{', '.join(both)} belongs to {first.id!r} too",
                "one regime for each; as it is, the candidate serves it only where both enable",
            )
        elif first.when is not None and second.when is not None and _meet(first.when, second.when):
            yield (
                ("regime", index, "when"),
                f"it overlaps the range of {first.id!r}",
                "ranges that do not meet; as it is, the candidate serves what is in both only where both enable",
            )


def _meet(first: When, second: When) -> bool:
    """Whether some step lies in both; a range that is not given holds every step."""
    pairs = ((first.context, second.context), (first.batch, second.batch))
    return all(a is None or b is None or (a[0] <= b[1] and b[0] <= a[1]) for a, b in pairs)


def _inside(when: When, point: Point) -> bool:
    return all(bounds[0] <= value(point) <= bounds[1] for _, bounds, value in _ranges(when))


def _ranges(when: When) -> Iterator[tuple[str, tuple[int, int], Callable[[Point], int]]]:
    """Name, bounds and the point's value of every range that is given."""
    if when.context is not None:
        yield "context", when.context, lambda point: point.context
    if when.batch is not None:
        yield "batch", when.batch, lambda point: point.batch


def _shared_settings(suite: Suite) -> list[str]:
    """Shared settings in which baseline and candidate differ, following what they extend."""
    names = (suite.claim.baseline, suite.claim.candidate)
    return [key for key in SHARED if len({_resolved(suite, name, key) for name in names}) > 1]


def _resolved(suite: Suite, name: str | None, key: str) -> object:
    seen: set[str] = set()
    while name is not None and name in suite.variants and name not in seen:
        seen.add(name)
        variant: Variant = suite.variants[name]
        value = getattr(variant, key)
        if value is not None:
            return value
        name = variant.extends
    return "NHD" if key == "layout" else None
