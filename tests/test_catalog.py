"""The grammars of points and cases round trip, and the catalogue names only what exists."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench import catalog
from kbench.catalog import Case, Group, Implementation, Point, Registry, parse_point
from kbench.errors import UsageError


@st.composite
def groups(draw: st.DrawFn) -> Group:
    query = draw(st.integers(1, 9_999))
    return Group(draw(st.integers(1, catalog.MAX_SEQUENCES)), query, draw(st.integers(query, catalog.MAX_CONTEXT)))


points = st.lists(groups(), min_size=1, max_size=4).map(lambda found: Point(tuple(found)))
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@given(points)
def test_a_point_round_trips(point: Point) -> None:
    assert parse_point(str(point)) == point
    assert str(parse_point(str(point))) == str(point)


@given(st.lists(groups(), min_size=1, max_size=3), st.data())
def test_every_spelling_of_a_point_is_the_same_point(found: list[Group], data: st.DataObject) -> None:
    def spelling(group: Group) -> str:
        counts = ["", f"{group.count}*"] if group.count == 1 else [f"{group.count}*"]
        kvs = ["", f"@{group.kv_tokens}"] if group.kv_tokens == group.query_tokens else [f"@{group.kv_tokens}"]
        space = data.draw(st.sampled_from(["", " "]))
        return data.draw(st.sampled_from(counts)) + str(group.query_tokens) + data.draw(st.sampled_from(kvs)) + space

    assert parse_point("+".join(map(spelling, found))) == Point(tuple(found))


@given(st.lists(groups().map(lambda group: replace(group, count=group.count % 50 + 1)), min_size=1, max_size=3))
def test_a_points_sums_are_those_of_its_sequences(found: list[Group]) -> None:
    point = Point(tuple(found))
    assert point.batch == len(point.sequences)
    assert point.query_tokens == sum(query for query, _ in point.sequences)
    assert point.kv_tokens == sum(kv for _, kv in point.sequences)
    assert point.context == max(kv for _, kv in point.sequences)
    assert point.is_decode == all(query == 1 for query, _ in point.sequences)


@given(st.text(st.sampled_from("0123456789*@+ -.ax²٣"), max_size=12))
def test_text_is_a_point_or_one_clear_line(text: str) -> None:
    try:
        point = parse_point(text)
    except UsageError as error:
        assert len(error.problems) == 1 and error.problems[0].remedy
    else:
        assert parse_point(str(point)) == point


NO_BATCH = ["", "+", "1*", "*1", "0*1", "0", "1@0", "5@4", "1*1@", "1**1", "-1", "1.5", "65537*1", "1@16777217"]


@pytest.mark.parametrize("text", [*NO_BATCH, "١", "1\n", "9" * 5_000], ids=lambda text: text[:12])
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="point"):
        parse_point(text)


@given(
    st.sampled_from(catalog.LEVELS),
    names,
    names,
    st.one_of(names, points.map(str)),
    st.lists(st.tuples(names, names), max_size=3).map(tuple),
)
def test_a_case_id_round_trips(
    level: str, op: str, model: str, point: str, attributes: tuple[tuple[str, str], ...]
) -> None:
    case = Case(level, op, model, point, attributes)
    assert Case.parse(str(case)) == case


@pytest.mark.parametrize(
    "text", ["", "kernel", "kernel/a/b", "kernel/a/b/c/d", "magic/a/b/1", "kernel/a/b/1;x", "kernel/a/b/1;"]
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a case"):
        Case.parse(text)


def test_operations_apply_to_points() -> None:
    decode, prefill, mixed = (parse_point(text) for text in ("32*1@64", "2*64", "1*1@64+1*64"))
    assert [catalog.op_applies("attention.decode", point) for point in (decode, prefill, mixed)] == [True, False, False]
    assert [catalog.op_applies("attention.prefill", point) for point in (decode, prefill, mixed)] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("found", catalog.implementations(), ids=lambda found: found.name)
def test_every_entry_names_a_module_that_exists(found: Implementation) -> None:
    module, _, attribute = found.entry.partition(":")
    assert attribute
    package, _, _ = module.rpartition(".")
    assert importlib.util.find_spec(package) is not None
    assert importlib.util.find_spec(module) is not None
    assert set(found.ops) <= set(catalog.OPS)
    assert set(found.dtypes) <= set(catalog.DTYPES) and set(found.layouts) <= set(catalog.LAYOUTS)


@pytest.mark.parametrize("name", catalog.MODELS)
def test_every_model_is_a_shape(name: str) -> None:
    shape = catalog.model_shape(name)
    assert shape.q_heads % shape.kv_heads == 0
    assert shape.source
    assert shape.with_layers(None) == shape
    assert shape.with_layers(1).layers == 1
    assert (shape.experts == 0) == (shape.experts_per_token == 0) == (shape.expert_intermediate == 0)


def test_the_cache_of_a_known_model() -> None:
    # 2 × 32 layers × 8 heads × 128 elements × 2 bytes: the 128 KiB a token that everyone quotes for Llama-3-8B.
    assert catalog.model_shape("llama-3-8b").kv_bytes_per_token(2) == 131_072


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no model preset 'gpt'.*tiny"):
        catalog.model_shape("gpt")
    with pytest.raises(UsageError, match=r"no implementation 'magic' of attention.decode.*sdpa-gather"):
        catalog.implementation("magic", "attention.decode")
    with pytest.raises(UsageError, match=r"no implementation 'sdpa' of attention.decode"):
        catalog.implementation("sdpa", "attention.decode")


def test_registering_makes_another_registry_and_leaves_the_first_alone() -> None:
    first = catalog.registry()
    mine = Implementation("mine", ("attention.decode",), "mine:fn", "")
    second = first.registered(mine)
    assert mine in second.of("attention.decode") and mine not in second.of("attention.prefill")
    assert first.find("mine", "attention.decode") is None
    with pytest.raises(UsageError, match="registered already"):
        second.registered(mine)
    third = second.registered(replace(mine, ops=("attention.prefill",)), override=True)
    assert {op for op in catalog.OPS if third.find("mine", op)} == {"attention.decode", "attention.prefill"}
    for ops in ((), ("attention.sideways",)):
        with pytest.raises(UsageError, match="unknown op"):
            first.registered(Implementation("other", ops, "mine:fn", ""))
    with pytest.raises(UsageError, match="registered already"):
        Registry([mine, mine])
    with pytest.raises(UsageError, match="cannot be named 'auto'"):
        first.registered(replace(mine, name="auto"))


def test_an_override_is_for_its_operation_alone_and_keeps_its_place() -> None:
    shipped = catalog.registry()
    mine = Implementation("sdpa-flash", ("attention.decode",), "mine:fn", "", priority=1)
    with pytest.raises(UsageError, match="registered already"):
        shipped.registered(mine)
    own = shipped.registered(mine, override=True)
    assert own.get("sdpa-flash", "attention.decode").entry == "mine:fn"
    assert own.get("sdpa-flash", "attention.prefill") == shipped.get("sdpa-flash", "attention.prefill")

    def order(known: Registry) -> list[str]:
        return [item.name for item in known.in_order("attention.decode")]

    assert sorted(order(own)) == sorted(order(shipped))
    priority = shipped.get("sdpa-flash").priority
    assert own.get("sdpa-flash", "attention.decode").priority == priority != 1


def test_auto_never_takes_a_reference_and_the_slot_is_empty() -> None:
    for op in catalog.OPS:
        listed = catalog.registry().in_order(op)
        assert not any(item.name.startswith("reference") for item in listed)
        assert [item.priority for item in listed] == sorted((item.priority for item in listed), reverse=True)
    with pytest.raises(UsageError, match=r"the slot 'custom' of gemm is empty \(fill it: register"):
        catalog.implementation("custom", "gemm")


PARAMETERS_B = {
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-3-8b": 8.030,
    "llama-3-70b": 70.55,
    "llama-3.1-405b": 405.9,
    "mistral-7b": 7.248,
    "qwen2.5-7b": 7.616,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.6,
    "phi-4": 14.66,
    "phi-3-mini": 3.821,
    "gemma-2-9b": 9.242,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.8,
}
"""Billions of parameters as their model cards state them: a wrong width shows here."""


@pytest.mark.parametrize("name", PARAMETERS_B)
def test_the_shape_of_a_preset_adds_up_to_its_published_size(name: str) -> None:
    shape = catalog.model_shape(name)
    attention = shape.hidden * (2 * shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    feed = shape.experts or 1
    width = shape.expert_intermediate if shape.experts else shape.intermediate
    layer = attention + 3 * feed * shape.hidden * width + shape.experts * shape.hidden
    total = shape.layers * layer + shape.vocab * shape.hidden * (1 if shape.tied_embeddings else 2)
    assert total / 1e9 == pytest.approx(PARAMETERS_B[name], rel=0.003)


def test_every_number_of_a_preset_has_a_source() -> None:
    from dataclasses import fields

    from kbench.catalog.field_sources import field_sources

    plain = ("name", "foreign", "family", "source")
    for shape in catalog.MODELS.values():
        found = field_sources(shape)
        for field in fields(shape):
            if field.name not in plain and getattr(shape, field.name) != field.default:
                assert found[field.name], (shape.name, field.name)
        if not shape.source.startswith("kbench"):
            repository = shape.source.split()[0].rstrip(",;")
            assert found["layers"].startswith(f"{repository} config.json: num_hidden_layers")
            assert set(found) >= {"layers", "hidden", "q_heads", "kv_heads", "head_dim", "intermediate", "vocab"}
    assert field_sources(catalog.MODELS["qwen3-8b"])["qk_norm"].endswith("the architecture's code in transformers")
    assert field_sources(catalog.MODELS["llama-3-8b"])["max_context"].startswith("kbench: ")
    assert field_sources(catalog.MODELS["mistral-7b"])["max_context"].endswith("max_position_embeddings")
    assert field_sources(catalog.MODELS["kimi-k2"])["intermediate"].endswith("(one source only)")
    assert set(field_sources(catalog.MODELS["tiny"]).values()) == {"kbench"}
