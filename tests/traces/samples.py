"""A small, whole source of every format, made to the published schema."""

from __future__ import annotations

import json
from typing import Any

AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2023-11-16 18:15:50.9951699,396,109\r\n"
    b"2023-11-16 18:15:50.9951698,20,1"
)


def lines(*rows: Any) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def mooncake(time_ms: object, length: object, ids: object, output: object = 5) -> dict[str, object]:
    return {"timestamp": time_ms, "input_length": length, "output_length": output, "hash_ids": ids}


MOONCAKE = lines(mooncake(0, 1300, [0, 1, 2]), mooncake(3000, 700, [0, 3]), mooncake(3000, 1024, [0, 4]))


def qwen(chat: object, parent: object, time_s: object, length: object, ids: object, **cells: object) -> dict[str, Any]:
    row = {"chat_id": chat, "parent_chat_id": parent, "timestamp": time_s, "input_length": length, "output_length": 7}
    return {**row, "type": "text", "turn": 1, "hash_ids": ids, **cells}


QWEN = lines(
    qwen(10, -1, 0.5, 40, [1, 2, 3]),
    qwen(11, 10, 9.25, 70, [1, 2, 4, 5, 6], turn=2),
    qwen(12, 99, 3.0, 16, [7]),
)
BURSTGPT = (
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n45,GPT-4,10,1,11,API log\n"
)
BURSTGPT_SESSIONS = (
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n"
    b"5,a7,1.5,ChatGPT,472,18,490,Conversation log\r\n6,,,GPT-4,10,1,11,API log\r\n"
    b'9,a7,0.25,"GPT-4, new",500,8,508,Conversation log'
)
SERVEGEN_TRACE = (
    b"0,0.05,1.0,Gamma,2.0,1.5\r\n600,0.1,2.5,Weibull,0.4,0.03\r\n1200,0,0,,0,0\r\n1800,0.02,1.0,,0,0\r\n"
    b"21600,0.01,1.0,Gamma,1.0,1.0\r\n43200,0.02,1.0,Gamma,1.0,1.0\r\n"
)
SERVEGEN_DATASET = json.dumps(
    {
        "0": {"input_tokens": "{18: 0.25, 500: 0.75}", "output_tokens": "{1: 1.0}"},
        "21600": {"input_tokens": "{}", "output_tokens": "{}"},
        "43200": {"input_tokens": "{7: 3}", "output_tokens": "{9: 1, 11: 0}"},
    }
).encode()
TRACELAB_CSV = (
    b"session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
    b"a,0,0,0,512,64,100\na,0,1,576,128,64,250.5\na,0,2,768,128,64,0\nb,200,0,0,400,48,80\nb,200,1,448,100,48,0\n"
)


def tracelab(session: str, index: int, total: int, prefix: int, events: list[tuple[str, str]]) -> dict[str, Any]:
    timing = [{"event_type": kind, "timestamp": f"2026-06-01T05:{time}Z"} for kind, time in events]
    counts = {"input_tokens_total": total, "prefix_tokens": prefix, "output_tokens": 30}
    return {
        "provider": "p",
        "model": "m",
        "session_id": session,
        "round_index": index,
        "timing_events": timing,
        **counts,
    }


TRACELAB_ROUNDS = lines(
    tracelab("s", 0, 900, 640, [("user_message", "40:20.000"), ("text", "40:23.500"), ("tool_call", "40:24.000")]),
    tracelab("s", 1, 1000, 920, [("tool_result", "40:25.000"), ("tool_result", "40:31.000"), ("text", "40:33.000")]),
    tracelab("t", 0, 700, 640, [("user_message", "40:21.000"), ("text", "40:22.000")]),
)


def span(
    number: int, start_s: float, end_s: float, prompt: list[str], answer: str, **attributes: Any
) -> dict[str, Any]:
    return {
        "trace_id": "t",
        "span_id": f"s{number}",
        "start_time": f"2026-02-25T10:00:{start_s:09.6f}",
        "end_time": f"2026-02-25T10:00:{end_s:09.6f}+00:00",
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": 10 * len(prompt),
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.input.messages": json.dumps([{"role": "user", "content": text} for text in prompt]),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": answer}]),
            **attributes,
        },
    }


OTEL = json.dumps(
    {
        "spans": [
            span(1, 0, 2, ["a"], "b"),
            span(2, 3, 5, ["a", "b", "c"], "d"),
            span(3, 3.5, 6, ["x"], "y"),
            span(4, 7, 8, ["a", "b", "e"], "f"),
            {"trace_id": "t", "name": "a tool", "start_time": "", "attributes": {}},
        ]
    },
    indent=1,
).encode()
JSONL = lines(
    {
        "request_id": "q",
        "arrival_s": 1.5,
        "input_tokens": 20,
        "output_tokens": 3,
        "shared_id": "sys",
        "shared_tokens": 9,
    },
    {
        "request_id": "r",
        "parent_ids": ["q"],
        "think_ms": 20,
        "input_tokens": 31,
        "output_tokens": 2,
        "prefix_tokens": 23,
    },
    {"request_id": 3, "arrival_s": 1.0, "input_tokens": 5, "output_tokens": 2, "regime": "größer", "ttft_slo_ms": 90},
)
SOURCES = {
    "azure": [AZURE],
    "mooncake": [MOONCAKE],
    "qwen-bailian": [QWEN],
    "burstgpt": [BURSTGPT, BURSTGPT_SESSIONS],
    "tracelab": [TRACELAB_CSV, TRACELAB_ROUNDS],
    "otel": [OTEL],
    "jsonl": [JSONL],
}
