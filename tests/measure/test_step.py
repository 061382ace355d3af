"""The step trial: exactly the point, right logits or a status, phases that close, and the same step every time."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from kbench.catalog import Case, parse_point
from kbench.engine.phases import PHASES, NullClock
from kbench.errors import MeasurementError
from kbench.measure.exec_batch import BatchState, open_runner, scattered_tables
from kbench.measure.exec_correct import Judge, worst_row
from kbench.measure.step import StepTrial
from kbench.protocol import Measurement, Outcome, Status
from kbench.suite.rule_schema import Tolerance
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

torch.set_num_threads(1)
SHORT = Measure(window_steps=2, window_ms=1.0)
NULL = NullClock()


def make_arm(**changes: object) -> Arm:
    keys = {
        "name": "arm",
        "model": ModelSettings(preset="tiny"),
        "engine": EngineSettings(kv_tokens=64, max_batched_tokens=64),  # smaller than any point: it must not matter
        "prefill": "sdpa",
        "decode": "sdpa-gather",
        "page_size": 16,
        "layout": "NHD",
        "seed": 1,
        "root": ".",
    }
    return Arm.model_validate(keys | changes)


def make_trial(point: str, arm: Arm | None = None, device: str = "cpu") -> StepTrial:
    return StepTrial(Case("step", "step", "tiny", point), arm or make_arm(), device, SHORT, 1)


def value(measurements: tuple[Measurement, ...], metric: str) -> float:
    return next(item.value for item in measurements if item.metric == metric)


@pytest.mark.parametrize(
    ("point", "layout", "page_size", "decode"),
    [
        ("1*1@127", "NHD", 16, "sdpa-gather"),
        ("8*1@300", "HND", 64, "blocked"),
        ("1*200", "NHD", 16, "reference"),
        ("2*40@90+3*1@70", "HND", 16, "blocked"),
    ],
)
def test_a_trial_measures_clean_steps_then_phases_that_close(
    point: str, layout: str, page_size: int, decode: str
) -> None:
    trial = make_trial(point, make_arm(layout=layout, page_size=page_size, decode=decode))
    prepared = trial.prepare()
    assert prepared.status is Status.OK, prepared.message
    assert prepared.facts["correctness"]["error"] <= prepared.facts["correctness"]["bound"]
    window = trial.window()
    assert 0 < value(window, "step_time") <= value(window, "step_time_max")
    finished = trial.finish()
    assert finished.status is Status.OK, finished.message
    taken = finished.measurements
    assert {item.metric for item in taken} >= {f"phase.{name}" for name in PHASES}
    assert 0.5 < value(taken, "closure") <= 1.0
    assert value(taken, "conversion_time") == value(taken, "phase.convert") == 0.0
    assert value(taken, "metadata_time") >= value(taken, "phase.metadata")
    traced = trial.trace()
    assert traced.facts["launches"] > 30
    selection = traced.facts["selection"]
    decodes = any(query == 1 for query, _ in parse_point(point).sequences)
    prefills = any(query > 1 for query, _ in parse_point(point).sequences)
    asked = {key: selection["decode"][key] for key in ("requested", "resolved", "observed", "mutations")}
    ran = decode if decodes else ""
    assert asked == {"requested": decode, "resolved": decode, "observed": ran, "mutations": []}
    assert selection["prefill"]["observed"] == ("sdpa" if prefills else "")


def test_the_fingerprint_names_the_operators_of_each_phase() -> None:
    trial = make_trial("1*40@90+3*1@70")
    facts = trial.trace().facts
    assert any("scaled_dot_product" in name for name in facts["fingerprint"]["attention.decode"])
    assert any("scaled_dot_product" in name for name in facts["fingerprint"]["attention.prefill"])
    assert facts["launches_by_part"]["kv_write"] == 4  # K and V of two layers
    assert "other" not in facts["launches_by_part"]  # putting the state back is no part of the step


PLUGIN = """
import torch
from kbench.kernels.registry import load

