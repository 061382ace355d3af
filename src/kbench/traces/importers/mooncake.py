"""Mooncake traces: `{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}`, one object a line.

Traps: the ids are prefix hashes of 512-token blocks, `ceil(input_length / 512)` of them, so the last one usually names
a partial block, which must never count as reusable: it goes to `tail_id`, which nothing matches. The conversation trace
lies on a 3 s grid (see `--dejitter`). No sessions; an answer in a later prompt has new ids, so reuse of generated
tokens cannot be seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kbench.traces.importers.common import BadRow, ImportOptions, RowLog, finish, text_lines, token_count
from kbench.traces.trace import RequestRow, Trace, TraceMeta

BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(source: Path, options: ImportOptions) -> Trace:
    """One request a line. Raises TraceError with line and field."""
    block_tokens = options.block_tokens or BLOCK_TOKENS
    log = RowLog(source, options.skip_bad_rows)
    for line, text in text_lines(source):
        try:
            log.keep(line, _request(text, block_tokens))
        except BadRow as bad:
            log.reject(line, bad)
    meta = TraceMeta(
        source=source.name,
        importer="mooncake",
        licence="Apache-2.0",
        citation="Qin et al., Mooncake, FAST 2025",
        block_tokens=block_tokens,
    )
    return finish(log, meta, options)


def _request(text: str, block_tokens: int) -> RequestRow:
    record = _object(text)
    length = token_count(record["input_length"], "input_length")
    ids = _ids(record["hash_ids"])
    blocks = -(-length // block_tokens)
    if len(ids) != blocks:
        what = f"{len(ids)} ids for {length} tokens, where blocks of {block_tokens} make {blocks}"
        raise BadRow("hash_ids", what, "is --block-tokens the block size of this trace?")
    full = length // block_tokens
    return RequestRow(
        session_id=0,
        arrival_us=_microseconds(record["timestamp"]),
        input_tokens=length,
        output_tokens=token_count(record["output_length"], "output_length"),
        block_ids=ids[:full],
        tail_id=ids[full] if full < blocks else None,
    )


def _object(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise BadRow("json", f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadRow("json", "not a JSON object")
    for name in _FIELDS:
        if name not in record:
            raise BadRow(name, "missing")
    return record


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(each) is not int or not 0 <= each < 2**63 for each in value):
        raise BadRow("hash_ids", "not a list of ids (whole numbers, 0 or more)")
    return value


def _microseconds(value: Any) -> int:
    if type(value) not in (int, float) or not 0 <= value < 2**43:
        raise BadRow("timestamp", f"not a time in ms: {value!r}")
    milliseconds: int | float = value
    return round(milliseconds * 1000)
