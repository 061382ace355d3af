"""Window, soft cap, sinks and the log-sum-exp: the oracle against torch, the null models, the cost, the inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kbench.catalog import implementation, parse_point, parse_shape, resolve_shape
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV, cost, oracle_lse, sequence_kv
from kbench.ops.base import InputSettings
from kbench.ops.correctness import judge, null_report, standard
from kbench.ops.inputs import build, edge_cases, with_sinks
from kbench.ops.registry import load_op
from kbench.selection import Query, check

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 32)


def settings(dtype: torch.dtype = torch.float32) -> InputSettings:
    return InputSettings(16, "NHD", dtype, CPU, 5)


def scores_of(q: Tensor, keys: Tensor, spec: AttentionSpec) -> Tensor:
    """float64 `[heads, queries, keys]` with what is hidden at -inf, by the definition in words."""
    queries, length = q.shape[0], keys.shape[0]
    keys = keys.double().repeat_interleave(spec.group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / spec.head_dim**0.5
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position = torch.arange(length - queries, length)[:, None]
    key = torch.arange(length)[None]
    hidden = key > position
    if spec.window:
        hidden |= key <= position - spec.window
    return scores.masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize("point", ["2*1@127", "2*5@77+1*40"])
@pytest.mark.parametrize("window", [0, 1, 16, 33, 5_000])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (20.0, False), (0.0, True), (5.0, True)])
def test_the_oracle_is_torchs_softmax(point: str, window: int, softcap: float, sinks: bool) -> None:
    spec = replace(SPEC, window=window, softcap=softcap)
    spec = with_sinks(spec, 127, settings()) if sinks else spec
    inputs = build(parse_point(point), spec, settings())
    answer, lse = oracle_lse(inputs.q, inputs.kv, inputs.batch, spec)
    for index, (row, query_len, kv_len) in enumerate(inputs.batch.spans()):
        keys, values = sequence_kv(inputs.kv, inputs.batch, index, kv_len)
        rows = slice(row, row + query_len)
        scores = scores_of(inputs.q[rows], keys, spec)
        if spec.sinks is not None:
            column = spec.sinks.double()[:, None, None].expand(-1, query_len, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = F.softmax(scores, dim=-1)[..., :kv_len]
        wanted = torch.einsum("hqk,khd->qhd", weights, values.double().repeat_interleave(spec.group, dim=1))
        torch.testing.assert_close(answer[rows], wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(lse[rows], torch.logsumexp(scores, dim=-1).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("point", ["1*1@127", "1*1@4096", "1*9@300+1*70"])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "models"),
    [
        (40, 0.0, False, {"window one long", "window one short"}),
        (0, 30.0, False, {"softcap left out"}),
        (0, 0.0, True, {"sinks left out"}),
        (40, 50.0, True, {"window one long", "window one short", "softcap left out", "sinks left out"}),
    ],
)
def test_a_feature_left_out_or_off_by_one_is_rejected(
    point: str, dtype: torch.dtype, window: int, softcap: float, sinks: bool, models: set[str]
) -> None:
    spec = replace(SPEC, window=window, softcap=softcap)
    where = parse_point(point)
    spec = with_sinks(spec, where.context, settings(dtype)) if sinks else spec
    kinds = ("random", "needle")
    report = null_report(tuple(standard(build(where, spec, settings(dtype), kind)) for kind in kinds))  # type: ignore[arg-type]
    assert models <= set(report.killed) and not report.survived


def test_plain_attention_asks_nothing_about_features() -> None:
    report = null_report((standard(build(parse_point("1*1@127"), SPEC, settings())),))
    assert not {"window one long", "softcap left out", "sinks left out", "lse in base 2"} & set(report.killed)


def test_a_row_without_keys_is_zero_with_the_sink_alone_as_its_mass() -> None:
    pool = torch.full((2, 16, 2, 32), float("nan"))
    batch = AttentionBatch.build([1], [0], [[]], CPU)
    q = torch.randn(1, 4, 32)
    answer, lse = oracle_lse(q, PagedKV(pool, pool, 16, "NHD"), batch, SPEC)
    assert not bool(answer.any()) and bool((lse == float("-inf")).all())
    sinks = torch.arange(4.0)
    answer, lse = oracle_lse(q, PagedKV(pool, pool, 16, "NHD"), batch, replace(SPEC, sinks=sinks))
    assert not bool(answer.any()) and torch.equal(lse, sinks.double()[None])


def test_the_log_sum_exp_is_judged_with_its_base_and_its_infinities() -> None:
    spec = replace(SPEC, lse=True)
    own = standard(build(parse_point("2*1@50"), spec, settings(), padding=1))
    assert own.lse is not None and bool((own.lse[2] == float("-inf")).all())
    output, lse = own.expected.float(), own.lse.float()
    assert judge((output, lse), own).ok
    assert "natural" in judge((output, lse * 1.4426950408889634), own).problem
    assert "pair" in judge(output, own).problem
    assert "-inf" in judge((output, torch.nan_to_num(lse, neginf=-1e30)), own).problem
    assert "log-sum-exp: returned dtype" in judge((output, lse.double()), own).problem
    assert "lse in base 2" in null_report((own, own)).killed


@pytest.mark.parametrize("window", [1, 7, 64])
def test_cost_counts_what_is_seen(window: int) -> None:
    spec = replace(SPEC, window=window)
    for query_len, kv_len in ((1, 50), (5, 50), (50, 50), (3, 3)):
        batch = AttentionBatch.build([query_len], [kv_len], [[1]], CPU)
        seen = [[max(0, p + 1 - window) <= k <= p for k in range(kv_len)] for p in range(kv_len - query_len, kv_len)]
        pairs, keys = sum(map(sum, seen)), sum(map(any, zip(*seen, strict=True)))
        own = cost(batch, spec, 2)
        assert own.flops == 4 * pairs * 4 * 32
        assert own.bytes_read == (query_len * 4 * 32 + 2 * keys * 2 * 32) * 2


def test_rising_scores_move_the_maximum_in_every_tile() -> None:
    inputs = build(parse_point("1*1@2083"), SPEC, settings(torch.bfloat16), "rising")
    keys, _ = sequence_kv(inputs.kv, inputs.batch, 0, 2_083)
    scores = scores_of(inputs.q, keys, SPEC)[:, 0]
    peaks = torch.stack([tile.amax(dim=1) for tile in scores[:, :2_080].split(32, dim=1)], dim=1)
    assert bool((peaks.diff(dim=1) > 0).float().mean() > 0.95)
    assert float((scores[:, -1] - scores[:, 0]).min()) > 20


def test_a_kernel_that_forgets_to_rescale_fails_where_scores_rise_only() -> None:
    """Online softmax that keeps old sums as they are when the maximum moves."""

    def forgetful(kind: str) -> float:
        own = standard(build(parse_point("1*1@517"), AttentionSpec(2, 1, 16), settings(), kind))  # type: ignore[arg-type]
        keys, values = sequence_kv(own.inputs.kv, own.inputs.batch, 0, 517)
        scores = scores_of(own.inputs.q, keys, own.inputs.spec)[:, 0]
        total, mixed = torch.zeros(2, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.float64)
        peak = torch.full((2,), float("-inf"), dtype=torch.float64)
        for start in range(0, 517, 32):
            tile = scores[:, start : start + 32]
            peak = torch.maximum(peak, tile.amax(dim=1))
            weights = torch.exp(tile - peak[:, None])
            total += weights.sum(dim=1)
            mixed += weights @ values[start : start + 32, 0].double()
        answer = (mixed / total[:, None])[None].float()
        return judge(answer, own).rel_l2

    assert forgetful("rising") > 0.5


def test_edges_of_a_window_are_there_only_with_a_window() -> None:
    shape = resolve_shape("attention.decode", parse_shape("2*1@40,q_heads=4,kv_heads=2,head_dim=16,window=24"), None)
    names = {edge.name for edge in load_op("attention.decode").edges(shape, settings())}
    assert {"window of one key", "window beyond the context", "padding rows without keys", "rising scores"} <= names
    assert not any("window" in case.name for case in edge_cases("attention.decode", 16))
    assert any("prefix" in case.name for case in edge_cases("attention.prefill", 16))


def test_who_lacks_a_feature_or_a_mask_is_rejected_with_the_reason() -> None:
    query = Query("attention.decode", "cpu", "float32", 16, "NHD", 4, 2, 32, features=("window", "sinks"))
    said = [str(reason) for reason in check(implementation("sdpa-gather"), query)]
    assert said == ["feature: wants window, has none", "feature: wants sinks, has none"]
    assert not check(implementation("reference"), query)
    sparse = replace(query, features=(), mask="block-sparse")
    assert [str(reason) for reason in check(implementation("reference"), sparse)] == [
        "mask: wants block-sparse, has causal"
    ]