class Skips:
    "The reference without the last page of every sequence's past."
    name = "skips"
    def __init__(self):
        self.inner = load("reference", "attention.decode")
    def convert(self, kv):
        return kv
    def plan(self, batch, spec, kv):
        from dataclasses import replace
        lens = tuple(max(1, n - kv.page_size) for n in batch.kv_lens)
        seq = torch.tensor(lens, dtype=torch.int32, device=batch.seq_lens.device)
        return self.inner.plan(replace(batch, kv_lens=lens, seq_lens=seq, max_kv=max(lens)), spec, kv)
    def run(self, q, kv, plan, out):
        return self.inner.run(q, kv, plan, out)

class Unwindowed(Skips):
    "Full attention, whatever the layer asks for."
    name = "unwindowed"
    def plan(self, batch, spec, kv):
        from dataclasses import replace
        return self.inner.plan(batch, replace(spec, window=0), kv)

class Windowed(Skips):
    "The first layer's window in every layer."
    name = "windowed"
    def plan(self, batch, spec, kv):
        from dataclasses import replace
        return self.inner.plan(batch, replace(spec, window=48), kv)

class Sinkless(Skips):
    name = "sinkless"
    def plan(self, batch, spec, kv):
        from dataclasses import replace
        return self.inner.plan(batch, replace(spec, sinks=None), kv)

class Raises(Skips):
    name = "raises"
    def run(self, q, kv, plan, out):
        raise RuntimeError("shared memory\\nexhausted")

class Late(Skips):
    "Right until the eighth step, then stale."
    name = "late"
    def __init__(self):
        super().__init__()
        self.steps = 0
    def plan(self, batch, spec, kv):
        self.steps += 1
        return self.inner.plan(batch, spec, kv)
    def run(self, q, kv, plan, out):
        result = self.inner.run(q, kv, plan, out)
        return result if self.steps < 8 else torch.zeros_like(result)

class Overreads(Skips):
    name = "overreads"
    def plan(self, batch, spec, kv):
        return batch
    def run(self, q, kv, plan, out):
        return q + kv.k[0].mean()

class Starved(Skips):
    name = "starved"
    def run(self, q, kv, plan, out):
        raise torch.OutOfMemoryError("no memory left")
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    (tmp_path / "broken.py").write_text(PLUGIN)
    return tmp_path


def broken(plugins: Path, name: str, point: str = "2*1@127") -> StepTrial:
    return make_trial(point, make_arm(decode=f"broken.py:{name}", root=str(plugins)))


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("Skips", Status.INCORRECT, "attention of a layer is off"),
        ("Overreads", Status.INCORRECT, "nan"),
        ("Raises", Status.FAILED, "RuntimeError: shared memory exhausted"),
        ("Starved", Status.OUT_OF_MEMORY, "no memory left"),
    ],
)
def test_broken_implementations_get_a_status(plugins: Path, name: str, status: Status, message: str) -> None:
    trial = broken(plugins, name)
    outcome = trial.prepare()
    assert (outcome.status, message in outcome.message) == (status, True)
    assert trial.finish() == outcome
    with pytest.raises(MeasurementError, match=str(status)):
        trial.window()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_one_dropped_page_of_hundreds_is_found_in_every_dtype(plugins: Path, preset: str, dtype: str) -> None:
    model = ModelSettings(preset=preset, dtype=dtype)  # type: ignore[arg-type]
    right = make_arm(model=model, decode="blocked")
    wrong = make_arm(model=model, decode="broken.py:Skips", root=str(plugins))
    assert make_trial("1*1@4096", right).prepare().status is Status.OK
    assert make_trial("1*1@4096", wrong).prepare().status is Status.INCORRECT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["", "Unwindowed", "Windowed", "Sinkless"])
def test_every_kind_of_layer_is_judged(plugins: Path, name: str, dtype: str) -> None:
    model = ModelSettings(preset="tiny-window", dtype=dtype)  # type: ignore[arg-type]
    whose = f"broken.py:{name}" if name else "reference"
    arm = make_arm(model=model, prefill="reference", decode=whose, root=str(plugins))
    outcome = make_trial("2*1@127", arm).prepare()
    assert outcome.status is (Status.INCORRECT if name else Status.OK), outcome.message


