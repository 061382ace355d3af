"""How hard to drive a trace, and what counts as good: capacity, unloaded latency and limits.

All of it from the baseline in virtual time, so that it costs seconds and both arms get the same. Owns no job and
writes no file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from kbench.engine.core import EngineConfig
from kbench.engine.costs import AXES, CostTable, StepShape, read_cost_rows
from kbench.errors import EvidenceError, UsageError
from kbench.measure.service import Limits, classify
from kbench.suite.schema import Arm, Slo
from kbench.targets.base import RequestResult
from kbench.targets.virtual import replay_virtual
from kbench.traces.schema import Trace, trace_from_rows

SERVED_ATTAINMENT = 0.9
_UNLOADED_SAMPLE = 200
_SERVICE_BISECTIONS = 7
_SERVICE_SPAN = 8.0


def load_costs(path: Path | str, arm: Arm, scale: float = 1.0) -> CostTable:
    """The arm's rows of a grid; where the file holds one variant only, that one, whatever it was called there.

    Every step is taken `scale` times as long as measured (see `cost_scale`).
    """
    rows = read_cost_rows(Path(path))
    names = {str(row.get("variant")) for row in rows}
    if arm.name not in names and len(names) > 1:
        raise EvidenceError(
            f"no costs of variant {arm.name}", where=str(path), remedy=f"it has {', '.join(sorted(names))}"
        )
    table = CostTable.fit(row for row in rows if arm.name not in names or row.get("variant") == arm.name)
    return table if scale == 1.0 else table.scaled(scale)


def cost_scale(steps: Mapping[str, Sequence[float]], costs: CostTable) -> float:
    """Real over modelled time of the steps of a real replay, summed; NaN without steps.

    A grid times steps by themselves. In a replay the scheduler, outputs and the rest of the machine come on top, and
    near the knee a fifth decides whether a queue drains. The sum counts and not the median: a queue feels the mean.
    """
    columns = [steps[axis] for axis in AXES]
    modelled_us = sum(costs.step_ns(StepShape(*map(int, shape))) for shape in zip(*columns, strict=True)) / 1_000
    return sum(steps["duration_us"]) / modelled_us if modelled_us else math.nan


def head(trace: Trace, requests: int) -> Trace:
    """The first requests of a trace, under the same ids; parents come before children, so none is left without."""
    if requests >= len(trace):
        return trace
    return trace_from_rows([trace.row(request) for request in range(max(1, requests))], trace.meta)


def recorded_rate(trace: Trace) -> float:
    """Requests per second of the trace as it is: all requests over the span of the roots' arrivals."""
    known = trace.arrival_us.values[trace.arrival_us.known]
    span_us = int(known.max()) - int(known.min())
    if span_us <= 0:
        raise UsageError(
            "all requests arrive at once: the trace has no rate", where=trace.meta.source, remedy="use a longer trace"
        )
    return len(trace) / span_us * 1e6


def backlog_capacity(trace: Trace, config: EngineConfig, costs: CostTable) -> float:
    """Requests per second that the engine finishes with every root queued at time 0 and no think times.

    Between the first and the last tenth of the finishes, so that neither filling nor draining counts.
    """
    result = replay_virtual(trace, config, costs, all_at_once=True)
    ends = sorted(request.finished_us for request in result.requests if request.status == "finished")
    if len(ends) < 2:
        raise UsageError(
            f"{len(ends)} of {len(trace)} requests fit into the engine",
            where=trace.meta.source,
            remedy="raise engine.kv_tokens",
        )
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    if last > first and ends[last] > ends[first]:
        return (last - first) / (ends[last] - ends[first]) * 1e6
    return len(ends) / ends[-1] * 1e6


def unloaded_medians(trace: Trace, config: EngineConfig, costs: CostTable) -> Limits:
    """Median TTFT and TPOT of requests that have a cold engine to themselves, over up to 200 spread over the trace."""
    room = config.pages * config.page_size
    first: list[float] = []
    pace: list[float] = []
    for request in range(0, len(trace), max(1, len(trace) // _UNLOADED_SAMPLE)):
        prompt, output = int(trace.input_tokens[request]), int(trace.output_tokens[request])
        if prompt + output - 1 > room:
            continue
        first.append(_prefill_ns(prompt, config.max_batched_tokens, costs) / 1_000)
        if output > 1:
            decodes = (costs.step_ns(StepShape(1, prompt + done)) for done in range(1, output))
            pace.append(sum(decodes) / (output - 1) / 1_000)
    if not first:
        raise UsageError("no request fits into the engine", where=trace.meta.source, remedy="raise engine.kv_tokens")
    return Limits(statistics.median(first), statistics.median(pace) if pace else math.inf)


def _prefill_ns(prompt: int, budget: int, costs: CostTable) -> int:
    total = 0
    for start in range(0, prompt, budget):
        query = min(budget, prompt - start)
        kv = start + query
        shape = StepShape(1, kv) if query == 1 else StepShape(0, 0, query, 1, query * kv, kv)
        total += costs.step_ns(shape)
    return total


def limits_of(slo: Slo, unloaded: Limits) -> Limits:
    """The limits of a suite: absolute ones, or multiples of the unloaded medians; none where it names none."""
    ttft = slo.ttft_ms * 1_000 if slo.ttft_ms is not None else math.inf
    tpot = slo.tpot_ms * 1_000 if slo.tpot_ms is not None else math.inf
    if slo.ttft is not None:
        ttft = multiple_of(slo.ttft) * unloaded.ttft_us
    if slo.tpot is not None:
        tpot = multiple_of(slo.tpot) * unloaded.tpot_us
    return Limits(ttft, tpot)


def limits_from(facts: Mapping[str, float | None]) -> Limits:
    """The inverse of `plain_limits`."""
    ttft, tpot = facts.get("ttft_us"), facts.get("tpot_us")
    return Limits(math.inf if ttft is None else ttft, math.inf if tpot is None else tpot)


def plain_limits(limits: Limits) -> dict[str, float | None]:
    """Limits as facts: null is no limit."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(limits).items()}


def multiple_of(text: str) -> float:
    """`"0.8x"` → 0.8."""
    return float(text.removesuffix("x"))


def service_capacity(
    trace: Trace, config: EngineConfig, costs: CostTable, limits: Limits, *, backlog: float
) -> float | None:
    """The highest rate, in requests per second, at which 90 % of the trace are good (DistServe's goodput).

    Bisected on a logarithmic axis within 8× of the backlog's throughput. None where the trace cannot be driven above
    it: sessions that wait for their own answers limit themselves, and no rate of arrival overloads the engine.
    """
    recorded = recorded_rate(trace)

    def serves(rate: float) -> bool:
        requests = replay_virtual(trace, config, costs, rate_scale=rate / recorded).requests
        return attainment(requests, limits) >= SERVED_ATTAINMENT

    low, high = math.log(backlog / _SERVICE_SPAN), math.log(backlog * _SERVICE_SPAN)
    if serves(math.exp(high)):
        return None
    for _ in range(_SERVICE_BISECTIONS):
        middle = (low + high) / 2
        if serves(math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp(low)


def attainment(requests: Sequence[RequestResult], limits: Limits) -> float:
    """Share of scheduled requests that are good."""
    return sum(classify(request, limits) == "good" for request in requests) / len(requests)
