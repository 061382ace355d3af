"""What one host thread did, as exclusive segments.

Owns the flattening of nested spans (operators inside operators inside annotated phases) into segments that do not
overlap, each with its class and phase. An operator's inner operators belong to it: the GEMMs inside
scaled_dot_product_attention are attention. It knows no device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from kbench.timeline.classes import HOST, Classifier
from kbench.timeline.events import Span

PHASE_PREFIX = "kbench.phase "


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one thread's time. `op_class` is None where no operator ran, or none that is known (`op` says)."""

    begin_us: float
    end_us: float
    op: str
    """The innermost operator; empty where the interpreter ran between operators."""
    op_class: str | None
    phase: str


@dataclass(slots=True)
class _Open:
    end_us: float
    op: str
    op_class: str | None
    phase: str


@dataclass(frozen=True, slots=True)
class HostThread:
    """The segments of one thread, in order; gaps between top-level spans are not in it."""

    segments: tuple[Segment, ...]
    begins: tuple[float, ...]

    @classmethod
    def of(cls, spans: Iterable[Span], classifier: Classifier) -> HostThread:
        """`spans`: operators and phase annotations of one thread, parents before children."""
        segments: list[Segment] = []
        stack: list[_Open] = []
        clock = 0.0

        def advance(to_us: float) -> None:
            nonlocal clock
            if stack and to_us > clock:
                top = stack[-1]
                segments.append(Segment(clock, to_us, top.op, top.op_class, top.phase))
            clock = max(clock, to_us)

        def close_until(begin_us: float) -> None:
            while stack and stack[-1].end_us <= begin_us:
                advance(stack[-1].end_us)
                stack.pop()

        for span in spans:
            close_until(span.begin_us)
            advance(span.begin_us)
            clock = max(clock, span.begin_us)
            parent = stack[-1] if stack else _Open(span.end_us, "", None, "")
            # A child cannot outlive its parent; kineto's clocks differ by nanoseconds at the edges.
            end_us = min(span.end_us, parent.end_us) if stack else span.end_us
            stack.append(_child(span, end_us, parent, classifier))
        close_until(float("inf"))
        return cls(tuple(segments), tuple(segment.begin_us for segment in segments))

    def at(self, time_us: float) -> Segment | None:
        """The segment that holds `time_us`."""
        index = bisect_right(self.begins, time_us) - 1
        if index < 0 or self.segments[index].end_us <= time_us:
            return None
        return self.segments[index]


def _child(span: Span, end_us: float, parent: _Open, classifier: Classifier) -> _Open:
    if span.name.startswith(PHASE_PREFIX):
        return _Open(end_us, parent.op, parent.op_class, span.name[len(PHASE_PREFIX) :].strip())
    own = classifier.op(span.name)
    # The outermost known operator decides, but a KV write inside an attention operator stays one.
    decided = parent.op_class not in (None, HOST) and own != "kv_write"
    return _Open(end_us, span.name, parent.op_class if decided else (own or parent.op_class), parent.phase)