def test_an_implementation_without_windows_or_sinks_is_unsupported_for_a_model_that_has_them() -> None:
    outcome = make_trial("1*1@127", make_arm(model=ModelSettings(preset="tiny-window"))).prepare()
    assert outcome.status is Status.UNSUPPORTED
    for feature in ("window", "sinks"):
        assert f"sdpa-gather: feature: wants {feature}, has none" in outcome.facts["reasons"]
        assert f"sdpa: feature: wants {feature}, has none" in outcome.facts["reasons"]
    assert len(outcome.facts["reasons"]) == 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_that_routes_to_other_experts_is_no_error(dtype: str) -> None:
    model = ModelSettings(preset="tiny-moe", dtype=dtype)  # type: ignore[arg-type]
    for point in ("32*1@127", "1*64@300+3*1@100"):
        outcome = make_trial(point, make_arm(model=model)).prepare()
        assert outcome.status is Status.OK, outcome.message


def test_a_step_that_turns_wrong_while_it_is_timed_is_found(plugins: Path) -> None:
    trial = broken(plugins, "Late")
    assert trial.prepare().status is Status.OK
    for _ in range(4):
        trial.window()
    assert trial.finish().status is Status.INCORRECT


def test_an_implementation_that_cannot_serve_is_unsupported_with_reasons() -> None:
    outcome = make_trial("1*1@127", make_arm(decode="triton-paged", page_size=8)).prepare()
    assert outcome.status is Status.UNSUPPORTED
    assert any("device" in reason for reason in outcome.facts["reasons"])
    assert any("page_size" in reason for reason in outcome.facts["reasons"])


def test_contexts_beyond_the_model_and_pools_beyond_memory_fail_in_one_line() -> None:
    for point in ("1*1@200000", "4096*1@131072"):
        outcome: Outcome = make_trial(point).prepare()
        assert outcome.status is Status.UNSUPPORTED
        assert outcome.facts["usage"]
        assert "\n" not in outcome.message


def test_every_repetition_starts_from_the_same_state() -> None:
    point = parse_point("2*20@50+3*1@33")  # 33: the step opens a new page
    runner = open_runner(make_arm(page_size=16), "cpu", [point])
    state = BatchState(runner, point, 1)
    state.fill(1)
    state.check_plan()
    seen = []
    for _ in range(3):
        state.restore()
        before = [layer.k.clone() for layer in runner.pool.layers]
        tokens = state.step(NULL)
        seen.append((tokens, runner.last_logits.clone()))
        assert not torch.equal(before[0].nan_to_num(9.0), runner.pool.layers[0].k.nan_to_num(9.0))
        state.restore()
        for kept, layer in zip(before, runner.pool.layers, strict=True):
            assert torch.equal(kept.nan_to_num(9.0), layer.k.nan_to_num(9.0))
    assert seen[0][0] == seen[1][0] == seen[2][0]
    assert torch.equal(seen[0][1], seen[2][1])


def test_both_arms_compute_the_same_step() -> None:
    point = parse_point("2*20@50+3*1@100")
    logits = []
    for changes in ({}, {"page_size": 64, "layout": "HND", "decode": "blocked"}):
        runner = open_runner(make_arm(**changes), "cpu", [point])
        state = BatchState(runner, point, 1)
        state.fill(1)
        state.step(NULL)
        logits.append(runner.last_logits)
    assert worst_row(logits[1], logits[0]) < 1e-5


def test_pages_are_scattered_distinct_and_the_null_page_stays_out() -> None:
    point = parse_point("4*1@1000")
    runner = open_runner(make_arm(), "cpu", [point])
    from kbench.engine.scheduler import Scheduler

    tables = scattered_tables(Scheduler(runner.config), point, 16, seed=1)
    flat = [page for table in tables for page in table]
    assert len(set(flat)) == len(flat) == 4 * 63
    assert 0 not in flat
    assert sum(b - a == 1 for a, b in itertools.pairwise(flat)) < len(flat) / 10


def test_the_rule_lets_rounding_pass_and_stops_what_is_larger() -> None:
    point = parse_point("4*1@500")
    runner = open_runner(make_arm(model=ModelSettings(preset="tiny", dtype="bfloat16")), "cpu", [point])
    state = BatchState(runner, point, 1)
    state.fill(1)

    def step() -> None:
        state.restore()
        state.step(NULL)

    judge = Judge(runner, step)
    step()
    honest = runner.last_logits
    assert judge.judge(honest).correct
    assert judge.judge(honest).discriminates
    assert not judge.judge(judge.reference * 1.2).correct
    assert not judge.judge(judge.reference * float("nan")).correct
    assert not judge.judge(judge.reference[1:]).correct
    float32 = open_runner(make_arm(), "cpu", [point])
    exact = BatchState(float32, point, 1)
    exact.fill(1)
    exact.step(NULL)
    assert judge.judge(float32.last_logits).bound > 10 * 1e-4  # bf16 laxity, which float32 must not get


