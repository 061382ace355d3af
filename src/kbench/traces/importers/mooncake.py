"""Mooncake traces: `{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}`, one object a line.

Traps: the ids are prefix hashes of 512-token blocks, `ceil(input_length / 512)` of them, so the last one usually names
a partial block, which must never count as reusable: it goes to `tail_id`, which nothing matches. The conversation trace
lies on a 3 s grid (see `--dejitter`). No sessions; an answer in a later prompt has new ids, so reuse of generated
tokens cannot be seen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kbench.traces.arrange import known_ints
from kbench.traces.columns import AnyColumn, Ints, frozen
from kbench.traces.importers.cells import BadRow, full_blocks, id_list, json_object, shown, token_count
from kbench.traces.importers.common import IdLists, ImportOptions, RowLog, built, text_lines
from kbench.traces.trace import Trace, TraceMeta

BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read(source: Path, options: ImportOptions) -> Trace:
    """One request a line. Raises TraceError with line and field."""
    block_tokens = options.block_tokens or BLOCK_TOKENS
    log, blocks = RowLog(source, options.skip_bad_rows, width=5), IdLists()
    for line, text in text_lines(source):
        try:
            record = json_object(text, _FIELDS)
            length = token_count(record["input_length"], "input_length")
            ids = id_list(record["hash_ids"], "hash_ids")
            full = full_blocks(ids, length, block_tokens, "hash_ids")
            tail = ids[-1] if len(full) < len(ids) else 0
            output = token_count(record["output_length"], "output_length")
            log.keep((line, _microseconds(record["timestamp"]), length, output, tail))
            blocks.add(full)
        except BadRow as bad:
            log.reject(line, bad)
    meta = TraceMeta(
        source=source.name,
        importer="mooncake",
        licence="Apache-2.0",
        citation="Qin et al., Mooncake, FAST 2025",
        block_tokens=block_tokens,
    )
    lines, arrivals, inputs, outputs, tails = log.columns()
    columns: dict[str, AnyColumn] = {
        "session_id": np.arange(lines.size),
        "arrival_us": known_ints(arrivals),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "block_ids": blocks.column(),
        "tail_id": Ints(tails, frozen(inputs % block_tokens > 0)),
    }
    return built(log, lines, columns, meta, options)


def _microseconds(value: object) -> int:
    if type(value) not in (int, float) or not 0 <= value < 2**43:  # type: ignore[operator]
        raise BadRow("timestamp", f"not a time in ms: {shown(value)}")
    milliseconds: int | float = value  # type: ignore[assignment]
    return round(milliseconds * 1000)
