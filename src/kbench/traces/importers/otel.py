"""OpenTelemetry spans of model calls: `{"spans": [...]}` as inference-perf ships them, OTLP JSON (`resourceSpans`), a
list of spans, or one such document a line.

A span is a model call when it has token usage or a chat-like `gen_ai.operation.name`; others are left out and counted.
Calls of one conversation are one session. A call waits for the calls that ended before it began, without those whose
successors it already waits for: fans out and in. Where messages were recorded and a call's prompt goes on from an
earlier call's messages and answer, that call is its first parent and its tokens are kept; nothing is guessed from
partly equal texts. Lengths come from the usage; spans without one are bad rows unless `--chars-per-token` is given.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kbench.errors import TraceError
from kbench.traces.columns import COLUMNS, AnyColumn, Ints, Lists, column_of
from kbench.traces.importers.cells import BadRow, json_object, json_value, shown, token_count
from kbench.traces.importers.common import ImportOptions, RowLog, built, text_lines, whole_text
from kbench.traces.trace import Trace, TraceMeta

_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
_CALLS = ("chat", "text_completion", "generate_content", "completion")
_SESSION = ("gen_ai.conversation.id", "session.id", "exgentic.session.id")
_MOST_CALLS = 20_000  # of one session: each is compared with all before it
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class _Call:
    line: int
    session: str
    start_us: int
    end_us: int
    input_tokens: int
    output_tokens: int
    said: tuple[str, ...]  # the prompt, a text a message; empty: not recorded
    answer: str


def read(source: Path, options: ImportOptions) -> Trace:
    """One model call a row. An error's line is that of the document, its number that of the span in it."""
    log = RowLog(source, options.skip_bad_rows, width=1)
    calls: list[_Call] = []
    other = 0
    for line, ordinal, span in _spans(source, log):
        try:
            call = _call(line, span, options.chars_per_token)
        except BadRow as bad:
            log.reject(line, BadRow(bad.field, f"span {ordinal}: {bad.what}", bad.remedy))
            continue
        if call is None:
            other += 1
        else:
            calls.append(call)
    calls.sort(key=lambda call: (call.start_us, call.end_us))
    log.keep([call.line for call in calls])
    (lines,) = log.columns()
    meta = TraceMeta(source=source.name, importer="otel", licence="unknown")
    return built(log, lines, _columns(source, calls), meta, options, notes={"spans_that_are_no_calls": other})


# --------------------------------------------------------------------------------------------- spans


