"""What a modelled replay is worth against a real one, and how much two replays' outputs differ. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kbench.errors import MeasurementError
from kbench.measure.load import attainment
from kbench.measure.service import Limits, classify, not_due, tpot_us, ttft_us
from kbench.targets.base import RequestResult

KNEE_ATTAINMENT = 0.8
USABLE_ATTAINMENT = (0.60, 0.95)
CANDIDATE_ATTAINMENT = (0.10, 0.99)
"""Both arms are driven at the *baseline's* knee. A candidate that is much worse or better leaves it, and its attainment
still answers to latency; only near 0 and 1 it no longer does."""


def divergence(outputs_a: Mapping[int, Sequence[int]], outputs_b: Mapping[int, Sequence[int]]) -> dict[int, float]:
    """Request → 1 − length of the common beginning ÷ length of the longer output, for requests that have both.

    0.0 is the same output, 1.0 one that differs from its first token on.
    """
    found = {}
    for request in sorted(outputs_a.keys() & outputs_b.keys()):
        a, b = outputs_a[request], outputs_b[request]
        length = max(len(a), len(b))
        if length:
            same = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            found[request] = 1.0 - same / length
    return found


def near_knee(baseline: Sequence[RequestResult], limits: Limits) -> tuple[Limits, float]:
    """Limits under which a real replay of the baseline attains 60 to 95 %, and by what they were scaled.

    An attainment near 0 or 1 does not answer to errors of latency, so a comparison there would prove nothing. The
    suite's own limits where they will do, else the scale nearest to 80 %. It is chosen from the baseline alone.
    """
    late = not_due(baseline)
    requests = [request for request in baseline if request.request_id not in late]

    def attained(scale: float) -> float:
        return attainment(requests, Limits(limits.ttft_us * scale, limits.tpot_us * scale))

    if not requests or USABLE_ATTAINMENT[0] <= attained(1.0) <= USABLE_ATTAINMENT[1]:
        return limits, 1.0
    scales = [2.0 ** (step / 16) for step in range(-96, 97)]
    scale = min(scales, key=lambda one: (abs(attained(one) - KNEE_ATTAINMENT), abs(math.log(one))))
    return Limits(limits.ttft_us * scale, limits.tpot_us * scale), scale


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a modelled replay of a slice was worth against a real one; `asdict` of it goes into facts."""

    bias: float
    """Attainment, virtual − exec."""
    half_width: float
    """Of the 95 % interval of `bias`, requests clustered by session; infinite with fewer than two sessions."""
    exec_attainment: float
    virtual_attainment: float
    ttft_p50_bias: float
    """Median over median − 1; NaN where one is not defined."""
    tpot_p50_bias: float
    requests: int
    sessions: int
    discordant: int
    """Requests that are good in one replay and not in the other."""
    usable: bool
    """Exec attainment lies in 0.60 to 0.95 (a candidate's in 0.10 to 0.99) and the interval is finite."""


def calibration(
    exec_requests: Sequence[RequestResult],
    virtual_requests: Sequence[RequestResult],
    limits: Limits,
    *,
    candidate: bool = False,
) -> Calibration:
    """Compare two replays of the same slice at the same rate, request by request.

    Requests that the real replay did not come to in its time say nothing, and are left out of both.
    """
    modelled = {request.request_id: request for request in virtual_requests}
    if {request.request_id for request in exec_requests} != modelled.keys():
        raise MeasurementError("the real and the modelled replay are not of the same requests")
    late = not_due(exec_requests)
    exec_requests = [request for request in exec_requests if request.request_id not in late]
    virtual_requests = [modelled[request.request_id] for request in exec_requests]
    if not exec_requests:
        raise MeasurementError("no request was due in the real replay", remedy="raise workload.exec_s")
    difference: dict[int, list[int]] = {}
    for request in exec_requests:
        real = classify(request, limits) == "good"
        model = classify(modelled[request.request_id], limits) == "good"
        difference.setdefault(request.session_id, []).append(int(model) - int(real))
    bias, half_width = _clustered(list(difference.values()))
    attained = attainment(exec_requests, limits)
    least, most = CANDIDATE_ATTAINMENT if candidate else USABLE_ATTAINMENT
    return Calibration(
        bias=bias,
        half_width=half_width,
        exec_attainment=attained,
        virtual_attainment=attainment(virtual_requests, limits),
        ttft_p50_bias=_relative(map(ttft_us, virtual_requests), map(ttft_us, exec_requests)),
        tpot_p50_bias=_relative(map(tpot_us, virtual_requests), map(tpot_us, exec_requests)),
        requests=len(exec_requests),
        sessions=len(difference),
        discordant=sum(abs(value) for values in difference.values() for value in values),
        usable=least <= attained <= most and math.isfinite(half_width),
    )


def _clustered(clusters: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Mean over all values, and the half-width of its 95 % interval with whole clusters as the unit (ratio mean, t).

    Source: Cochran, Sampling Techniques (1977) §9A.1, with C/(C−1) and C − 1 degrees of freedom.
    """
    from kbench.stats.student import t_quantile

    count = sum(len(values) for values in clusters)
    mean = sum(map(sum, clusters)) / count
    number = len(clusters)
    if number < 2:
        return mean, math.inf
    spread = sum((sum(values) - mean * len(values)) ** 2 for values in clusters)
    error = math.sqrt(number / (number - 1) * spread) / count
    return mean, t_quantile(0.975, number - 1) * error


def _relative(modelled: Iterable[float], real: Iterable[float]) -> float:
    pairs = [[value for value in values if not math.isnan(value)] for values in (modelled, real)]
    if not all(pairs):
        return math.nan
    model, truth = (statistics.median(values) for values in pairs)
    return model / truth - 1.0 if truth > 0 and math.isfinite(model) and math.isfinite(truth) else math.nan
