"""Declared loads of experts: what is declared happens, exactly repeatable, and the model still computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbench.catalog import ModelShape, RoutingControl, RoutingKind, declared_visits, model_shape, visits_of
from kbench.engine.expert_load import LoadRecorder, read_loads
from kbench.engine.mlp import Experts, experts_dense, experts_loop, route
from kbench.engine.routing_control import assignment, control_routing
from kbench.engine.runner import Engine
from kbench.engine.seeded import seeded_weights
from kbench.errors import UsageError
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
KINDS: list[RoutingKind] = ["balanced", "zipf", "hot", "empty"]


def make_engine(preset: str = "tiny-moe", budget: int = 64, graph: Literal["eager", "graph"] = "eager") -> Engine:
    arm = Arm(
        name="arm",
        model=ModelSettings(preset=preset),
        engine=EngineSettings(kv_tokens=2_048, max_batched_tokens=budget, graph=graph),
        prefill="sdpa" if preset == "tiny-moe" else "reference",
        decode="sdpa-gather" if preset == "tiny-moe" else "reference",
        page_size=16,
        layout="NHD",
        seed=1,
        root=".",
    )
    return Engine(arm, "cpu", poison=True)


def recorded(engine: Engine, control: RoutingControl, seed: int = 1, root: Path = Path()) -> LoadRecorder:
    """Declare, and count what is visited while some prompts are generated."""
    control_routing(engine.runner, control, seed=seed, root=root)
    engine.runner.routing = recorder = LoadRecorder(engine.runner.shape, engine.runner.routing)
    engine.generate([[(3 * index + start) % 512 for index in range(60)] for start in range(3)], 12)
    assert torch.isfinite(engine.runner.last_logits).all()
    return recorder


def test_balanced_visits_differ_by_one_in_every_beginning_of_a_batch() -> None:
    made = assignment(declared_visits(RoutingControl("balanced"), 128, 8), 65)
    for tokens in (1, 7, 16, 33, 65):
        counts = torch.from_numpy(made[:tokens]).reshape(-1).bincount(minlength=128)
        assert int(counts.max() - counts.min()) <= 1


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    alpha=st.floats(0, 3),
    experts=st.integers(2, 64),
    top_k=st.integers(1, 8),
    rows=st.integers(1, 96),
)
def test_every_beginning_has_the_declared_load(
    kind: RoutingKind, alpha: float, experts: int, top_k: int, rows: int
) -> None:
    control = RoutingControl(kind, alpha)
    reachable = experts - (kind == "empty")
    if top_k > reachable:
        with pytest.raises(UsageError, match="experts"):
            declared_visits(control, experts, top_k)
        return
    visits = declared_visits(control, experts, top_k)
    assert sum(visits) == pytest.approx(top_k)
    assert all(0 <= share <= 1 for share in visits)
    made = torch.from_numpy(assignment(visits, rows))
    assert made.shape == (rows, top_k)
    assert all(len(set(row)) == top_k for row in made.tolist())
    for tokens in {1, rows // 2, rows} - {0}:
        counts = made[:tokens].reshape(-1).bincount(minlength=experts)
        off = (counts - tokens * torch.tensor(visits)).abs().max()
        assert float(off) < 3, (tokens, counts.tolist())
        if kind == "empty":
            assert counts[-1] == 0
        if kind == "hot":
            assert counts[0] == tokens


def test_zipf_follows_its_law_where_no_expert_is_full() -> None:
    visits = declared_visits(RoutingControl("zipf", 1.0), 64, 2)
    assert visits[3] / visits[15] == pytest.approx(4.0)
    capped = declared_visits(RoutingControl("zipf", 3.0), 8, 4)
    assert capped[:2] == (1.0, 1.0)
    assert sum(capped) == pytest.approx(4)


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-window"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_visits_what_was_declared(preset: str, kind: RoutingKind) -> None:
    engine = make_engine(preset)
    shape = engine.runner.shape
    recorder = recorded(engine, RoutingControl(kind, 1.5))
    wanted = sorted(declared_visits(RoutingControl(kind, 1.5), shape.experts, shape.experts_per_token))
    for counts in recorder.counts.values():
        tokens = sum(counts) / shape.experts_per_token
        # Each of the steps is off by less than three visits; their shares are what is compared.
        shares = sorted(count / tokens for count in counts)
        assert shares == pytest.approx(wanted, abs=0.09)
        if kind == "hot":
            assert max(counts) == tokens
        if kind == "empty":
            assert min(counts) == 0


def test_the_seed_decides_and_layers_differ() -> None:
    first, again, other = (recorded(make_engine(), RoutingControl("zipf", 2.0), seed).counts for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[0] != first[1]


def test_declared_tokens_depend_on_the_declaration_and_return_when_it_ends() -> None:
    prompts = [[(5 * index + 1) % 512 for index in range(40)]]
    engine = make_engine()
    free = engine.generate(prompts, 12)
    control_routing(engine.runner, RoutingControl("hot"), seed=1)
    assert engine.generate(prompts, 12) != free
    control_routing(engine.runner, None, seed=1)
    engine.reset()
    assert engine.generate(prompts, 12) == free


@pytest.mark.parametrize("kind", ["zipf", "hot"])
def test_a_padded_step_visits_the_same_experts(kind: RoutingKind) -> None:
    """Decodes are replayed with their declared experts; a batch with prompts is launched, and says why."""
    plain, padded = make_engine(), make_engine(graph="graph")
    outputs = []
    for engine in (plain, padded):
        control_routing(engine.runner, RoutingControl(kind), seed=1)
        outputs.append(engine.generate([[(3 * index + start) % 512 for index in range(20)] for start in range(3)], 12))
    assert outputs[0] == outputs[1]
    assert (padded.runner.last_step.mode, padded.runner.last_step.padded_tokens) == ("padded", 1)
    assert any("overruled" in reason for _, reason in padded.runner.steps)


@pytest.mark.parametrize("normalised", [True, False])
def test_weights_are_the_routers_and_normalised(normalised: bool) -> None:
    from dataclasses import replace

    shape = replace(model_shape("tiny-moe"), norm_topk_prob=normalised)
    layer = seeded_weights(shape, 1, torch.float32, torch.device("cpu")).layers[0].mlp
    assert isinstance(layer, Experts)
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
    ids = torch.from_numpy(assignment(declared_visits(RoutingControl("balanced"), 8, 2), 9))
    reroute: Callable[[torch.Tensor], torch.Tensor] = lambda chosen: ids  # noqa: E731
    weight, chosen = route(layer, shape, x, reroute)
    scores = (x @ layer.router.t()).softmax(-1).gather(1, ids)
    assert torch.equal(chosen, ids)
    assert torch.allclose(weight, scores / scores.sum(-1, keepdim=True) if normalised else scores)
    assert torch.allclose(
        experts_loop(layer, shape, x, weight, chosen), experts_dense(layer, shape, x, weight, chosen), atol=2e-5
    )


def test_experts_that_the_router_shuns_still_get_finite_weights() -> None:
    shape = model_shape("tiny-moe")
    layer = seeded_weights(shape, 1, torch.float32, torch.device("cpu")).layers[0].mlp
    assert isinstance(layer, Experts)
    layer.router[2:] *= 0
    layer.router[2:] -= 1e3  # scores of all but two experts underflow to zero
    weight, _ = route(layer, shape, torch.ones(3, 128), lambda chosen: torch.tensor([[2, 5]]).expand(3, 2))
    assert torch.allclose(weight.sum(-1), torch.ones(3))


def test_what_was_recorded_is_what_is_visited(tmp_path: Path) -> None:
    engine = make_engine()
    engine.runner.routing = own = LoadRecorder(engine.runner.shape)
    engine.generate([[(11 * index) % 512 for index in range(100)]], 40)
    own.write(tmp_path / "load.json")
    again = recorded(make_engine(), RoutingControl("recorded", recorded="load.json"), root=tmp_path)
    for layer, counts in own.counts.items():
        assert sum(counts) > 0
        for mine, theirs in zip(counts, again.counts[layer], strict=True):
            assert mine / sum(counts) == pytest.approx(theirs / sum(again.counts[layer]), abs=0.04)


def test_one_row_serves_all_layers(tmp_path: Path) -> None:
    row = [5, 0, 1, 1, 1, 0, 2, 2]
    (tmp_path / "load.json").write_text(json.dumps({"schema": "kbench.expert_load/1", "layers": [row]}))
    found = recorded(make_engine(), RoutingControl("recorded", recorded="load.json"), root=tmp_path)
    for counts in found.counts.values():
        assert counts[1] == counts[5] == 0
        assert max(counts) == counts[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a load of experts"),
        ("[]", "not of the schema"),
        ('{"layers": [[1]]}', "not of the schema"),
        ('{"schema": "kbench.expert_load/1", "layers": 3}', "not of the schema"),
        ('{"schema": "kbench.expert_load/1", "layers": [[1], [1], [1]]}', "loads of 3 layers"),
        ('{"schema": "kbench.expert_load/1", "layers": [[1, 2]]}', "has 2 counts, the model 8 experts"),
        ('{"schema": "kbench.expert_load/1", "layers": [3]}', "has no list"),
        ('{"schema": "kbench.expert_load/1", "layers": [[1, 1, 1, 1, 1, 1, 1, -1]]}', "is -1, not a count"),
        ('{"schema": "kbench.expert_load/1", "layers": [[1, 1, 1, 1, 1, 1, 1, NaN]]}', "is nan, not a count"),
        ('{"schema": "kbench.expert_load/1", "layers": [[1, 1, 1, 1, 1, 1, 1, true]]}', "is True, not a count"),
    ],
)
def test_a_bad_file_of_loads_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "load.json").write_text(text)
    with pytest.raises(UsageError, match=r"load\.json") as caught:
        read_loads(tmp_path / "load.json", model_shape("tiny-moe"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_declared_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the load"):
        read_loads(tmp_path / "none.json", model_shape("tiny-moe"))
    with pytest.raises(UsageError, match="tiny has no experts"):
        control_routing(make_engine("tiny").runner, RoutingControl("balanced"), seed=1)
    with pytest.raises(UsageError, match="exponent"):
        RoutingControl("zipf", -1.0)
    with pytest.raises(UsageError, match="names no file"):
        RoutingControl("recorded")
    with pytest.raises(UsageError, match="reads no file"):
        RoutingControl("hot", recorded="load.json")
    with pytest.raises(UsageError, match="one of balanced"):
        RoutingControl("other")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="2 experts, 1 are visited"):
        visits_of([0, 3, 0], 2, "recorded")
    engine = make_engine(budget=8)
    control_routing(engine.runner, RoutingControl("balanced"), seed=1)
    with pytest.raises(UsageError, match="declared for 32 tokens"):
        engine.runner.routing(0, torch.zeros(33, 2, dtype=torch.int64))  # type: ignore[misc]


def test_a_declaration_says_itself() -> None:
    assert str(RoutingControl("balanced")) == "balanced"
    assert str(RoutingControl("zipf", 1.2)) == "zipf:1.2"
    assert str(RoutingControl("recorded", recorded="a.json")) == "recorded:a.json"
    shape: ModelShape = model_shape("qwen3-30b-a3b")
    assert declared_visits(RoutingControl("balanced"), shape.experts, shape.experts_per_token)[0] == 8 / 128