def _spans(source: Path, log: RowLog) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Line of the document, number of the span in it, and the span."""
    documents: list[tuple[int, Any]] = []
    try:
        documents = [(1, json_value(whole_text(source)))]
    except BadRow as whole:
        for line, text in text_lines(source):
            try:
                documents.append((line, json_object(text)))
            except BadRow as bad:
                log.reject(line, whole if line == 1 else bad)
    for line, document in documents:
        try:
            spans = _spans_of(document)
        except BadRow as bad:
            log.reject(line, bad)
            continue
        for ordinal, span in enumerate(spans, start=1):
            if isinstance(span, dict):
                yield line, ordinal, span
            else:
                log.reject(line, BadRow("spans", f"span {ordinal} is not an object"))


def _spans_of(document: Any) -> list[Any]:
    if isinstance(document, list):
        return document
    if isinstance(document, dict):
        if isinstance(document.get("spans"), list):
            found: list[Any] = document["spans"]
            return found
        if "resourceSpans" in document:
            scopes = [scope for each in _objects(document["resourceSpans"]) for scope in _objects(each["scopeSpans"])]
            return [span for scope in scopes for span in _objects(scope["spans"])]
        if "start_time" in document or "startTimeUnixNano" in document:
            return [document]
    raise BadRow("spans", "neither a span, nor a list of spans, nor OTLP's resourceSpans")


class _Strict(dict[str, Any]):
    """An object whose missing keys are bad rows."""

    def __missing__(self, key: str) -> Any:
        raise BadRow(key, "missing")


def _objects(value: Any) -> list[_Strict]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRow("resourceSpans", "not a list of objects")
    return [_Strict(each) for each in value]


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    found = span.get("attributes", {})
    if isinstance(found, dict):
        return found
    if not isinstance(found, list):
        raise BadRow("attributes", "neither an object nor a list")
    plain: dict[str, Any] = {}
    for pair in found:
        if isinstance(pair, dict) and isinstance(pair.get("key"), str) and isinstance(pair.get("value"), dict):
            plain[pair["key"]] = next(iter(pair["value"].values()), None)
    return plain


def _call(line: int, span: dict[str, Any], chars_per_token: float | None) -> _Call | None:
    attributes = _attributes(span)
    usage = [next((attributes[name] for name in names if name in attributes), None) for names in (_INPUT, _OUTPUT)]
    if usage == [None, None] and attributes.get("gen_ai.operation.name") not in _CALLS:
        return None
    said = _messages(attributes.get("gen_ai.input.messages"))
    answers = _messages(attributes.get("gen_ai.output.messages"))
    text = attributes.get("gen_ai.output.text")
    answer = "".join(answers) if answers else _content(text) if text is not None else ""
    lengths = []
    for name, recorded, chars in (
        (_INPUT[0], usage[0], sum(map(len, said))),
        (_OUTPUT[0], usage[1], len(answer)),
    ):
        if recorded is not None:
            lengths.append(token_count(recorded, name))
        elif chars_per_token is not None and chars:
            lengths.append(token_count(max(1, round(chars / chars_per_token)), name))
        else:
            raise BadRow(name, "no usage was recorded", "--chars-per-token 4 estimates lengths where there is text")
    start = _moment(span, "start_time", "startTimeUnixNano")
    end = _moment(span, "end_time", "endTimeUnixNano")
    if end < start:
        raise BadRow("end_time", "ends before it starts")
    named = next((str(attributes[name]) for name in _SESSION if name in attributes), "")
    trace = str(span.get("trace_id", span.get("traceId", "")))
    return _Call(line, f"{named}\0{'' if named else trace}", start, end, lengths[0], lengths[1], said, answer)


def _messages(value: Any) -> tuple[str, ...]:
    """The texts of a list of messages, given as JSON or as the text of it."""
    if isinstance(value, str):
        try:
            value = json_value(value)
        except BadRow:
            return (value,)
    if not isinstance(value, list):
        return ()
    return tuple(_content(each.get("content", each.get("parts"))) if isinstance(each, dict) else "" for each in value)


def _content(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _moment(span: dict[str, Any], name: str, nanos: str) -> int:
    if nanos in span:
        return _nanoseconds(span[nanos], nanos) // 1_000
    text = span.get(name)
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
        if moment is None:
            raise BadRow(name, f"not a time: {shown(text)}")
        since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    except (ValueError, OverflowError) as error:
        raise BadRow(name, f"not a time: {shown(text)}") from error
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _nanoseconds(value: Any, field: str) -> int:
    """Since 1970; OTLP writes 64-bit numbers as text, and a float would round them."""
    found = int(value) if isinstance(value, str) and len(value) < 24 and value.isdecimal() else value
    if type(found) is not int or not 0 <= found < 2**63:
        raise BadRow(field, f"not a time in ns: {shown(value)}")
    return found


# --------------------------------------------------------------------------------------------- dependencies


def _columns(source: Path, calls: list[_Call]) -> dict[str, AnyColumn]:
    sessions: dict[str, list[int]] = {}
    for row, call in enumerate(calls):
        sessions.setdefault(call.session, []).append(row)
    parents: list[list[int]] = [[] for _ in calls]
    kept: list[int | None] = [None] * len(calls)
    session_id = [0] * len(calls)
    for number, rows in enumerate(sessions.values()):
        if len(rows) > _MOST_CALLS:
            what = f"{len(rows):,} calls in one session"
            raise TraceError(what, file=str(source), field="session", remedy=f"at most {_MOST_CALLS:,} are linked")
        by_end = sorted(rows, key=lambda row: calls[row].end_us)
        ends = [calls[row].end_us for row in by_end]
        for row in rows:
            session_id[row] = number
            # A call of no duration has ended when it begins, but is not its own parent.
            ended = [each for each in by_end[: bisect_right(ends, calls[row].start_us)] if each < row]
            parents[row], kept[row] = _parents(calls, row, ended)
    think = [
        calls[row].start_us - max(calls[parent].end_us for parent in above) if above else None
        for row, above in enumerate(parents)
    ]
    spec = {spec.name: spec for spec in COLUMNS}
    return {
        "session_id": column_of(spec["session_id"], session_id),
        "parent_ids": Lists.of(parents),
        "arrival_us": Ints.of([None if parents[row] else call.start_us for row, call in enumerate(calls)]),
        "think_us": Ints.of(think),
        "recorded_duration_us": Ints.of([call.end_us - call.start_us for call in calls]),
        "input_tokens": column_of(spec["input_tokens"], [call.input_tokens for call in calls]),
        "output_tokens": column_of(spec["output_tokens"], [call.output_tokens for call in calls]),
        "prefix_tokens": Ints.of(kept),
    }


def _parents(calls: list[_Call], row: int, ended: list[int]) -> tuple[list[int], int | None]:
    """The calls that `row` waits for, and how much it keeps of the first; `ended` is in the order of their ends."""
    if not ended:
        return [], None
    # Who ended before another of them began is waited for by way of that one.
    latest_start = max(calls[each].start_us for each in ended)
    last = [each for each in ended if calls[each].end_us > latest_start]
    last = last or [ended[-1]]
    kept, best = None, None
    for each in ended:
        length = _kept(calls[each], calls[row])
        if length is not None and (kept is None or length > kept):
            kept, best = length, each
    return ([best, *(each for each in last if each != best)] if best is not None else last), kept


def _kept(before: _Call, after: _Call) -> int | None:
    """Tokens of `before` that the prompt of `after` begins with; None where it does not go on from it."""
    if not before.said or after.said[: len(before.said)] != before.said:
        return None
    answered = after.said[len(before.said) : len(before.said) + 1] == (before.answer,)
    length = before.input_tokens + (before.output_tokens if answered else 0)
    return min(length, after.input_tokens)
