"""Seeded workloads of our own making: sessions, turns, shared prefixes and arrivals, after a preset.

Owns how sessions grow; what a kind of traffic is like stands in `presets`. Same arguments, same `sha256`, whatever the
library versions (see `draw`). Lengths of prompts, prefixes and turns are never a multiple of 16 tokens, so that no page
size is favoured. Knows nothing of models, engines or clocks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import isfinite

from kbench.errors import UsageError
from kbench.traces.draw import Draw, Gaps, Span
from kbench.traces.presets import PRESETS, Preset
from kbench.traces.trace import MAX_SEQUENCE_TOKENS, RequestRow, Trace, TraceMeta, trace_from_rows

__all__ = ["ARRIVALS", "PRESETS", "Preset", "SynthOptions", "synthesise"]

_STEP_US = 20_000  # assumed for one output token where later turns are put in file order
_COMMON_DIVISOR = 16  # of the page sizes in use: no length is a multiple of it


ARRIVALS = ("poisson", "gamma", "weibull", "bursty")
_BURSTY_CV = 4.0  # where neither the preset nor the caller says one above 1


@dataclass(frozen=True, slots=True)
class SynthOptions:
    """What `synthesise` was asked for, resolved: every number that the trace follows from."""

    preset: str
    requests: int
    seed: int
    rate_per_s: float
    arrivals: str
    cv: float
    scale: float
    max_context: int
    think_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request of a session before it has a place in the file."""

    session: int
    turn: int
    input_tokens: int
    output_tokens: int
    prefix_tokens: int
    shared_id: int | None
    shared_tokens: int | None
    think_us: int


