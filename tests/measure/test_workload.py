"""The jobs of level 3 on invented costs: load, limits, replay, tables, calibration, divergence."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kbench.catalog import parse_point
from kbench.engine.core import EngineConfig
from kbench.engine.costs import CostTable, StepShape, default_grid, write_cost_rows
from kbench.errors import EvidenceError, MeasurementError, UsageError
from kbench.measure import load
from kbench.measure.calibration import calibration, divergence, near_knee
from kbench.measure.service import Limits
from kbench.measure.tables import read_requests
from kbench.measure.workload import calibrate_job, divergence_job, exec_job, setup_job, virtual_job
from kbench.protocol import Outcome, Reply, decode_reply, encode
from kbench.suite.schema import Arm, EngineSettings, ModelSettings, Slo
from kbench.targets.base import ReplayResult, RequestResult
from kbench.targets.virtual import replay_virtual
from kbench.traces.schema import RequestRow, Trace, TraceMeta, trace_from_rows, write_trace
from kbench.traces.synth import synthesise


def arm(name: str = "page16", page_size: int = 16, kv_tokens: int = 2_048) -> Arm:
    return Arm(
        name=name,
        model=ModelSettings(preset="tiny"),
        engine=EngineSettings(kv_tokens=kv_tokens, max_batched_tokens=64, max_seqs=8),
        prefill="sdpa",
        decode="blocked",
        page_size=page_size,
        layout="NHD",
        seed=1,
        root=".",
    )


def cost_rows(variant: str, slowness: float = 1.0) -> list[dict[str, Any]]:
    """Invented: 1 ms a step, 10 µs a token."""
    found = []
    for point in default_grid(64, 8, 512):
        shape = StepShape.of_point(parse_point(point))
        wall_ns = slowness * (1e6 + 1e4 * (shape.decode_seqs + shape.prefill_tokens))
        found.append({"variant": variant, "point": point, "wall_ns": wall_ns})
    return found


COSTS = CostTable.fit(cost_rows("invented"))
CONFIG = EngineConfig.from_arm(arm())


def shared(requests: int = 150) -> Trace:
    """Poisson arrivals, one question each, over three system prompts that are no multiple of a page."""
    draw, now, rows = random.Random(5), 0.0, []
    for number in range(requests):
        now += draw.expovariate(1 / 4_000)
        prompt, output, stem = 100 + draw.randrange(100), draw.randrange(2, 20), 70 + 5 * (number % 3)
        rows.append(RequestRow(number, prompt, output, arrival_us=int(now), shared_id=number % 3, shared_tokens=stem))
    return trace_from_rows(rows, TraceMeta(source="test", importer="test"))


def chat(requests: int = 150) -> Trace:
    return synthesise("chat", requests, 4, scale=0.05, max_context=200)


def uniform(count: int = 40, gap_us: int = 1_000, prompt: int = 64, output: int = 5) -> Trace:
    rows = [RequestRow(number, prompt, output, arrival_us=number * gap_us) for number in range(count)]
    return trace_from_rows(rows, TraceMeta(source="test", importer="test"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    trace_path, costs_path = tmp_path / "shared.parquet", tmp_path / "costs.parquet"
    write_trace(shared(), trace_path)
    write_cost_rows(cost_rows("page16") + cost_rows("page64", 1.5), costs_path)
    return trace_path, costs_path


# ------------------------------------------------------------------------------------ load and limits


def test_capacity_is_what_a_backlog_finishes() -> None:
    # One at a time: 1.64 ms of prompt and 4 decodes of 1.01 ms.
    single = EngineConfig(16, 64, 64, 1)
    assert load.backlog_capacity(uniform(), single, COSTS) == pytest.approx(1e3 / (1.64 + 4 * 1.01), rel=1e-3)
    eight = EngineConfig(16, 64, 64, 8)
    assert load.backlog_capacity(uniform(), eight, COSTS) > load.backlog_capacity(uniform(), single, COSTS)


def test_unloaded_medians_are_those_of_a_request_alone() -> None:
    alone = load.unloaded_medians(uniform(output=5), CONFIG, COSTS)
    result = replay_virtual(uniform(count=1), CONFIG, COSTS).requests[0]
    assert alone.ttft_us == pytest.approx(result.first_token_us - result.scheduled_us, rel=1e-6)
    assert alone.tpot_us == pytest.approx((result.finished_us - result.first_token_us) / 4, rel=1e-6)
    chunked = load.unloaded_medians(uniform(prompt=129), CONFIG, COSTS)
    assert chunked.ttft_us == pytest.approx(2 * 1_640 + 1_010, rel=1e-3)
    assert load.unloaded_medians(uniform(output=1), CONFIG, COSTS).tpot_us == math.inf


def test_limits_are_multiples_or_absolute() -> None:
    unloaded = Limits(100.0, 10.0)
    assert load.limits_of(Slo(ttft="5x", tpot="3x"), unloaded) == Limits(500.0, 30.0)
    assert load.limits_of(Slo(ttft_ms=2.0), unloaded) == Limits(2_000.0, math.inf)
    for limits in (Limits(500.0, 30.0), Limits(2_000.0, math.inf)):
        assert load.limits_from(load.plain_limits(limits)) == limits


def test_the_rate_of_a_trace_without_time_is_refused() -> None:
    assert load.recorded_rate(uniform(count=11, gap_us=100)) == pytest.approx(11_000)
    with pytest.raises(UsageError, match="arrive at once"):
        load.recorded_rate(uniform(gap_us=0))


def test_think_times_do_not_limit_the_capacity() -> None:
    assert load.backlog_capacity(chat(), CONFIG, COSTS) > 20 * load.recorded_rate(chat())


def test_the_head_of_a_trace_keeps_ids_and_parents() -> None:
    whole = chat()
    part = load.head(whole, 50)
    assert len(part) == 50
    assert [part.row(request) for request in (0, 49)] == [whole.row(request) for request in (0, 49)]
    assert load.head(whole, 10_000) is whole


def test_calibration_limits_come_from_the_baselines_real_slice() -> None:
    slice_ = [result(number, number, True) for number in range(20)]
    own = Limits(2_000.0)
    # Every request has a first token after 1,000 µs: no scale brings it between 0 and 1, the nearest side wins.
    assert near_knee(slice_, own)[1] >= 0.5
    spread = [replace(each, first_token_us=100.0 * (each.request_id + 1)) for each in slice_]
    limits, scale = near_knee(spread, Limits(200.0))
    assert load.attainment(spread, limits) == pytest.approx(0.8, abs=0.05)
    assert limits.ttft_us == pytest.approx(200.0 * scale)
    assert near_knee(spread, Limits(1_500.0)) == (Limits(1_500.0), 1.0)


def test_capacity_is_the_rate_that_still_serves_nine_tenths() -> None:
    limits = Limits(3 * 3_000.0)
    backlog = load.backlog_capacity(shared(), CONFIG, COSTS)
    served = load.service_capacity(shared(), CONFIG, COSTS, limits, backlog=backlog)
    assert served is not None
    for factor, serves in ((1.0, True), (1.3, False)):
        rate_scale = factor * served / load.recorded_rate(shared())
        requests = replay_virtual(shared(), CONFIG, COSTS, rate_scale=rate_scale).requests
        assert (load.attainment(requests, limits) >= 0.9) is serves
    assert load.service_capacity(shared(), CONFIG, COSTS, Limits(), backlog=backlog) is None


def test_costs_of_an_arm(tmp_path: Path) -> None:
    both, one = tmp_path / "both.parquet", tmp_path / "one.parquet"
    write_cost_rows(cost_rows("page16") + cost_rows("page64", 2.0), both)
    write_cost_rows(cost_rows("whatever", 3.0), one)
    shape = StepShape(1, 32)
    assert load.load_costs(both, arm("page64")).step_ns(shape) == pytest.approx(2 * 1.01e6, rel=1e-6)
    assert load.load_costs(one, arm("page64")).step_ns(shape) == pytest.approx(3 * 1.01e6, rel=1e-6)
    with pytest.raises(EvidenceError, match="it has page16, page64"):
        load.load_costs(both, arm("page128"))


# ----------------------------------------------------------------------------------------------- jobs


def through_the_pipe(outcome: Outcome) -> Outcome:
    """What a job returns must survive the worker's pipe, and its facts strict JSON."""
    json.dumps(outcome.facts, allow_nan=False)
    assert decode_reply(encode(Reply(1, outcome))).outcome == outcome
    return outcome


