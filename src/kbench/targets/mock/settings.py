"""What a mock server is: its pool, what a step costs, and how it misbehaves."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kbench.engine.core import EngineConfig, StepPlan
from kbench.errors import UsageError

Dialect = Literal["vllm", "sglang"]
FAULTS: Mapping[str, str] = {
    "429": "answers 429 Too Many Requests",
    "500": "answers 500 Internal Server Error",
    "503": "answers 503 Service Unavailable",
    "refuse": "closes the connection before it answers",
    "stall": "sends the first token and then nothing more",
    "cut": "closes the connection in the middle of the stream",
    "garbage": "sends a line that is no JSON",
    "silent": "says nothing at all",
}
"""What may happen to a request, by name."""


@dataclass(frozen=True, slots=True)
class MockSettings:
    """Costs are microseconds of wall time a step; `faults` are probabilities a request, drawn in order of arrival."""

    config: EngineConfig
    step_us: float = 4_000.0
    prefill_us: float = 20.0
    """A prompt token that is computed, not found in the cache."""
    decode_us: float = 50.0
    """A sequence that decodes."""
    model: str = "mock"
    vocab: int = 32_000
    max_context: int = 131_072
    dialect: Dialect = "vllm"
    metrics: bool = True
    usage: bool = True
    token_ids: bool = True
    chunk_tokens: int = 1
    """Tokens that one chunk of the stream carries."""
    faults: Mapping[str, float] = field(default_factory=dict)
    seed: int = 1
    restart_after: int = 0
    """After so many requests every connection is dropped and the next ones are refused for `restart_s`; 0: never."""
    restart_s: float = 1.0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.faults) - set(FAULTS))
        if unknown:
            raise UsageError(f"no fault {', '.join(unknown)}", remedy=f"use {', '.join(FAULTS)}")
        if any(not 0.0 <= share <= 1.0 for share in self.faults.values()) or sum(self.faults.values()) > 1.0:
            raise UsageError("faults that add up to more than 1", remedy="name shares from 0 to 1")
        if min(self.step_us, self.prefill_us, self.decode_us) < 0 or self.chunk_tokens < 1:
            raise UsageError("a step of negative time, or a chunk of no token", remedy="use 0 and more, and 1 and more")

    def duration_us(self, plan: StepPlan) -> float:
        decodes = sum(item.is_decode for item in plan.scheduled)
        return self.step_us + self.decode_us * decodes + self.prefill_us * (plan.query_tokens - decodes)

    def fault_of(self, number: int) -> str:
        """What happens to the `number`-th request; an empty string: nothing."""
        place = random.Random(f"{self.seed}/{number}").random()
        for name, share in self.faults.items():
            if place < share:
                return name
            place -= share
        return ""