def synthesise(
    preset: str,
    requests: int,
    seed: int,
    *,
    rate_per_s: float | None = None,
    arrivals: str | None = None,
    cv: float | None = None,
    scale: float = 1.0,
    max_context: int | None = None,
    think_scale: float = 1.0,
) -> Trace:
    """A trace of exactly `requests` requests.

    `rate_per_s` counts requests, later turns included; `arrivals` is one of ARRIVALS (all but `poisson` with a `cv`)
    and times the sessions. `scale` multiplies all lengths; `max_context` bounds prompt + output; `think_scale`
    multiplies the time between an answer and the next turn. None takes the preset's own.
    Raises UsageError for an unknown preset or an option out of its range.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}", remedy=f"one of {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    longest = chosen.max_context * scale if max_context is None else max_context
    options = SynthOptions(
        preset=preset,
        requests=requests,
        seed=seed,
        rate_per_s=chosen.rate_per_s if rate_per_s is None else rate_per_s,
        arrivals=chosen.arrivals if arrivals is None else arrivals,
        cv=_variation(chosen, arrivals) if cv is None else cv,
        scale=scale,
        max_context=round(longest) if isfinite(longest) else 0,
        think_scale=think_scale,
    )
    _check(options)
    turns = _turns(chosen, options)
    rows = _in_file_order(turns, _session_arrivals(options, 1 + turns[-1].session))
    asked = {"rate": rate_per_s, "arrivals": arrivals, "cv": cv, "max-context": max_context}
    asked |= {name: value for name, value in (("scale", scale), ("think-scale", think_scale)) if value != 1.0}
    extra = "".join(f" --{name} {value}" for name, value in asked.items() if value is not None)
    command = f"kbench trace synth {preset} --requests {requests} --seed {seed}{extra}"
    meta = TraceMeta(
        source=f"synthesised: {chosen.title}",
        importer="synth",
        options={**asdict(options), "command": command},
        licence="Apache-2.0",
    )
    return trace_from_rows(rows, meta)


def _variation(preset: Preset, arrivals: str | None) -> float:
    """The coefficient of variation where the caller names none."""
    if arrivals == "poisson":
        return 1.0
    return _BURSTY_CV if arrivals == "bursty" and preset.cv <= 1.0 else preset.cv


def _check(options: SynthOptions) -> None:
    rules = (
        (1 <= options.requests <= 10_000_000, "requests", "between 1 and 10,000,000"),
        (0 <= options.seed < 2**63, "seed", "0 or more"),
        (0.0 < options.rate_per_s < 1e6, "rate_per_s", "above 0 and below 1,000,000"),
        (options.arrivals in ARRIVALS, "arrivals", f"one of {', '.join(ARRIVALS)}"),
        (0.0 < options.cv <= 20.0, "cv", "above 0 and at most 20"),
        (0.01 <= options.scale <= 1_000.0, "scale", "between 0.01 and 1,000"),
        (0.0 <= options.think_scale <= 1_000.0, "think_scale", "between 0 and 1,000"),
        (32 <= options.max_context <= MAX_SEQUENCE_TOKENS, "max_context", f"between 32 and {MAX_SEQUENCE_TOKENS:,}"),
        (options.arrivals != "poisson" or options.cv == 1.0, "cv", "1 for poisson arrivals; for another use gamma"),
        (options.arrivals != "weibull" or 0.05 <= options.cv <= 15.0, "cv", "between 0.05 and 15 for weibull arrivals"),
        (options.arrivals != "bursty" or options.cv > 1.0, "cv", "above 1 for bursty arrivals"),
    )
    for holds, name, wanted in rules:
        if not holds:
            raise UsageError(f"{name} = {getattr(options, name)!r}", where="trace synth", remedy=f"must be {wanted}")


def _off_page(tokens: int, before: int = 0) -> int:
    """`tokens`, or a few more where they, alone or with what stands `before` them, would fill whole pages."""
    while tokens % _COMMON_DIVISOR == 0 or (before + tokens) % _COMMON_DIVISOR == 0:
        tokens += 1
    return tokens


def _turns(preset: Preset, options: SynthOptions) -> list[_Turn]:
    """Sessions, one after another, until there are enough requests; the last one may be cut short."""
    draw = Draw(options.seed, 0)
    streams = [_length(draw, preset.shared, options.scale) for _ in range(preset.shared_streams)]
    turns: list[_Turn] = []
    session = 0
    while len(turns) < options.requests:
        turns += _session(preset, options, draw, session, streams)
        session += 1
    return turns[: options.requests]


def _length(draw: Draw, span: Span, scale: float, before: int = 0) -> int:
    return _off_page(max(1, round(draw.between(span) * scale)), before)


def _session(preset: Preset, options: SynthOptions, draw: Draw, session: int, streams: list[int]) -> list[_Turn]:
    shared_id: int | None = None
    if streams and draw.unit() >= preset.unshared_share:
        shared_id = draw.below(len(streams)) if not preset.popularity else _popular(draw, preset)
    shared = 0 if shared_id is None else min(streams[shared_id], _fit(options.max_context // 2))
    turns: list[_Turn] = []
    prefix, think_us = 0, 0
    while True:
        head = max(prefix, shared)
        prompt = head + _length(draw, preset.message if turns else preset.first, options.scale, head)
        output = _length(draw, preset.output, options.scale, prompt)
        if prompt + output > options.max_context:
            if turns:
                return turns
            output = min(output, _fit(options.max_context // 4))
            prompt = _fit(options.max_context - output)
        turns.append(_Turn(session, len(turns), prompt, output, prefix, shared_id, shared or None, think_us))
        if len(turns) >= preset.max_turns or draw.unit() >= preset.more_turns:
            return turns
        prefix, think_us = prompt + output, round(draw.between(preset.think_ms) * 1_000 * options.think_scale)


def _popular(draw: Draw, preset: Preset) -> int:
    weights = [(stream + 1) ** -preset.popularity for stream in range(preset.shared_streams)]
    left = draw.unit() * sum(weights)
    for stream, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return stream
    return preset.shared_streams - 1


def _fit(tokens: int) -> int:
    """`tokens`, or a little less where it would fill whole pages."""
    return tokens if tokens % _COMMON_DIVISOR else tokens - 3


def _session_arrivals(options: SynthOptions, sessions: int) -> list[int]:
    """Arrival of each session in us, the first at 0, at a rate that makes `rate_per_s` requests."""
    draw = Draw(options.seed, 1)
    mean_us = options.requests / options.rate_per_s / sessions * 1e6
    gaps = Gaps(draw, options.arrivals, options.cv)
    at = 0.0
    arrivals = [0]
    for _ in range(sessions - 1):
        at += gaps.next() * mean_us
        arrivals.append(int(at))
    return arrivals


def _in_file_order(turns: list[_Turn], arrivals: list[int]) -> list[RequestRow]:
    """Rows in the order in which an unloaded server would see them; only first turns have a recorded arrival."""
    nominal: list[int] = []
    for index, turn in enumerate(turns):
        if turn.turn == 0:
            nominal.append(arrivals[turn.session])
        else:
            nominal.append(nominal[-1] + turns[index - 1].output_tokens * _STEP_US + turn.think_us)
    order = sorted(range(len(turns)), key=lambda index: (nominal[index], index))
    place = {index: row for row, index in enumerate(order)}
    return [
        RequestRow(
            session_id=turns[index].session,
            turn=turns[index].turn,
            parent_ids=(place[index - 1],) if turns[index].turn else (),
            arrival_us=None if turns[index].turn else nominal[index],
            think_us=turns[index].think_us if turns[index].turn else None,
            input_tokens=turns[index].input_tokens,
            output_tokens=turns[index].output_tokens,
            prefix_tokens=turns[index].prefix_tokens if turns[index].turn else None,
            shared_id=turns[index].shared_id,
            shared_tokens=turns[index].shared_tokens,
        )
        for index in order
    ]