def test_setup_finds_load_and_limits(files: tuple[Path, Path]) -> None:
    facts = through_the_pipe(setup_job(*_args(files, "page16"), rate="0.5x", slo=Slo(ttft="5x", tpot="3x"))).facts
    assert facts["requests_per_s"] == pytest.approx(0.5 * facts["capacity_requests_per_s"])
    assert facts["rate_scale"] == pytest.approx(facts["requests_per_s"] / facts["recorded_requests_per_s"])
    assert facts["slo"]["ttft_us"] == pytest.approx(5 * facts["unloaded"]["ttft_us"])
    assert facts["slo"]["tpot_us"] == pytest.approx(3 * facts["unloaded"]["tpot_us"])
    assert facts["overloadable"] in (True, False)
    assert facts["costs"]["hold_out"]["median"] < 0.01
    absolute = setup_job(*_args(files, "page16"), requests_per_s=7.0, slo={"ttft": None, "ttft_ms": 3.0}).facts
    assert absolute["requests_per_s"] == 7.0
    assert absolute["slo"] == {"ttft_us": 3_000.0, "tpot_us": None}
    assert setup_job(*_args(files, "page16"), slo=Slo(ttft="5x")).facts["rate_scale"] == 1.0


def _args(files: tuple[Path, Path], name: str) -> tuple[Path, Arm, Path]:
    return files[0], arm(name, int(name.removeprefix("page"))), files[1]


