"""The model of a step's time: what it depends on, the fit, and how far the measurements reach.

A weighted non-negative least-squares fit of physical terms (fixed cost, work per token, per sequence and per token of
context), which alone is used beyond the measurements, times a correction that interpolates linearly between measured
points: over (sequences, mean context) for decodes and (tokens, mean KV length) for chunks. How much of the correction
is taken (all, half or none) is what predicts left-out points best. With all of it, a step of decodes only, or of
chunks only, at a measured point costs what was measured there (points at the same place of it share its median).

Two things the model cannot see: how contexts differ within a batch (their sum counts), and, between measured batch
sizes, the ladder of captured CUDA graphs: measure the captured sizes where that matters. Owns no rows and no files:
`costs` does.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace

from kbench.catalog import Point
from kbench.engine.core import StepPlan

LEAST_POINTS = 4
FOLDS = 5
STRENGTHS = (1.0, 0.5, 0.0)
"""Exponents of the correction that the fit chooses from; the first wins a tie."""
_REWEIGHTINGS = 8
_SMALL_ERROR = 0.02
"""Relative errors below it all count alike: a fit must not be drawn through a few points."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the time of a step depends on. A sequence with one query token counts as a decode."""

    decode_seqs: int = 0
    decode_context_tokens: int = 0
    """Sum of the KV lengths of decodes, after the step."""
    prefill_tokens: int = 0
    """Sum of the query lengths of chunks."""
    prefill_seqs: int = 0
    prefill_work: int = 0
    """Sum of query length × KV length of chunks."""
    prefill_context_tokens: int = 0
    """Sum of the KV lengths of chunks, after the step."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        return cls._sum((query, kv) for _, query, kv, _ in plan.scheduled)

    @classmethod
    def of_point(cls, point: Point) -> StepShape:
        return cls._sum(point.sequences)

    @classmethod
    def _sum(cls, sequences: Iterable[tuple[int, int]]) -> StepShape:
        seqs = context = tokens = chunks = work = chunk_context = 0
        for query, kv in sequences:
            if query == 1:
                seqs += 1
                context += kv
            else:
                tokens += query
                chunks += 1
                work += query * kv
                chunk_context += kv
        return cls(seqs, context, tokens, chunks, work, chunk_context)

    @property
    def kind(self) -> str:
        """`decode`, `prefill`, `mixed` or `empty`."""
        if self.prefill_seqs:
            return "mixed" if self.decode_seqs else "prefill"
        return "decode" if self.decode_seqs else "empty"


AXES: tuple[str, ...] = tuple(field.name for field in fields(StepShape))


@dataclass(frozen=True, slots=True)
class Line:
    """Piecewise linear through (x, value), constant beyond both ends."""

    xs: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, x: float) -> float:
        xs, values = self.xs, self.values
        right = bisect_left(xs, x)
        if right == 0:
            return values[0]
        if right == len(xs):
            return values[-1]
        left = right - 1
        return values[left] + (values[right] - values[left]) * (x - xs[left]) / (xs[right] - xs[left])

    def piece(self, x: float) -> tuple[float, float, float, float, float]:
        """(value, rise, start, width, end) of the piece that holds x: `value + rise * (x - start) / width`, up to end.

        The same operations as in `at`, so the same float to the last bit.
        """
        xs, values = self.xs, self.values
        right = bisect_left(xs, x)
        if right == 0:
            return values[0], 0.0, 0.0, 1.0, xs[0]
        left = right - 1
        if right == len(xs):
            return values[left], 0.0, 0.0, 1.0, math.inf
        return values[left], values[right] - values[left], xs[left], xs[right] - xs[left], xs[right]


_FLAT = Line((0.0,), (1.0,))


class Surface:
    """Lines in y, one a measured x, and linear between neighbouring lines. 1.0 everywhere without measurements."""

    def __init__(self, points: Mapping[tuple[float, float], float]) -> None:
        rows: dict[float, list[tuple[float, float]]] = {}
        for (x, y), value in sorted(points.items()):
            rows.setdefault(x, []).append((y, value))
        self._xs = tuple(rows)
        self._lines = tuple(Line(tuple(y for y, _ in row), tuple(v for _, v in row)) for row in rows.values())

    def at(self, x: float, y: float) -> float:
        low, high, distance, width = self.lines(x)
        if low is high:
            return low.at(y)
        below = low.at(y)
        return below + (high.at(y) - below) * distance / width

    def lines(self, x: float) -> tuple[Line, Line, float, float]:
        """(low, high, distance, width): at x it is `low + (high - low) * distance / width`, for every y."""
        xs, lines = self._xs, self._lines
        if not xs:
            return _FLAT, _FLAT, 0.0, 1.0
        right = bisect_left(xs, x)
        if right == len(xs):
            return lines[-1], lines[-1], 0.0, 1.0
        if right == 0 or xs[right] == x:
            return lines[right], lines[right], 0.0, 1.0
        return lines[right - 1], lines[right], x - xs[right - 1], xs[right] - xs[right - 1]


@dataclass(frozen=True, slots=True)
class StepModel:
    """`fixed` and one coefficient an axis, in ns, with the corrections on top."""

    fixed: float
    weights: tuple[float, ...]
    decode: Surface
    prefill: Surface
    mixed: float
    """Median of measured over modelled time of mixed steps."""

    def step_ns(self, shape: StepShape) -> float:
        per_seq, per_context, per_token, per_chunk, per_work, per_chunk_context = self.weights
        seqs, tokens = shape.decode_seqs, shape.prefill_tokens
        decode = per_seq * seqs + per_context * shape.decode_context_tokens
        if not tokens:
            if not seqs:
                return self.fixed
            return (self.fixed + decode) * self.decode.at(seqs, shape.decode_context_tokens / seqs)
        prefill = (
            per_token * tokens
            + per_chunk * shape.prefill_seqs
            + per_work * shape.prefill_work
            + per_chunk_context * shape.prefill_context_tokens
        )
        chunk_ratio = self.prefill.at(tokens, shape.prefill_work / tokens)
        if not seqs:
            return (self.fixed + prefill) * chunk_ratio
        decode_ratio = self.decode.at(seqs, shape.decode_context_tokens / seqs)
        share = prefill / (prefill + decode) if prefill + decode > 0 else 0.5
        ratio = share * chunk_ratio + (1.0 - share) * decode_ratio
        return (self.fixed + decode + prefill) * ratio * self.mixed


def fit_model(times: Mapping[StepShape, float]) -> StepModel:
    """Fit the terms to (shape → ns), and take as much of the correction as helps to predict points left out.

    On a quiet machine the correction follows real structure and all of it helps; where the same step takes 1 ms and
    then 3, it follows noise. Relative errors count, and outliers count little.
    """
    strength = 1.0
    if len(times) >= 2 * LEAST_POINTS:
        strength = min(STRENGTHS, key=lambda each: _prediction_error(times, each))
    return _fit_with(times, strength)


def folds_of(times: Mapping[StepShape, float], folds: int) -> Iterator[tuple[dict[StepShape, float], list[StepShape]]]:
    """(points kept, shapes left out), leaving out every `folds`-th point in turn; all of them are left out once."""
    shapes = sorted(times, key=astuple)
    for fold in range(folds):
        left_out = shapes[fold::folds]
        gone = set(left_out)
        kept = {shape: time for shape, time in times.items() if shape not in gone}
        if left_out and len(kept) >= LEAST_POINTS:
            yield kept, left_out


def _prediction_error(times: Mapping[StepShape, float], strength: float) -> float:
    """Mean error of the logarithm; rounded, so that models that are equally good are a tie."""
    errors = []
    for kept, left_out in folds_of(times, FOLDS):
        model = _fit_with(kept, strength)
        errors += [abs(math.log(max(model.step_ns(shape), 1.0) / times[shape])) for shape in left_out]
    return round(statistics.fmean(errors), 4)


def _fit_with(times: Mapping[StepShape, float], strength: float) -> StepModel:
    bare = _fit_terms(times)
    decode = _ratios(times, bare, "decode", strength, _decode_place)
    prefill = _ratios(times, bare, "prefill", strength, _prefill_place)
    model = replace(bare, decode=decode, prefill=prefill)
    mixed = [time / model.step_ns(shape) for shape, time in times.items() if shape.kind == "mixed"]
    return replace(model, mixed=statistics.median(mixed) if mixed else 1.0)


def _fit_terms(times: Mapping[StepShape, float]) -> StepModel:
    """Non-negative least squares of relative errors, reweighted so that it comes near least absolute errors."""
    import numpy as np
    from scipy.optimize import nnls

    terms = np.array([(1, *astuple(shape)) for shape in times], dtype=float)
    target = np.array(list(times.values()))
    scale = np.maximum(terms.max(axis=0), 1.0)  # columns differ by nine orders of magnitude
    relative = terms / scale / target[:, None]
    weight = np.ones(len(target))
    solution = np.zeros(len(scale))
    for _ in range(_REWEIGHTINGS):
        solution, _ = nnls(relative * weight[:, None], weight)
        weight = 1.0 / np.sqrt(np.maximum(np.abs(relative @ solution - 1.0), _SMALL_ERROR))
    fixed, *weights = (float(value) for value in solution / scale)
    return StepModel(fixed, tuple(weights), Surface({}), Surface({}), 1.0)


def _decode_place(shape: StepShape) -> tuple[float, float]:
    return shape.decode_seqs, shape.decode_context_tokens / shape.decode_seqs


def _prefill_place(shape: StepShape) -> tuple[float, float]:
    return shape.prefill_tokens, shape.prefill_work / shape.prefill_tokens


def _ratios(
    times: Mapping[StepShape, float],
    bare: StepModel,
    kind: str,
    strength: float,
    place: Callable[[StepShape], tuple[float, float]],
) -> Surface:
    found: dict[tuple[float, float], list[float]] = {}
    for shape, time in times.items():
        if shape.kind == kind:
            modelled = bare.step_ns(shape)
            found.setdefault(place(shape), []).append(time / modelled if modelled > 0 else 1.0)
    return Surface({where: statistics.median(ratios) ** strength for where, ratios in found.items()})


@dataclass(frozen=True, slots=True)
class MeasuredRange:
    """What was measured: the largest value of each axis, and the kinds of steps."""

    largest: tuple[int, ...]
    kinds: frozenset[str]

    @classmethod
    def of(cls, shapes: Iterable[StepShape]) -> MeasuredRange:
        seen = list(shapes)
        largest = tuple(max((getattr(shape, axis) for shape in seen), default=0) for axis in AXES)
        return cls(largest, frozenset(shape.kind for shape in seen))

    def contains(self, shape: StepShape) -> bool:
        seqs, context, tokens, chunks, work, chunk_context = self.largest
        return (
            shape.decode_seqs <= seqs
            and shape.decode_context_tokens <= context
            and shape.prefill_tokens <= tokens
            and shape.prefill_seqs <= chunks
            and shape.prefill_work <= work
            and shape.prefill_context_tokens <= chunk_context
            and shape.kind in self.kinds
        )
