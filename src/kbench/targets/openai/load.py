"""Load truth: whether the client sent what the trace asked for, when it asked for it.

A client that is late measures itself. Such a replay is `degraded`, and is no evidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kbench.stats.location import percentile
from kbench.targets.openai.exchange import Exchange

MOST_LAG_MS = 10.0
"""Dispatch lag at p99 from which on a replay is degraded."""


@dataclass(frozen=True, slots=True)
class LoadTruth:
    """`lag_us` is from due (or a free place, under a cap) to sent, of every request that was sent."""

    offered: int
    sent: int
    lag_us: tuple[float, ...]
    client_queue_us: tuple[float, ...]
    """From scheduled to a free place; all 0 where nothing is capped."""
    seconds: float
    most_lag_ms: float = MOST_LAG_MS

    @classmethod
    def of(cls, exchanges: Sequence[Exchange], most_lag_ms: float = MOST_LAG_MS) -> LoadTruth:
        sent = [own for own in exchanges if own.sent_ns]
        stamps = [own.scheduled_ns for own in exchanges]
        return cls(
            offered=len(exchanges),
            sent=len(sent),
            lag_us=tuple((own.sent_ns - own.slot_ns) / 1_000 for own in sent),
            client_queue_us=tuple((own.slot_ns - own.scheduled_ns) / 1_000 for own in sent),
            seconds=(max(stamps) - min(stamps)) / 1e9 if stamps else 0.0,
            most_lag_ms=most_lag_ms,
        )

    @property
    def degraded(self) -> bool:
        """Whether the client, not the server, delayed what was due."""
        late = percentile(self.lag_us, 0.99)
        return bool(self.offered) and not late <= self.most_lag_ms * 1_000

    def facts(self) -> dict[str, Any]:
        def plain(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "offered": self.offered,
            "sent": self.sent,
            "offered_per_s": plain(self.offered / self.seconds) if self.seconds else None,
            "lag_p50_us": plain(percentile(self.lag_us, 0.50)),
            "lag_p99_us": plain(percentile(self.lag_us, 0.99)),
            "lag_max_us": plain(max(self.lag_us, default=math.nan)),
            "client_queue_p99_us": plain(percentile(self.client_queue_us, 0.99)),
            "most_lag_ms": self.most_lag_ms,
            "degraded": self.degraded,
        }


def causes(exchanges: Sequence[Exchange]) -> dict[str, int]:
    """How often each cause kept a request from finishing."""
    return dict(Counter(own.cause for own in exchanges if own.cause).most_common())