SETTINGS: dict[str, Any] = {"rate_scale": 0.5, "slo": {"ttft_us": 12_000.0, "tpot_us": None}}


def test_a_virtual_replay_reports_every_segment_and_writes_its_tables(files: tuple[Path, Path], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    paths = {name: str(tmp_path / f"{name}.parquet") for name in ("requests", "steps", "kv")}
    outcome = through_the_pipe(
        virtual_job(*_args(files, "page16"), **SETTINGS, segments=5, warmup=0.1, paths=paths, trace_class="chat")
    )
    goodput = {each.segment: each.value for each in outcome.measurements if each.metric == "goodput"}
    assert sorted(goodput) == [-1, 0, 1, 2, 3, 4]
    facts = outcome.facts
    assert (facts["timing"], facts["segments"], facts["page_size"]) == ("modeled", 5, 16)
    assert sum(facts["classes"].values()) == facts["scheduled"] == 150 - facts["warmup_requests"]
    rows = pq.read_table(paths["requests"]).to_pylist()
    assert [row["request_id"] for row in rows] == list(range(150))
    assert {(row["variant"], row["mode"], row["trace"]) for row in rows} == {("page16", "virtual", "chat")}
    good = sum(row["class"] == "good" for row in rows if row["segment"] is not None)
    assert good / facts["scheduled"] == goodput[-1]
    kv = pq.read_table(paths["kv"]).to_pylist()
    assert all(row["in_use_pages"] + row["evictable_pages"] + row["blank_pages"] == row["pages"] for row in kv)
    assert len(pq.read_table(paths["steps"])) == len(kv) == facts["counters"]["steps"]
    assert sum(shape["calls"] for shape in facts["shapes"]) == facts["counters"]["steps"]
    assert sum(shape["time_us"] for shape in facts["shapes"]) == pytest.approx(facts["counters"]["busy_us"], rel=1e-6)


def test_a_slower_arm_serves_fewer(files: tuple[Path, Path]) -> None:
    baseline, candidate = (
        virtual_job(*_args(files, name), **SETTINGS, segments=5).facts["summary"] for name in ("page16", "page64")
    )
    assert candidate["goodput"] < baseline["goodput"]
    assert candidate["hit_ratio"] <= baseline["hit_ratio"]
    assert candidate["tail_waste"] > baseline["tail_waste"]


def test_an_unknown_table_is_refused(files: tuple[Path, Path]) -> None:
    with pytest.raises(MeasurementError, match="no table request"):
        virtual_job(*_args(files, "page16"), **SETTINGS, segments=2, paths={"request": "x"})


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the embedded target answer with a replay that was made elsewhere: no torch in these tests."""

    def play(slowness: float, said: Callable[[int], tuple[int, ...]]) -> None:
        def replay_exec(trace: Trace, arm: Arm, device: str, *, rate_scale: float, **_: Any) -> ReplayResult:
            made = replay_virtual(
                trace, EngineConfig.from_arm(arm), CostTable.fit(cost_rows("x", slowness)), rate_scale=rate_scale
            )
            requests = tuple(replace(each, output=said(each.request_id)) for each in made.requests)
            return replace(made, mode="exec", requests=requests, dispatch_lag_us=[3.0, 5.0])

        module = type("embedded", (), {"replay_exec": staticmethod(replay_exec)})
        monkeypatch.setitem(__import__("sys").modules, "kbench.targets.embedded", module)

    return play


def test_a_real_replay_is_calibrated_against_the_model(
    files: tuple[Path, Path], tmp_path: Path, played: Callable[..., None]
) -> None:
    trace_path, baseline, costs_path = _args(files, "page16")
    setup = setup_job(trace_path, baseline, costs_path, rate="1.2x", slo=Slo(ttft="3x"), exec_s=0.5).facts
    settings: dict[str, Any] = {"rate_scale": setup["rate_scale"], "slo": setup["slo"]}
    slice_: dict[str, Any] = {"max_requests": setup["slice_requests"]}
    path = tmp_path / "exec.parquet"
    for slowness in (1.0, 1.15):
        played(slowness, lambda request: (request, 1, 2))
        more: dict[str, Any] = {"costs_path": costs_path, "paths": {"requests": str(path)}}
        outcome = exec_job(trace_path, baseline, "cpu", **settings, **slice_, max_seconds=4.0, **more)
        through_the_pipe(outcome)
        assert outcome.facts["cost_scale"] == pytest.approx(slowness, rel=1e-4)
        assert (outcome.facts["mode"], outcome.facts["timing"]) == ("exec", "measured")
        assert {each.clock for each in outcome.measurements} == {"wall"}
        assert outcome.facts["summary"]["dispatch_lag_p99_us"] == 5.0
        facts = through_the_pipe(
            calibrate_job(
                trace_path, baseline, costs_path, **settings, **slice_, exec_requests=path, baseline_requests=path
            )
        ).facts
        assert 0.6 <= facts["exec_attainment"] <= 0.95
        if slowness == 1.0:
            assert (facts["bias"], facts["half_width"], facts["discordant"]) == (0.0, 0.0, 0)
        else:
            assert facts["bias"] > 0  # the model is too fast
            assert facts["ttft_p50_bias"] < 0
            assert facts["half_width"] > 0
            scale = outcome.facts["cost_scale"]
            scaled = calibrate_job(
                trace_path,
                baseline,
                costs_path,
                **settings,
                **slice_,
                exec_requests=path,
                baseline_requests=path,
                cost_scale=scale,
            ).facts
            assert abs(scaled["bias"]) < facts["bias"] / 2
            assert setup_job(trace_path, baseline, costs_path, slo=Slo(ttft="3x"), cost_scale=scale).facts[
                "backlog_requests_per_s"
            ] == pytest.approx(setup["backlog_requests_per_s"] / slowness, rel=0.01)


def test_divergence_of_two_replays(files: tuple[Path, Path], tmp_path: Path, played: Callable[..., None]) -> None:
    trace_path, baseline, _ = _args(files, "page16")
    parts = []
    for name, third in (("a", 3), ("b", 9)):
        played(1.0, lambda request, third=third: (1, 2, third if request % 2 else 3, 4))
        parts.append(tmp_path / f"{name}.parquet")
        paths = {"requests": str(parts[-1])}
        exec_job(trace_path, baseline, "cpu", **SETTINGS, max_seconds=1.0, max_requests=20, paths=paths)
    assert read_requests(parts[0])[3].output == (1, 2, 3, 4)
    outcome = through_the_pipe(divergence_job(*parts))
    assert {each.segment: each.value for each in outcome.measurements} == {
        request: 0.5 if request % 2 else 0.0 for request in range(20)
    }
    assert outcome.facts == {"requests": 20, "mean": 0.25, "identical": 10}
    with pytest.raises(MeasurementError, match="not a table of requests"):
        divergence_job(parts[0], tmp_path / "missing.parquet")


# --------------------------------------------------------------------------------------- pure helpers


def test_divergence_counts_from_the_first_difference() -> None:
    a = {1: (5, 6, 7, 8), 2: (1,), 3: (), 4: (1, 2), 5: (1, 2)}
    b = {1: (5, 6, 9, 8), 2: (2,), 3: (), 4: (1, 2, 3, 4), 6: (1,)}
    assert divergence(a, b) == {1: 0.5, 2: 1.0, 4: 0.5}


def result(number: int, session: int, good: bool) -> RequestResult:
    first = 1_000.0 if good else 9_000.0
    return RequestResult(number, session, 0, "finished", 0.0, 0.0, first, first + 100.0, 10, 2, 0, 0, 0, 0)


def test_the_interval_of_the_bias_is_students_for_single_shots() -> None:
    """With one request a session the cluster interval is the plain t interval of the differences."""
    from scipy import stats

    real = [result(number, number, number % 4 != 0) for number in range(20)]
    model = [result(number, number, number % 4 != 0 or number in (0, 4, 8)) for number in range(20)]
    found = calibration(real, model, Limits(2_000.0))
    differences = [1.0 if number in (0, 4, 8) else 0.0 for number in range(20)]
    low, high = stats.t.interval(0.95, 19, loc=0.15, scale=stats.sem(differences))
    assert found.bias == pytest.approx(0.15)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert (found.exec_attainment, found.virtual_attainment) == (0.75, 0.9)
    assert (found.discordant, found.sessions, found.usable) == (3, 20, True)
    assert found.tpot_p50_bias == 0.0


def test_requests_of_a_session_are_not_independent() -> None:
    def both(sessions: Callable[[int], int]) -> float:
        real = [result(number, sessions(number), number >= 6) for number in range(24)]
        model = [result(number, sessions(number), number >= 3) for number in range(24)]
        return calibration(real, model, Limits(2_000.0)).half_width

    assert both(lambda number: number // 3) > 1.3 * both(lambda number: number)


@pytest.mark.parametrize(("share", "usable"), [(0.55, False), (0.6, True), (0.95, True), (1.0, False)])
def test_a_calibration_away_from_the_knee_is_not_usable(share: float, usable: bool) -> None:
    requests = [result(number, number, number < share * 20) for number in range(20)]
    assert calibration(requests, requests, Limits(2_000.0)).usable is usable


def test_a_calibration_of_one_session_says_nothing() -> None:
    requests = [result(number, 0, number < 8) for number in range(10)]
    found = calibration(requests, requests, Limits(2_000.0))
    assert (found.half_width, found.usable) == (math.inf, False)


def test_a_calibration_leaves_out_what_the_real_replay_did_not_come_to() -> None:
    requests = [result(number, number, number < 8) for number in range(10)]
    cut_short = [replace(each, status="not_sent") if each.request_id == 9 else each for each in requests]
    found = calibration(cut_short, requests, Limits(2_000.0))
    assert (found.requests, found.bias, found.exec_attainment) == (9, 0.0, 8 / 9)


def test_replays_of_different_requests_are_not_compared() -> None:
    with pytest.raises(MeasurementError, match="not of the same requests"):
        calibration([result(0, 0, True)], [result(1, 0, True)], Limits())
