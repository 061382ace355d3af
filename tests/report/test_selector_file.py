"""What an enable means for an engine: only what was measured, on what it was measured, for as long as it holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kbench.decide import Decision, RegimeVerdict, RunCount, Verdict
from kbench.errors import MeasurementError
from kbench.plan import Plan, make_plan
from kbench.record import RunRecord
from kbench.report.selector_file import selector_document, write_selector
from kbench.selector import BASELINE, CANDIDATE, Selector, load
from kbench.suite import load_suite

from .conftest import Bench

NOW = datetime(2026, 6, 1, tzinfo=UTC)
HEADER = {
    "device": "cuda",
    "kbench": "0.1.0",
    "started": "2026-05-01T08:00:00.000+00:00",
    "ended": "2026-05-01T09:00:00.000+00:00",
    "environment": {
        "python": {"packages": {"torch": "2.13.0"}},
        "cpu": {"model": "Some CPU"},
        "gpus": [{"name": "NVIDIA H200"}, {"name": "NVIDIA H200"}],
        "gpu_driver": "570.1",
    },
}
HERE = {
    "gpu": "NVIDIA H200", "driver": "570.1", "engine": "kbench@0.1.0", "torch": "2.13.0", "model": "tiny",
    "dtype": "float32", "prefill_backend": "sdpa", "decode_backend": "blocked",
}  # fmt: skip
CLAUSE = """
  [[regime.require]]
  level = "step"
  metric = "step_time"
  test = "superiority"
  min_saving = 0.02
"""
CORNERS = ["1*1@127", "32*1@127", "1*1@4096", "32*1@4096"]


def plan_of(folder: Path, *regimes: str, shared: bool = False, points: Sequence[str] = CORNERS, rule: str = "") -> Plan:
    (folder / "t.parquet").write_bytes(b"")
    (folder / "suite.toml").write_text(
        f"""schema = "kbench.suite/1"
