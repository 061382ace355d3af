"""Taking many steps at once is the same as taking each by itself, to the last bit, whatever the engine and the trace.

Each configuration is drawn from its seed. Stepping runs the scheduler of the real engine on a pool with page ids, so
this also compares the two pools.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kbench.engine.core import EngineConfig
from kbench.engine.costs import CostTable, default_grid
from kbench.targets.base import ReplayResult
from kbench.targets.virtual import replay_virtual
from kbench.traces.schema import RequestRow, Trace
from kbench.traces.synth import PRESETS, synthesise

from .invented import invented_costs, invented_rows, trace

_QUICK, _MANY = 60, 1_500
COSTS = {
    "flat": invented_costs(),
    # Crooked, and repeated with 5 % of noise: no two steps cost the same.
    "crooked": CostTable.fit(
        row | {"wall_ns": row["wall_ns"] * random.Random(f"{row['point']} {repeat}").uniform(0.7, 1.4)}
        for repeat in range(3)
        for row in invented_rows("invented", default_grid(32, 6, 256))
    ),
}


def drawn_trace(draw: random.Random) -> Trace:
    """A preset, or requests of known blocks or tokens that share beginnings, many of them at once."""
    kind = draw.choice(["preset", "preset", "blocks", "tokens"])
    count = draw.randrange(5, 40)
    if kind == "preset":
        preset = draw.choice(sorted(PRESETS))
        return synthesise(preset, count, draw.randrange(10**6), scale=draw.choice([0.02, 0.05]), max_context=300)
    rows: list[RequestRow] = []
    arrival = 0
    stems = [[draw.randrange(2) for _ in range(80)] for _ in range(2)]
    for number in range(count):
        arrival += draw.choice([0, 0, 0, draw.randrange(20_000)])
        prompt = draw.choice(stems)[: draw.randrange(1, 80)] + [draw.randrange(2) for _ in range(draw.randrange(6))]
        output = [draw.randrange(1 + draw.randrange(2)) for _ in range(draw.randrange(1, 40))]
        parents = (draw.randrange(number),) if number and draw.random() < 0.2 else ()
        content: dict[str, object] = {"token_ids": prompt, "output_token_ids": output}
        if kind == "blocks":
            known = [tuple(prompt[: end + 1]) for end in range(3, len(prompt), 4)]
            content = {"block_ids": [hash(block) % 2**40 for block in known]}
        rows.append(
            RequestRow(
                session_id=rows[parents[0]].session_id if parents else number,
                turn=rows[parents[0]].turn + 1 if parents else 0,
                parent_ids=parents,
                arrival_us=None if parents else arrival,
                think_us=draw.randrange(3_000) if parents else None,
                input_tokens=len(prompt),
                output_tokens=len(output),
                **content,  # type: ignore[arg-type]
            )
        )
    return trace(*rows, block_tokens=4 if kind == "blocks" else None)


def drawn(seed: int) -> tuple[Trace, EngineConfig, CostTable, dict[str, object]]:
    draw = random.Random(seed)
    made = drawn_trace(draw)
    sizes = [1, 2, 4, 8, 64] if made.content_kind == "blocks" else [1, 2, 5, 16, 64]
    page_size = draw.choice(sizes)
    longest = int((made.input_tokens + made.output_tokens).max())
    tokens = max(page_size, round(longest * draw.choice([0.7, 1.0, 1.1, 1.5, 3.0, 10.0])) + page_size)
    config = EngineConfig(
        page_size,
        tokens // page_size,
        draw.choice([1, 3, 16, 64, 300]),
        draw.choice([1, 2, 4, 8, 32]),
        prefix_caching=draw.random() < 0.8,
        chunked_prefill=draw.random() < 0.7,
        watermark=draw.choice([0.0, 0.0, 0.05, 0.3]),
    )
    name = draw.choice(sorted(COSTS))
    options: dict[str, object] = {
        "rate_scale": draw.choice([0.2, 1.0, 10.0, 1_000.0]),
        "all_at_once": draw.random() < 0.2,
        "captured": draw.choice([(), (1, 2, 4, 8)]),
        "noise_seed": draw.randrange(100) if name == "crooked" and draw.random() < 0.7 else None,
    }
    return made, config, COSTS[name], options


def same(seed: int) -> ReplayResult:
    made, config, costs, options = drawn(seed)
    fast = replay_virtual(made, config, costs, **options)  # type: ignore[arg-type]
    assert fast == replay_virtual(made, config, costs, stepping=True, **options), f"seed {seed}"  # type: ignore[arg-type]
    options["until_us"] = random.Random(seed).uniform(0.0, 1.1) * fast.counters["end_us"]
    cut = replay_virtual(made, config, costs, **options)  # type: ignore[arg-type]
    assert cut == replay_virtual(made, config, costs, stepping=True, **options), f"seed {seed}"  # type: ignore[arg-type]
    return fast


def seen(first: int, count: int) -> Counter[str]:
    """How often what makes a difference happened."""
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        counters = same(seed).counters
        found.update({name: int(value > 0) for name, value in counters.items()})
    return found


def test_many_steps_at_once_are_the_same_as_each_by_itself() -> None:
    found = seen(0, _QUICK)
    for name in ("preemptions", "evictions", "hit_tokens", "rehit_tokens", "recomputed_tokens", "rejected"):
        assert found[name] > _QUICK // 20, name


@pytest.mark.slow
def test_many_more_configurations() -> None:
    seen(_QUICK, _MANY)
