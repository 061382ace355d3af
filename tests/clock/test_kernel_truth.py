"""The truth benchmark where no GPU is: its arithmetic, its boundaries, and that its kernels compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def row(reference: float = 10.0, flags: tuple[str, ...] = (), **errors: float) -> dict[str, Any]:
    tools = {
        name: {"us": reference + error, "error_us": error, "error_pct": 100 * error / reference}
        for name, error in errors.items()
    }
    return {"kernel": "k", "state": "hot", "profiler_us": reference, "tools": tools, "flags": list(flags)}


@pytest.mark.parametrize(
    ("reference", "ours", "other", "holds"),
    [
        (10.0, 0.29, 0.2, True),
        (10.0, -0.29, 0.2, True),
        (10.0, 0.31, 0.31, False),  # neither within 0.3 µs nor 3 %
        (1_000.0, 29.0, 29.0, True),
        (1_000.0, 31.0, 40.0, False),
        (10.0, 0.25, 0.1, False),  # 0.15 µs behind the best other
        (10.0, 0.19, -0.1, True),
        (1_000.0, 5.5, 0.0, False),  # more than 0.5 % behind
        (1_000.0, 4.9, 0.0, True),
    ],
)
def test_the_criterion_is_that_of_the_design(reference: float, ours: float, other: float, holds: bool) -> None:
    from kernel_truth_table import criterion

    verdict = criterion([row(reference, kbench=ours, do_bench=other)])
    assert verdict["holds"] is holds and verdict["judged"] == 1


def test_without_a_reading_of_ours_nothing_holds() -> None:
    from kernel_truth_table import criterion

    assert not criterion([])["holds"]
    assert not criterion([row(do_bench=0.0)])["holds"]
    declined = criterion([row(flags=("EVENT_FLOOR",), kbench=5.0), row(kbench=0.0)])
    assert declined["holds"] and len(declined["declined"]) == 1
    assert not criterion([row(flags=("EVENT_FLOOR",), kbench=5.0)])["holds"], "to decline everything is no success"
    assert not criterion([row(flags=("LAUNCH_BOUND",), kbench=5.0)])["holds"]


def test_a_variant_of_ours_is_no_other_tool() -> None:
    from kernel_truth_table import criterion

    assert criterion([row(**{"kbench": 0.29, "kbench event": 0.0})])["holds"]


def test_the_worst_case_is_the_largest_multiple_of_the_tolerance() -> None:
    from kernel_truth_table import worst

    small, large = row(1.0, do_bench=0.9), row(1_000.0, do_bench=60.0)
    assert worst([small, large])["do_bench"]["tolerances"] == pytest.approx(3.0)
    assert worst([large])["do_bench"]["tolerances"] == pytest.approx(2.0)


def test_rounds_between_profiles_are_compared_with_their_neighbours() -> None:
    """A clock that falls from round to round is no tool's error."""
    from kernel_truth_table import with_reference

    kept = {
        "kernel": "k",
        "state": "hot",
        "profiled": [{"span": us, "sum": us - 1} for us in (100.0, 110.0, 130.0)],
        "readings": {"kbench": [{"us": 105.0, "sm_mhz": 1_900.0}, {"us": 120.0, "sm_mhz": 1_700.0}], "failed": []},
    }
    (span,), (total,) = with_reference([kept], "span"), with_reference([kept], "sum")
    assert span["tools"]["kbench"]["error_us"] == pytest.approx(0.0)
    assert total["tools"]["kbench"]["error_us"] == pytest.approx(1.0)
    assert span["tools"]["kbench"]["sm_mhz"] == 1_800.0 and "failed" not in span["tools"]


@pytest.mark.parametrize(("us", "error"), [(8.0, -1.0), (9.5, 0.0), (12.0, 0.0), (12.5, 0.5)])
def test_between_sum_and_span_no_error_is_counted(us: float, error: float) -> None:
    from kernel_truth_table import with_reference

    kept = {"profiled": [{"sum": 9.0, "span": 12.0}], "readings": {"kbench": [{"us": us}]}}
    (judged,) = with_reference([kept], "bracket")
    assert judged["tools"]["kbench"]["error_us"] == pytest.approx(error)
    assert judged["profiler_us"] == 12.0


