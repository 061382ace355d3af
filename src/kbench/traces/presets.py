"""Kinds of traffic by name: how long, how often, how much in common. `synth` makes traces of them.

A preset's numbers and the order in which they are drawn fix the traces that ship: changing one changes their hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from kbench.traces.draw import Span

_UNUSED = Span(1, 1)


@dataclass(frozen=True, slots=True)
class Preset:
    """A kind of workload. Lengths are in tokens; a session's prompt is prefix + first + what was said since."""

    title: str
    first: Span  # the first message of a session, after the shared prefix
    output: Span
    shared_streams: int = 0  # system prompts or documents that sessions choose from
    shared: Span = _UNUSED
    popularity: float = 0.0  # stream k is chosen in proportion to 1 / (k + 1) ** popularity; 0: all alike
    unshared_share: float = 0.0  # of the sessions start without a shared prefix
    message: Span = _UNUSED  # later messages
    more_turns: float = 0.0  # chance that a session goes on after a turn
    max_turns: int = 1
    think_ms: Span = _UNUSED
    max_context: int = 4_096
    rate_per_s: float = 4.0
    arrivals: str = "poisson"
    cv: float = 1.0


PRESETS = MappingProxyType(
    {
        "chat": Preset(
            title="many turns over system prompts that sessions share; some short sessions without one",
            first=Span(40, 180),
            output=Span(16, 80),
            shared_streams=10,
            shared=Span(150, 700),
            unshared_share=0.25,
            message=Span(30, 260),
            more_turns=0.8,
            max_turns=12,
            think_ms=Span(500, 8_000),
            max_context=2_048,
        ),
        "long-context": Preset(
            title="long prompts, short answers, mostly one turn",
            first=Span(1_200, 3_900),
            output=Span(16, 64),
            message=Span(20, 120),
            more_turns=0.15,
            max_turns=3,
            think_ms=Span(1_000, 10_000),
            rate_per_s=2.0,
        ),
        "prefix-heavy": Preset(
            title="many sessions over a few long prefixes",
            first=Span(15, 90),
            output=Span(16, 48),
            shared_streams=5,
            shared=Span(700, 2_200),
            message=Span(15, 90),
            more_turns=0.6,
            max_turns=5,
            think_ms=Span(300, 4_000),
            max_context=3_072,
        ),
        "burst": Preset(
            title="single requests that arrive in bursts (gamma, coefficient of variation 4)",
            first=Span(90, 900),
            output=Span(16, 64),
            max_context=1_024,
            arrivals="gamma",
            cv=4.0,
        ),
        "rag": Preset(
            title="a question after one of many documents, some of them asked about far more often",
            first=Span(20, 120),
            output=Span(30, 200),
            shared_streams=80,
            shared=Span(600, 3_000),
            popularity=0.9,
            message=Span(20, 120),
            more_turns=0.25,
            max_turns=4,
            think_ms=Span(2_000, 20_000),
            rate_per_s=2.0,
        ),
        "agentic": Preset(
            title="long sessions of tool calls: short waits, the context grows with every result",
            first=Span(150, 1_500),
            output=Span(25, 260),
            shared_streams=3,
            shared=Span(1_500, 3_500),
            message=Span(40, 900),
            more_turns=0.92,
            max_turns=30,
            think_ms=Span(50, 4_000),
            max_context=16_384,
            rate_per_s=2.0,
        ),
        "shared-prefix": Preset(
            title="single requests behind one of two fixed instructions, as programs send them",
            first=Span(30, 300),
            output=Span(8, 60),
            shared_streams=2,
            shared=Span(900, 1_700),
            max_context=2_048,
            rate_per_s=8.0,
            arrivals="bursty",
            cv=2.0,
        ),
    }
)
