"""The JSON documents: keys that programs rely on, and numbers against scipy and plain arithmetic."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from kbench.report.estimates import Estimates
from kbench.report.grids import Grid
from kbench.report.launch_grid import cost_grid, launch_grid
from kbench.report.views import kernel_view, step_view, timeline_view, workload_view
from kbench.suite.schema import Suite
from kbench.timeline import analyse

from .conftest import KERNEL, NEW, OLD, POINT, STEP, Bench, full_bench


def strict(document: Any) -> None:
    """JSON without NaN and infinity."""
    assert json.loads(json.dumps(document, allow_nan=False)) == json.loads(json.dumps(document))


def test_kernel_keys_are_the_contract(suite: Suite) -> None:
    view = kernel_view(suite, [full_bench().run()])
    strict(view)
    case = view["cases"][0]
    assert {"case", "point", "op", "variant", "status", "latency_us", "flags", "correctness"} <= set(case)
    assert case["case"] == KERNEL and case["point"] == POINT and case["op"] == "attention.decode"
    assert set(case["latency_us"]) == {"median", "low", "high", "sessions"}
    assert case["correctness"]["null_models_killed"] == 5
    comparison = view["comparisons"][0]
    assert comparison["case"] == KERNEL
    assert comparison["verdict"] == "faster"
    assert comparison["ratio"]["point"] == pytest.approx(0.75)


def test_latency_is_t_over_the_sessions_medians(suite: Suite) -> None:
    from scipy import stats

    rng = np.random.default_rng(3)
    values = [list(rng.lognormal(4.0, 0.1, 11)) for _ in range(6)]
    run = Bench().windows(KERNEL, OLD, "latency", values).ended(KERNEL, OLD).run()
    found = kernel_view(suite, [run])["cases"][0]["latency_us"]
    medians = [float(np.median(row)) for row in values]
    low, high = stats.t.interval(0.95, 5, np.mean(medians), stats.sem(medians))
    assert found["median"] == pytest.approx(np.mean(medians))
    assert (found["low"], found["high"]) == (pytest.approx(low), pytest.approx(high))
    assert found["sessions"] == 6


def test_one_session_has_no_interval(suite: Suite) -> None:
    run = Bench(sessions=1).windows(KERNEL, OLD, "latency", [[1.0, 2.0, 3.0]]).ended(KERNEL, OLD).run()
    found = kernel_view(suite, [run])["cases"][0]["latency_us"]
    assert found == {"median": 2.0, "low": None, "high": None, "sessions": 1}


def test_partial_sessions_are_left_out_and_sessions_of_runs_are_distinct(suite: Suite) -> None:
    rows = [[10.0, 10.0], [99.0, 99.0], [12.0, 12.0]]
    first = Bench("a", 3, partial=(1,)).windows(KERNEL, OLD, "latency", rows).ended(KERNEL, OLD).run()
    second = Bench("b", 1).windows(KERNEL, OLD, "latency", [[14.0, 14.0]]).ended(KERNEL, OLD).run()
    found = kernel_view(suite, [second, first])["cases"][0]["latency_us"]
    assert found["sessions"] == 3
    assert found["median"] == pytest.approx(12.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_spoils_its_cell_visibly(suite: Suite, bad: float) -> None:
    run = Bench(sessions=2).windows(KERNEL, OLD, "latency", [[1.0, bad], [1.0, 1.0]]).ended(KERNEL, OLD).run()
    case = kernel_view(suite, [run])["cases"][0]
    strict(case)
    assert case["latency_us"]["median"] is None
    assert "UNUSABLE_SAMPLES" in case["flags"]
    assert case["status"] != "ok"


def test_one_failed_session_is_not_hidden_by_good_ones(suite: Suite) -> None:
    bench = Bench().windows(KERNEL, NEW, "latency", [[1.0, 1.0]] * 6)
    for session in range(6):
        status = "incorrect" if session == 2 else "ok"
        error = {"rel_l2": 1e-3 if session == 2 else 1e-8, "limit": 1e-6, "null_models_killed": 4 + (session != 2)}
        bench.ended(KERNEL, NEW, status, session, message="row 3", facts={"correctness": error, "flags": ["THROTTLED"]})
    case = kernel_view(suite, [bench.run()])["cases"][0]
    assert (case["status"], case["message"]) == ("incorrect", "row 3")
    assert case["correctness"] == {"rel_l2": 1e-3, "limit": 1e-6, "null_models_killed": 4}
    assert case["flags"] == ["THROTTLED"]


def test_a_crash_without_samples_still_has_its_row(suite: Suite) -> None:
    run = Bench(partial=(0,)).ended(KERNEL, NEW, "crashed", message="signal 11").run()
    case = kernel_view(suite, [run])["cases"][0]
    assert case["status"] == "crashed"
    assert case["latency_us"] == {"median": None, "low": None, "high": None, "sessions": 0}
    assert case["correctness"] is None


def test_step_keys_are_the_contract(suite: Suite) -> None:
    view = step_view(suite, [full_bench().run()])
    strict(view)
    case = view["cases"][0]
    assert {"case", "point", "variant", "wall_us", "device_us", "phases", "closure", "selection"} <= set(case)
    assert case["status"] == "ok"
    assert case["case"] == STEP
    assert case["closure"] == pytest.approx(0.99, abs=1e-3)
    assert case["device_us"] is None
    assert case["phases"]["attention"] == pytest.approx(400, rel=1e-3)
    assert case["selection"]["decode"]["resolved"] == OLD
    fall = view["waterfalls"][0]
    total = fall["baseline_us"] + fall["residual_us"] + sum(term["delta_us"] or 0 for term in fall["terms"])
    assert total == pytest.approx(fall["candidate_us"])


def test_a_step_shows_how_it_was_launched_and_a_cost_grid_its_error(suite: Suite) -> None:
    costs = "step/costs/tiny/grid"
    rows = [{"variant": OLD, "point": f"{n}*1@{kv}", "wall_ns": 1e6 + 2e4 * n + 3 * n * kv, "session": 0}
            for n in (1, 2, 4, 8, 16) for kv in (64, 256, 1_024)]  # fmt: skip
    bench = full_bench()
    facts = {"graph": "padded", "graph_reason": "", "padded_tokens": 3}
    for session in range(6):
        bench.ended(STEP, OLD, "ok", session, facts=facts)
    bench.ended(costs, OLD, "ok", 0, facts={"rows": rows}).ended(costs, NEW, "ok", 0, facts={"rows": rows[:2]})
    view = step_view(suite, [bench.run()])
    strict(view)
    assert view["cases"][0] | facts == view["cases"][0]
    own, other = view["costs"]
    assert (own["variant"], own["points"]) == (OLD, 15)
    assert 0 <= own["inside_median_error"] <= own["worst_error"] < 0.05
    assert (other["points"], other["median_error"]) == (2, None)
    text = render(launch_grid({"cases": [{**view["cases"][0], "overlapped_us": 90.0}]}))
    assert "padded" in text and "90.0" in text
    assert "15" in render(cost_grid(view))


def render(grid: Grid) -> str:
    return " ".join(" ".join(str(cell) for cell in row) for row in grid.rows)


def test_closure_is_null_only_where_the_status_is_not_ok(suite: Suite) -> None:
    run = Bench().windows(STEP, OLD, "step_time", [[5.0, 5.0]] * 6).ended(STEP, OLD).run()
    case = step_view(suite, [run])["cases"][0]
    assert case["closure"] is None
    assert case["status"] == "incomplete"


def test_workload_keys_are_the_contract(suite: Suite) -> None:
    view = workload_view(suite, [full_bench().run()])
    strict(view)
    assert set(view["variants"]) == {OLD, NEW}
    found = view["variants"][OLD]
    assert set(found["classes"]) == {
        "not_sent", "good", "late", "failed", "cancelled", "rejected", "unfinished",
    }  # fmt: skip
    assert found["scheduled"] == 400
    assert sum(found["classes"].values()) == found["scheduled"]
    assert found["regimes"]["long-context"]["goodput"] == pytest.approx(0.99)
    assert view["mode"] == "virtual" and view["timing"] == "modeled"
    assert view["calibrations"][0]["usable"] is True


def test_several_traces_of_a_regime_are_joined_only_where_that_is_possible(suite: Suite) -> None:
    metrics = workload_view(suite, [full_bench().run()])["variants"][OLD]["regimes"]["everything"]
    assert metrics["goodput"] == pytest.approx((297 + 97) / 400)
    assert metrics["recomputed_tokens"] == 14
    assert metrics["ttft_p99"] is None


def test_a_regime_lacks_where_one_of_its_traces_was_not_replayed(suite: Suite) -> None:
    bench = full_bench()
    bench.trials = [trial for trial in bench.trials if "/chat;" not in trial.case]
    regimes = workload_view(suite, [bench.run()])["variants"][OLD]["regimes"]
    assert set(regimes) == {"long-context"}


def test_the_newest_replay_counts_and_other_modes_stay_apart(suite: Suite) -> None:
    older, newer = full_bench(name="a").run(), full_bench(name="b").run()
    assert workload_view(suite, [newer, older])["variants"][OLD]["scheduled"] == 400
    without = full_bench()
    without.trials = [trial for trial in without.trials if "mode=virtual" not in trial.case]
    view = workload_view(suite, [without.run()])
    assert (view["mode"], view["timing"], view["variants"][OLD]["scheduled"]) == ("exec", "measured", 18)


def test_nothing_measured_is_an_empty_document(suite: Suite) -> None:
    run = Bench().run()
    for view in (kernel_view, step_view, timeline_view, workload_view):
        strict(view(suite, [run]))
        strict(view(suite, []))
        strict(view(None, [run]))
    assert kernel_view(suite, [run]) == {"cases": [], "comparisons": [], "summary": None}


def op(name: str, begin: float, end: float, cat: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": end - begin, "args": {}}


def level_0(point: str, attention_us: float) -> dict[str, Any]:
    events = [op(f"kbench.step {point}", 0, 100, "user_annotation"), op("aten::mm", attention_us, 100)]
    events.append(op("aten::scaled_dot_product_attention", 0, attention_us))
    return analyse({"traceEvents": events}, expected_saving=0.2)


def test_timeline_is_the_analysis_of_the_runs_trace(suite: Suite) -> None:
    document = level_0(POINT, 40)
    run = Bench().ended("timeline/step/tiny/all", OLD, facts={"steps": 3, "analysis": document}).run()
    view = timeline_view(suite, [run])
    strict(view)
    assert view["classes"]["attention"] == {"us": 40, "share": 0.4}
    assert view["limit"] == document["limit"]
    assert view["largest_saving_us"] == pytest.approx(8)
    assert [point["point"] for point in view["points"]] == [POINT]


def test_several_points_are_joined_by_their_time(suite: Suite) -> None:
    bench = Bench().ended("timeline/step/tiny/1*1@127", OLD, facts=level_0("1*1@127", 10))
    bench.ended(f"timeline/step/tiny/{POINT}", OLD, facts=level_0(POINT, 50))
    view = timeline_view(suite, [bench.run()])
    assert view["steps"] == 2
    assert view["classes"]["attention"]["share"] == pytest.approx(0.3)
    assert view["largest_saving_us"] == pytest.approx(0.2 * 30)
    assert sum(item["share"] for item in view["classes"].values()) == pytest.approx(1)


def test_a_failed_timeline_says_so(suite: Suite) -> None:
    run = Bench().ended("timeline/step/tiny/all", OLD, "failed", message="no kernel").run()
    view = timeline_view(suite, [run])
    assert view["limit"] is None
    assert view["failures"][0]["message"] == "no kernel"


def test_grouping_agrees_with_plain_python() -> None:
    rng = np.random.default_rng(1)
    bench = Bench(sessions=3)
    for case in (KERNEL, KERNEL.replace("32*1", "1*1")):
        for variant in (OLD, NEW):
            bench.windows(case, variant, "latency", [list(rng.random(5)) for _ in range(3)])
    order = rng.permutation(len(bench.samples))
    bench.samples = [bench.samples[index] for index in order]
    found = Estimates.of([bench.run()], "kernel")
    for case, variant in found.keys():  # noqa: SIM118
        medians = [
            np.median([s.value for s in bench.samples if (s.case, s.variant, s.session) == (case, variant, session)])
            for session in range(3)
        ]
        assert found.value(case, variant, "latency") == pytest.approx(np.mean(medians))