def test_nvbench_is_read_by_its_tags() -> None:
    from kernel_truth_tools import read_nvbench

    def summary(tag: str, value: str) -> dict[str, Any]:
        return {"tag": tag, "data": [{"name": "value", "type": "float64", "value": value}]}

    summaries = [summary("nv/cold/time/gpu/median", "1.5e-05"), summary("nv/cold/time/cpu/mean", "1")]
    document = {
        "benchmarks": [
            {"name": "add-1", "states": [{"summaries": [*summaries, summary("nv/batch/time/gpu/mean", "2e-6")]}]},
            {"name": "skipped", "states": [{"summaries": None, "is_skipped": True}]},
        ]
    }
    assert read_nvbench(document) == {
        "add-1": {"nvbench cold": pytest.approx(15.0), "nvbench batch": pytest.approx(2.0)}
    }


def test_the_kernels_of_torch_run_on_independent_inputs() -> None:
    import kernel_truth_cases as cases

    with torch.inference_mode():
        for build in (
            cases.add(1),
            cases.copy(64),
            cases.gemm(3, 5, 7),
            cases.silu_mul(2, 8),
            cases.softmax(2, 9),
            cases.top_p(2, 33),
            cases.prefill(8, 4, 2, 16),
        ):
            built = build(CPU)
            calls = built.sets(3)
            assert len(calls) == 3 and len({id(call) for call in calls}) == 3 and built.bytes > 0
            for call in calls:
                call()
    assert len(cases.CASES) >= 14


class Profile:
    """What the profiler would say: 10 µs a call."""

    sum_us = span_us = 10.0
    timer_us = 10.0
    period_us = 10.1
    gap_us = 0.1
    kernels = 1
    names = ("kernel",)


def test_one_broken_tool_or_kernel_costs_only_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import kernel_truth as truth
    import kernel_truth_cases as cases
    import kernel_truth_lab
    from kernel_truth_tools import Tool

    def broken(_: object) -> dict[str, float]:
        raise RuntimeError("out of order")

    def no_build(_: torch.device) -> Any:
        raise ValueError("no such kernel")

    ours = {"good": cases.add(16), "bad": no_build}
    monkeypatch.setattr(kernel_truth_lab, "CASES", ours)
    monkeypatch.setattr(kernel_truth_lab, "FLUSH_BYTES", 64)
    monkeypatch.setattr(kernel_truth_lab, "WINDOW_MS", 0.1)
    monkeypatch.setattr(kernel_truth_lab, "profile_calls", lambda *_, **__: Profile())
    tools = [Tool("broken", "hot", broken), Tool("exact", "hot", lambda _: {"exact": 10.0})]
    monkeypatch.setattr(kernel_truth_lab, "available", lambda: (tools, {"missing": "not installed"}))
    lab = kernel_truth_lab.Lab(CPU, 2, 1, float("inf"))
    saved: list[int] = []
    for step in (lab.undisturbed, lab.profiled):
        lab.each(["bad", "good"], step, lambda: saved.append(1))
    assert len(saved) == 4, "saved after every case, failed ones too"
    made = truth.document(lab, {**truth.settings(truth.parse([])), "reference": "span"}, {"device": "none"})
    truth.save(made, tmp_path / "truth.json", tmp_path / "truth.md")
    again = json.loads((tmp_path / "truth.json").read_text())
    assert {entry["state"] for entry in again["rows"]} == {"hot", "cold", "flush"}
    hot = next(entry for entry in again["rows"] if entry["state"] == "hot")
    assert hot["tools"]["exact"]["error_us"] == 0.0 and len(hot["readings"]["exact"]) == 2
    assert "kbench" in hot["tools"] and "broken" not in hot["tools"]
    problems = " ".join(again["problems"])
    assert "out of order" in problems and "no such kernel" in problems
    table = (tmp_path / "truth.md").read_text()
    assert "| exact | good | hot | +0.00 (+0.0 %) | 0.00 |" in table and "missing is absent" in table


def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_truth

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel_truth.main([]) == 2
    assert capsys.readouterr().err == "kernel_truth: no CUDA device\n"


def test_a_spent_budget_starts_no_further_case() -> None:
    import kernel_truth_lab

    lab = kernel_truth_lab.Lab(CPU, 1, 1, float("-inf"))
    lab.each(["add-1"], lab.undisturbed, lambda: None)
    assert not lab.rows and "budget" in lab.problems[-1]