claim = {{ name = "claim", baseline = "old", candidate = "new", changes_shared_state = {str(shared).lower()} }}
model = {{ preset = "tiny" }}
step = {{ points = {json.dumps(list(points))} }}
workload = {{ traces = {{ long = "t.parquet", chat = "t.parquet" }} }}
[variants.old]
attention = {{ prefill = "sdpa", decode = "sdpa-gather" }}
page_size = 16
[variants.new]
extends = "old"
attention = {{ prefill = "sdpa", decode = "blocked" }}
{rule}
"""
        + "".join(f'[[regime]]\nid = "r{number}"\n{text}\n{CLAUSE}' for number, text in enumerate(regimes))
    )
    return make_plan(load_suite(folder / "suite.toml"))


def run(name: str = "20260501T080000-00", **header: Any) -> RunRecord:
    return Bench(name, header={**HEADER, **header}).run()


def decision_of(plan: Plan, *verdicts: Verdict) -> Decision:
    regimes = tuple(
        RegimeVerdict(regime.id, verdict, (), ("why",))
        for regime, verdict in zip(plan.loaded.suite.regime, verdicts, strict=True)
    )
    return Decision(plan.name, plan.plan_hash, regimes, RunCount(1, 0, 0), 6, 0.05)


def document_of(plan: Plan, *verdicts: Verdict, records: Sequence[RunRecord] | None = None) -> dict[str, Any]:
    runs = [run()] if records is None else records
    return selector_document(plan, decision_of(plan, *verdicts), runs, "a" * 64, now=NOW)


def loaded(document: dict[str, Any], folder: Path, now: datetime = NOW) -> Selector:
    return load(write_selector(document, folder / "out" / "selector.json"), clock=lambda: now)


POINTS = f"points = {json.dumps(CORNERS)}"
BY_CLASS = f'trace_class = ["long"]\n{POINTS}'
BY_RANGE = f"when = {{ context = [100, 9999], batch = [1, 64] }}\n{POINTS}"


@pytest.mark.parametrize("verdict", list(Verdict))
def test_only_enable_maps_to_the_candidate(verdict: Verdict, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, BY_CLASS, BY_CLASS.replace("long", "chat"), shared=True)
    document = document_of(plan, verdict, Verdict.DISABLE)
    choices = loaded(document, tmp_path).bind(**HERE)
    assert choices.choose(trace_class="long").use == (CANDIDATE if verdict is Verdict.ENABLE else BASELINE)
    assert choices.choose(trace_class="chat").use == BASELINE
    assert [item["verdict"] for item in document["entries"]] == [verdict.value, "disable"]


def test_the_document_says_what_decided(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, BY_CLASS, shared=True)
    document = document_of(plan, Verdict.ENABLE, records=[run(), run("20260502T080000-00")])
    assert (document["plan_hash"], document["lock_hash"]) == (plan.plan_hash, plan.lock_hash)
    assert (document["ledger_head"], document["scope"], document["default"]) == ("a" * 64, "deployment", "baseline")
    assert document["entries"][0]["evidence"] == ["20260501T080000-00", "20260502T080000-00"]
    assert document["variants"] == {"baseline": "old", "candidate": "new"}
    assert document_of(plan_of(tmp_path, BY_CLASS), Verdict.ENABLE)["scope"] == "step"


def test_it_expires_after_the_newest_run(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, BY_CLASS, shared=True)
    newer = run("b", ended="2026-05-20T00:00:00+00:00")
    document = document_of(plan, Verdict.ENABLE, records=[newer, run()])
    assert document["expires"] == "2026-08-18T00:00:00+00:00"
    short = plan_of(tmp_path, BY_CLASS, shared=True, rule="[rule.policy]\nselector_ttl_days = 3")
    document = document_of(short, Verdict.ENABLE, records=[run(ended="2026-05-30T00:00:00+00:00")])
    assert document["expires"] == "2026-06-02T00:00:00+00:00"
    choices = loaded(document, tmp_path, NOW + timedelta(days=1)).bind(**HERE)
    assert choices.choose().reason.startswith("expired")
    timeless = document_of(plan, Verdict.ENABLE, records=[run(ended="x", started=None)])
    assert loaded(timeless, tmp_path).bind(**HERE).choose().reason.startswith("expired")


def test_a_range_shrinks_to_the_measured_corners(tmp_path: Path) -> None:
    document = document_of(plan_of(tmp_path, BY_RANGE), Verdict.ENABLE)
    assert [item["when"] for item in document["entries"]] == [
        {"phase": "decode", "context": [127, 4096], "batch": [1, 32]}
    ]
    choices = loaded(document, tmp_path).bind(**HERE, phase="decode")
    for context, batch, use in ((127, 1, CANDIDATE), (4096, 32, CANDIDATE), (100, 1, BASELINE), (4096, 64, BASELINE)):
        assert choices.choose(context=context, batch=batch).use == use


def test_each_phase_has_its_own_range(tmp_path: Path) -> None:
    points = ["1*1@4096", "1*512@512", "2*512@512", "1*512+4*1@600"]
    text = f"when = {{ context = [1, 9999] }}\npoints = {json.dumps(points)}"
    document = document_of(plan_of(tmp_path, text, points=points), Verdict.ENABLE)
    assert [item["when"] for item in document["entries"]] == [
        {"phase": "decode", "context": [4096, 4096], "batch": [1, 1]},
        {"phase": "prefill", "context": [512, 512], "batch": [1, 2]},
        {"phase": "mixed", "context": [600, 600], "batch": [5, 5]},
    ]


@pytest.mark.parametrize(
    ("shared", "text", "note"),
    [
        (True, POINTS, "no trace_class by which"),
        (False, POINTS, "no trace_class or when by which"),
        (False, BY_RANGE.replace('"32*1@127", ', ""), "no corners"),
        (False, BY_RANGE.replace("[100, 9999]", "[5000, 9999]"), "no corners"),
    ],
)
def test_an_enable_that_no_engine_could_obey_keeps_the_baseline(
    shared: bool, text: str, note: str, tmp_path: Path
) -> None:
    (entry,) = document_of(plan_of(tmp_path, text, shared=shared), Verdict.ENABLE)["entries"]
    assert (entry["use"], entry["verdict"]) == (BASELINE, "enable") and note in entry["note"]


def test_a_range_that_is_not_enabled_stays_as_wide_as_declared(tmp_path: Path) -> None:
    (entry,) = document_of(plan_of(tmp_path, BY_RANGE), Verdict.INCONCLUSIVE)["entries"]
    assert entry["when"] == {"context": [100, 9999], "batch": [1, 64]}


@pytest.mark.parametrize(
    ("records", "note"),
    [
        ([], "nothing was measured"),
        ([run(environment={})], "gpu of the measured machine is not known"),
        ([run(kbench="")], "engine of the measured machine is not known"),
        ([run(environment={**HEADER["environment"], "gpus": [{"name": "A"}, {"name": "B"}]})], "gpu"),
        (
            [run(), run("b", environment={**HEADER["environment"], "gpu_driver": "580.2\n"})],
            "differ in driver: 570.1, 58",
        ),
    ],
)
def test_what_it_ran_on_must_be_certain(records: list[RunRecord], note: str, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, BY_CLASS, shared=True)
    document = document_of(plan, Verdict.ENABLE, records=records)
    (entry,) = document["entries"]
    assert entry["use"] == BASELINE and note in entry["note"]
    choice = loaded(document, tmp_path).bind(**HERE).choose(trace_class="long")
    assert choice.use == BASELINE and "not a valid selector" not in choice.reason


def test_a_cpu_is_named_where_no_gpu_was_used(tmp_path: Path) -> None:
    document = document_of(plan_of(tmp_path, BY_CLASS, shared=True), Verdict.ENABLE, records=[run(device="cpu")])
    assert {**HERE, **document["valid_for"]} == {**HERE, "gpu": "none", "driver": "none", "cpu": "Some CPU"}
    choices = loaded(document, tmp_path).bind(**HERE)
    assert choices.bind(gpu="none", driver="none", cpu="Some CPU").choose().use == CANDIDATE
    assert choices.choose().use == BASELINE


def test_writing_is_atomic_and_says_what_failed(tmp_path: Path) -> None:
    document = document_of(plan_of(tmp_path, BY_CLASS, shared=True), Verdict.ENABLE)
    path = write_selector(document, tmp_path / "out" / "selector.json")
    assert [file.name for file in path.parent.iterdir()] == ["selector.json"]
    assert json.loads(path.read_text()) == document
    with pytest.raises(MeasurementError, match="cannot write the selector"):
        write_selector(document, path / "selector.json")


VALID = """[rule.validity]
gpu = "NVIDIA H200*"
driver = ">=570,<600"
torch = ">=2.13,<3"
kbench = ">=0.1,<0.2"
"""


@pytest.mark.parametrize(
    ("features", "use"),
    [
        ({}, CANDIDATE),
        ({"gpu": "NVIDIA H200 NVL", "driver": "599.9", "torch": "2.14.1+cu140", "engine": "kbench@0.1.9"}, CANDIDATE),
        ({"driver": "600.0"}, BASELINE),
        ({"torch": "3.0"}, BASELINE),
        ({"engine": "kbench@0.2.0"}, BASELINE),
        ({"gpu": "NVIDIA H100"}, BASELINE),
        ({"model": "other"}, BASELINE),
    ],
)
def test_validity_widens_what_was_measured_to_what_the_rule_says(
    tmp_path: Path, features: dict[str, str], use: str
) -> None:
    plan = plan_of(tmp_path, BY_CLASS, shared=True, rule=VALID)
    choices = loaded(document_of(plan, Verdict.ENABLE), tmp_path)
    found = choices.choose(**{**HERE, "trace_class": "long", **features})
    assert found.use == use, found.reason


def test_what_was_measured_outside_of_the_stated_validity_enables_nothing(tmp_path: Path) -> None:
    rule = '[rule.validity]\ndriver = ">=580"\n'
    plan = plan_of(tmp_path, BY_CLASS, shared=True, rule=rule)
    [entry] = document_of(plan, Verdict.ENABLE)["entries"]
    assert entry["use"] == BASELINE
    assert "driver 570.1 was measured, and rule.validity says >=580" in entry["note"]