@pytest.mark.parametrize("check", ["attention", "logits"])
def test_a_rule_s_stricter_limit_fails_a_step_that_the_default_passes(check: str) -> None:
    """sdpa and the reference differ by rounding: above 1e-9 and below the limits that ship."""
    assert make_trial("2*1@90").prepare().status is Status.OK
    other = make_arm(tolerance={"bfloat16": Tolerance.model_validate({check: 1e-9})})
    assert make_trial("2*1@90", other).prepare().status is Status.OK, "not this model's dtype"
    found = make_trial("2*1@90", make_arm(tolerance={"float32": Tolerance.model_validate({check: 1e-9})})).prepare()
    assert found.status is Status.INCORRECT
    assert "bound 1.00e-09" in found.message and "rule.tolerance" in found.message


@pytest.mark.parametrize(("point", "padded"), [("3*1@127", 1), ("4*1@127", 0)])
def test_a_replayed_case_is_measured_beside_its_eager_self(point: str, padded: int) -> None:
    """Without a device nothing is captured: the padded step is launched, and no one calls it a graph."""
    settings = EngineSettings(kv_tokens=64, max_batched_tokens=64, graph="graph")
    trial = make_trial(point, make_arm(engine=settings))
    prepared = trial.prepare()
    assert prepared.status is Status.OK, prepared.message
    assert (prepared.facts["graph"], prepared.facts["padded_tokens"]) == ("padded", padded)
    assert value(trial.window(), "step_time") > 0
    finished = trial.finish()
    assert finished.status is Status.OK, finished.message
    taken = finished.measurements
    assert 0.5 < value(taken, "closure") <= 1.0
    assert {item.metric for item in taken}.isdisjoint({"phase.attention", "phase.kv_write", "phase.convert"})
    assert value(taken, "phase.forward") > 0 == value(taken, "conversion_time")
    assert value(taken, "eager_step_time") > 0 < value(taken, "overlapped_step_time")
    assert (value(taken, "padding_time") != 0.0) == bool(padded)
    traced = trial.trace().facts
    assert traced["graph"] == "padded"
    assert traced["selection"]["decode"]["observed"] == "sdpa-gather"


def test_a_case_that_cannot_be_replayed_says_why() -> None:
    settings = EngineSettings(kv_tokens=64, max_batched_tokens=64, graph="graph")
    trial = make_trial("1*40", make_arm(engine=settings))
    facts = trial.prepare().facts
    assert (facts["graph"], facts["graph_reason"]) == ("eager", "the prefill implementation captures nothing")
    metrics = {item.metric for item in trial.finish().measurements}
    assert "overlapped_step_time" in metrics
    assert "eager_step_time" not in metrics


HOST_LENGTHS = """
from kbench.kernels.declare import implementation
from kbench.kernels.registry import load


@implementation("attention.decode", graph=True)
class HostLengths:
    def __init__(self):
        self.inner = load("reference", "attention.decode")

    def convert(self, kv):
        return kv

    def plan(self, batch, spec, kv):
        return self.inner.plan(batch, spec, kv)

    def run(self, q, kv, plan, out):
        return self.inner.run(q, kv, plan, out)
"""


def test_an_implementation_that_reads_lengths_on_the_host_is_wrong_only_where_it_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "host.py").write_text(HOST_LENGTHS)
    settings = EngineSettings(kv_tokens=64, max_batched_tokens=64, graph="graph")
    arm = make_arm(engine=settings, decode="host.py:HostLengths", root=str(tmp_path))
    prepared = make_trial("3*1@127", arm).prepare()
    assert prepared.status is Status.INCORRECT
    assert "launched kernel by kernel it is right: are lengths read on the host?" in prepared.message
    eager = make_arm(decode="host.py:HostLengths", root=str(tmp_path))
    assert make_trial("3*1@127", eager).prepare().status is Status.OK
