"""What machines and queues do to measurements: the noise that simulated gates are judged under.

Owns the three noise profiles of step times and the queue behind goodput. It knows nothing of suites, rules or
statistics: it makes numbers whose true difference is known, so that a verdict can be right or wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

WINDOWS = 4
"""Windows of a block: ABBA or BAAB."""
REQUESTS = 250
"""Requests of one workload segment."""
WARMUP = 500
"""Requests before the first segment, which fill the queue and are not judged."""
LOAD = 0.8
"""Share of its time that the baseline's server is busy."""
BURSTINESS = 2.5
"""Squared coefficient of variation of the time between arrivals."""
SLOWEST_GOOD = 7.0
"""A request is good when it leaves within so many mean service times: about 64 % of the baseline's do.

Near the knee, where kbench calibrates its model (60 to 95 %): there the paired differences of a segment have a
deviation of 3.5 % and a skewness of -2.1 on the quiet profile (in the study 1.2 to 3.5 %, and -1.8).
"""
ROWS_AT_ONCE = 10
"""Traces whose requests stay in the processor's cache."""
CALIBRATION_SEGMENTS = 40_000
"""Segments that a true change is averaged over: differences scatter by 3 to 10 % a segment."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Noise of log times. Every session has a drift, steps at random places, and processes with offsets of their own.

    The same names with the same numbers are in the study that the rule was chosen by.
    """

    name: str
    window_sd: float
    """Independent noise of a window; of a segment's service times too."""
    wander_sd: float
    """Stationary deviation of a first-order autoregressive wander that both arms share."""
    wander_rho: float
    drift: float
    outliers: float
    """Share of the windows that an interruption hits."""
    outlier_mean: float
    steps: int
    """Changes of the clock in a session."""
    largest_step: float


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quiet", 0.005, 0.003, 0.95, 0.0, 0.005, 0.20, 0, 0.0),
        Profile("shared", 0.015, 0.020, 0.97, 0.03, 0.03, 0.20, 1, 0.04),
        Profile("hostile", 0.030, 0.040, 0.99, 0.08, 0.08, 0.40, 3, 0.08),
    )
}


def step_log_times(
    rng: np.random.Generator, profile: Profile, rows: int, blocks: int, saving: float, offset_sd: float
) -> tuple[Floats, Bools]:
    """Log times of `rows` sessions, [rows, blocks, 4], and which windows are the candidate's.

    The candidate truly takes 1 - `saving` of the baseline's time. Each of the two processes of a session has an offset
    of its own, which no number of windows averages away.
    """
    shape = (rows, blocks, WINDOWS)
    windows = blocks * WINDOWS
    flipped = rng.random((rows, blocks, 1)) < 0.5
    candidate = np.array([False, True, True, False]) ^ flipped
    noise = rng.normal(0.0, profile.window_sd, (rows, windows)) + _wander(rng, profile, rows, windows)
    noise += profile.drift * np.linspace(0.0, 1.0, windows) * rng.choice([-1.0, 1.0], (rows, 1))
    for _ in range(profile.steps):
        begins = rng.integers(0, windows, (rows, 1))
        noise += rng.uniform(-profile.largest_step, profile.largest_step, (rows, 1)) * (np.arange(windows) >= begins)
    hit = rng.random((rows, windows)) < profile.outliers
    noise += np.log1p(np.where(hit, rng.exponential(profile.outlier_mean, (rows, windows)), 0.0))
    offsets = rng.normal(0.0, offset_sd, (2, rows, 1, 1))
    times = noise.reshape(shape) + np.where(candidate, offsets[0] + math.log1p(-saving), offsets[1])
    return times, candidate


def goodput(
    rng: np.random.Generator, profile: Profile, rows: int, segments: int, scale: float, replays: int = 1
) -> tuple[Floats, Floats]:
    """Share of good requests of `rows` traces replayed by both arms, each [replays, rows, segments].

    One server with bursty arrivals (Lindley's recursion): the same requests for both arms and all replays, service
    times of the candidate `scale` times as long. A segment begins with the queue that the one before has left. The
    machine's speed wanders for both arms together, and differs a little from segment to segment and replay to replay.
    """
    count = WARMUP + segments * REQUESTS
    gaps = _bursty(rng, (rows, count))
    work = rng.gamma(2.0, 0.5 * LOAD, (rows, count))
    wander = _wander(rng, profile, rows, segments)
    wander += profile.drift * np.linspace(-0.5, 0.5, segments) * rng.choice([-1.0, 1.0], (rows, 1))
    arms = []
    for arm_scale in (scale, 1.0):
        speed = wander + rng.normal(0.0, profile.window_sd, (replays, rows, segments))
        factor = np.concatenate([np.ones((replays, rows, WARMUP)), np.repeat(np.exp(speed), REQUESTS, axis=2)], axis=2)
        service = work * factor * arm_scale
        good = _waits(gaps, service) + service <= SLOWEST_GOOD * LOAD
        arms.append(good[:, :, WARMUP:].reshape(replays, rows, segments, REQUESTS).mean(axis=3))
    return arms[0], arms[1]


def scale_for(profile: Profile, change: float, segments: int, seed: int = 7) -> float:
    """The candidate's service scale at which its goodput truly changes by `change`, to about 0.05 % of goodput.

    Secants over the same random numbers: the true change falls smoothly as service gets slower.
    """

    def error(scale: float) -> float:
        new, old = 0.0, 0.0
        for part in range(CALIBRATION_SEGMENTS // (ROWS_AT_ONCE * segments)):
            arms = goodput(np.random.default_rng([seed, part]), profile, ROWS_AT_ONCE, segments, scale)
            new, old = new + float(arms[0].mean()), old + float(arms[1].mean())
        return new / old - 1.0 - change

    before, scale = 1.0, 1.0 - 0.4 * change
    at_before = error(before)
    for _ in range(6):
        found = error(scale)
        if abs(found) < 1e-4:
            break
        before, at_before, scale = scale, found, scale - found * (scale - before) / (found - at_before)
    return scale


def _wander(rng: np.random.Generator, profile: Profile, rows: int, length: int) -> Floats:
    """A stationary first-order autoregressive series in every row."""
    series = np.empty((rows, length))
    fresh = rng.normal(0.0, profile.wander_sd, (rows, length))
    series[:, 0] = fresh[:, 0]
    kept = math.sqrt(1.0 - profile.wander_rho**2)
    for place in range(1, length):
        series[:, place] = profile.wander_rho * series[:, place - 1] + kept * fresh[:, place]
    return series


def _bursty(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    """Hyperexponential times with mean 1 (two exponentials with balanced means)."""
    often = 0.5 * (1.0 + math.sqrt((BURSTINESS - 1.0) / (BURSTINESS + 1.0)))
    is_often = rng.random(shape) < often
    gaps: Floats = rng.exponential(1.0, shape) * np.where(is_often, 0.5 / often, 0.5 / (1.0 - often))
    return gaps


def _waits(gaps: Floats, service: Floats) -> Floats:
    """Lindley: w_i = max(0, w_(i-1) + service_(i-1) - gap_i), as a running sum above its running minimum."""
    steps = np.empty_like(service)
    steps[..., 0] = 0.0
    steps[..., 1:] = service[..., :-1] - gaps[..., 1:]
    total = np.cumsum(steps, axis=-1)
    waits: Floats = total - np.minimum(np.minimum.accumulate(total, axis=-1), 0.0)
    return waits
