"""Qwen-Bailian usage traces: one JSON object a line with `chat_id`, `parent_chat_id` (-1: root), `timestamp` in s,
`input_length`, `output_length`, `type`, `turn` and `hash_ids` of 16-token blocks.

Traps: the last id names a partial block (and changes when the block fills up), so it goes to `tail_id`; the publisher
does not say whether an id names a block or the prefix up to its end, so ids that are no chain are chained here, which
is right for both; a parent may lie outside the two hours, and such a turn starts a session of its own. A turn's answer
has new ids in the next prompt: reuse of generated tokens cannot be seen.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kbench.traces.arrange import known_ints
from kbench.traces.columns import AnyColumn, Int64s, Ints, Lists, frozen
from kbench.traces.importers.cells import BadRow, full_blocks, id_list, json_object, shown, time_us, token_count
from kbench.traces.importers.common import IdLists, ImportOptions, RowLog, built, text_lines
from kbench.traces.importers.sessions import parents_column, roots_of
from kbench.traces.integrity import names_prefixes
from kbench.traces.trace import Trace, TraceMeta

BLOCK_TOKENS = 16
_FIELDS = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")


def read(source: Path, options: ImportOptions) -> Trace:
    """One request a line, its parent where the file has it. Raises TraceError with line and field."""
    block_tokens = options.block_tokens or BLOCK_TOKENS
    log, blocks = RowLog(source, options.skip_bad_rows, width=7), IdLists()
    line_of: dict[int, int] = {}
    for line, text in text_lines(source):
        try:
            record = json_object(text, _FIELDS)
            chat, parent = _chat(record["chat_id"], "chat_id"), _chat(record["parent_chat_id"], "parent_chat_id")
            if (earlier := line_of.setdefault(chat, line)) != line:
                raise BadRow("chat_id", f"{chat} is also the chat of line {earlier}")
            time = time_us(record["timestamp"], "timestamp", us_per_unit=1e6, unit="s")
            length = token_count(record["input_length"], "input_length")
            ids = id_list(record["hash_ids"], "hash_ids")
            full = full_blocks(ids, length, block_tokens, "hash_ids")
            tail = ids[-1] if len(full) < len(ids) else 0
            log.keep((line, chat, parent, time, length, token_count(record["output_length"], "output_length"), tail))
            blocks.add(full)
        except BadRow as bad:
            log.reject(line, bad)
    lines, chats, said, arrivals, inputs, outputs, tails = log.columns()
    parents = _rows_of(chats, said)
    ids_column = blocks.column()
    is_chain = names_prefixes(ids_column)
    columns: dict[str, AnyColumn] = {
        "session_id": roots_of(parents),
        "parent_ids": parents_column(parents),
        "arrival_us": known_ints(arrivals),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "block_ids": ids_column if is_chain else chained(ids_column),
        "tail_id": Ints(tails, frozen(inputs % block_tokens > 0)),
    }
    meta = TraceMeta(
        source=source.name,
        importer="qwen-bailian",
        licence="Apache-2.0",
        citation="Wang et al., KVCache Cache in the Wild, USENIX ATC 2025",
        block_tokens=block_tokens,
    )
    notes = {
        "parents_not_in_file": int(np.count_nonzero((said >= 0) & (parents < 0))),
        "block_ids_chained": not is_chain,
    }
    return built(log, lines, columns, meta, options, notes=notes)


def _chat(value: object, field: str) -> int:
    if type(value) is not int or not -1 <= value < 2**63 or (field == "chat_id" and value < 0):
        raise BadRow(field, f"not a chat: {shown(value)}")
    return value


def _rows_of(chats: Int64s, wanted: Int64s) -> Int64s:
    """The row of each wanted chat; -1 where there is none."""
    order = np.argsort(chats, kind="stable")
    at = np.minimum(np.searchsorted(chats[order], wanted), chats.size - 1)
    return np.where(chats[order][at] == wanted, order[at], -1)


def chained(ids: Lists) -> Lists:
    """New ids that name prefixes: equal exactly where a list's ids are equal up to and including this one."""
    _, dense = np.unique(ids.values, return_inverse=True)
    width = int(dense.max(initial=0)) + 1
    lengths, starts = ids.lengths, ids.offsets[:-1]
    longest_first = np.argsort(-lengths, kind="stable")
    named = np.empty(ids.values.size, np.int64)
    previous = np.zeros(lengths.size, np.int64)
    used = 0
    for position in range(int(lengths.max(initial=0))):
        rows = longest_first[: np.searchsorted(-lengths[longest_first], -position)]
        at = starts[rows] + position
        _, inverse = np.unique(previous[rows] * width + dense[at], return_inverse=True)
        previous[rows] = named[at] = used + inverse
        used += int(inverse.max()) + 1
    return Lists(ids.offsets, frozen(named), ids.known)
