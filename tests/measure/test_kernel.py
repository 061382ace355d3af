from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kbench.catalog import Case
from kbench.clock.timer import prepared_timer
from kbench.errors import MeasurementError
from kbench.measure.kernel import KernelTrial
from kbench.protocol import Reply, Status, decode_reply, encode
from kbench.suite.rule_schema import Tolerance
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

QUICK = Measure(window_steps=3, window_ms=1.0)
PLUGIN_HEAD = """
import torch
from kbench.ops.attention import same_dtype
from pathlib import Path
def timed(): return Path(__file__).with_name("timed").exists()
def right(q, kv, batch, spec):
    return same_dtype(q, kv, batch, spec, torch.empty_like(q))
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arm(decode: str = "sdpa-gather", prefill: str = "sdpa", root: str = ".", **changes: Any) -> Arm:
    model = ModelSettings(preset="tiny", dtype=changes.pop("dtype", "float32"))
    fields: dict[str, Any] = {"page_size": 16, "layout": "NHD", "engine": EngineSettings(), "seed": 1} | changes
    return Arm(name="it", model=model, prefill=prefill, decode=decode, root=root, **fields)


def trial(one: Arm, point: str = "2*1@127", op: str = "attention.decode") -> KernelTrial:
    return KernelTrial(Case("kernel", op, "tiny", point), one, "cpu", QUICK, one.seed)


def plugin(tmp_path: Path, body: str) -> KernelTrial:
    (tmp_path / "mine.py").write_text(PLUGIN_HEAD + body)
    return trial(arm(decode="mine.py:it", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("one", "point", "op"),
    [
        (arm("sdpa-gather"), "2*1@127", "attention.decode"),
        (arm("blocked", page_size=64), "2*1@127", "attention.decode"),
        (arm("blocked", page_size=64, layout="HND", dtype="bfloat16"), "1*1@300", "attention.decode"),
        (arm(prefill="sdpa"), "1*32@100+1*20", "attention.prefill"),
    ],
)
def test_a_trial_is_right_first_and_then_timed(one: Arm, point: str, op: str) -> None:
    it = trial(one, point, op)
    outcome = it.prepare()
    assert outcome.status is Status.OK, outcome.message
    facts = outcome.facts
    assert facts["correctness"]["rel_l2"] <= facts["correctness"]["limit"]
    assert facts["correctness"]["null_models_killed"] == facts["correctness"]["null_models"] >= 5
    assert facts["timer"] == "wall" and facts["cache"] in ("cold", "warm", "unverified")
    assert facts["selection"]["requested"] == facts["selection"]["resolved"]
    assert facts["cost"]["flops"] > 0 and facts["cost"]["bytes"] > 0 and facts["first_call_us"] > 0
    assert {item.metric for item in outcome.measurements} == {"convert", "plan", "first_call"}
    for _ in range(3):
        (latency,) = it.window()
        assert (latency.metric, latency.unit, latency.clock) == ("latency", "us", "wall") and latency.value > 0
    finish = it.finish()
    assert finish.status is Status.OK, finish.message
    assert finish.facts["timed_outputs_checked"] >= 1
    for reported in (outcome, finish):
        assert decode_reply(encode(Reply(1, reported))).outcome == reported, "facts are JSON"


def test_both_arms_answer_the_same_question() -> None:
    trials = [trial(arm("sdpa-gather")), trial(arm("blocked", page_size=64))]
    for it in trials:
        assert it.prepare().status is Status.OK
    first, second = (it._ready().calls for it in trials)
    with torch.inference_mode():
        for own, theirs in zip(first, second, strict=True):
            assert torch.equal(own.inputs.q, theirs.inputs.q)
            torch.testing.assert_close(own(), theirs(), rtol=1e-4, atol=1e-6)


def test_unsupported_lists_all_reasons() -> None:
    outcome = trial(arm("triton-paged", page_size=24)).prepare()
    assert outcome.status is Status.UNSUPPORTED
    assert "device" in outcome.message and "page_size" in outcome.message
    assert outcome.facts["selection"]["requested"] == "triton-paged"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("def it(*a): raise ValueError('two\\nlines')", Status.FAILED, "ValueError: two lines"),
        ("def it(*a): raise MemoryError('none')", Status.OUT_OF_MEMORY, "none"),
        ("def it(*a): return torch.empty(2**50)", Status.OUT_OF_MEMORY, "memory"),
        ("def it(*a): raise torch.OutOfMemoryError('CUDA')", Status.OUT_OF_MEMORY, "CUDA"),
        ("def it(*a): raise NotImplementedError('not this')", Status.UNSUPPORTED, "not this"),
        ("def it(q, *a): return torch.full_like(q, float('nan'))", Status.INCORRECT, "NaN"),
        ("def it(*a): return right(*a)[:1]", Status.INCORRECT, "shape"),
        ("def it(*a): return right(*a).double()", Status.INCORRECT, "dtype"),
        ("def it(*a): return right(*a).to('meta')", Status.INCORRECT, "device"),
        ("def it(q, *a): return torch.zeros_like(q)", Status.INCORRECT, "relative L2"),
        ("it = 5", Status.UNSUPPORTED, "mine.py"),
        ("def it(q, *a):\n    r = right(q, *a)\n    q.zero_()\n    return r", Status.INCORRECT, "changed"),
    ],
)
def test_a_bad_implementation_becomes_a_status_and_one_line(
    tmp_path: Path, body: str, status: Status, said: str
) -> None:
    outcome = plugin(tmp_path, body).prepare()
    assert outcome.status is status and said in outcome.message and "\n" not in outcome.message


def test_a_missing_plugin_or_model_is_a_status_too() -> None:
    assert trial(arm("nowhere.py:it")).prepare().status is Status.UNSUPPORTED
    assert "no implementation" in trial(arm("nothing")).prepare().message


def test_an_implementation_that_cheats_once_it_is_timed_is_caught(tmp_path: Path) -> None:
    """Right as long as anyone looks, then the answer of other inputs."""
    it = plugin(
        tmp_path,
        "kept = []\n"
        "def it(*a):\n"
        "    answer = right(*a)\n"
        "    kept.append(answer)\n"
        "    return kept[0].clone() if timed() and kept[0].shape == answer.shape else answer\n",
    )
    assert it.prepare().status is Status.OK
    (tmp_path / "timed").touch()
    it.window()
    outcome = it.finish()
    assert outcome.status is Status.INCORRECT and "timed call" in outcome.message


def test_a_timed_call_that_writes_into_the_cache_is_caught(tmp_path: Path) -> None:
    it = plugin(
        tmp_path,
        "def it(q, kv, *a):\n    answer = right(q, kv, *a)\n    if timed(): kv.k[0].zero_()\n    return answer\n",
    )
    assert it.prepare().status is Status.OK
    (tmp_path / "timed").touch()
    it.window()
    outcome = it.finish()
    assert outcome.status is Status.INCORRECT and "changed" in outcome.message


def test_a_window_before_prepare_is_refused() -> None:
    with pytest.raises(MeasurementError, match="not prepared"):
        trial(arm()).window()
    assert trial(arm()).finish().status is Status.FAILED


OFF = """
def it(q, kv, batch, spec):
    out = right(q, kv, batch, spec)
    if ON: out = out * (1 + FACTOR)  # every row is off by FACTOR
    return out
"""


@pytest.mark.parametrize(
    ("dtype", "off", "stricter"),
    [("float32", 7e-7, 5e-7), ("bfloat16", 2.5e-3, 2.4e-3)],
)
@pytest.mark.parametrize("when", ["True", "timed()"])
def test_an_error_between_the_rule_s_limit_and_the_default_fails_only_under_the_rule(
    tmp_path: Path, dtype: str, off: float, stricter: float, when: str
) -> None:
    """Both in the correctness phase and in calls that are right until they are timed."""
    (tmp_path / "mine.py").write_text(PLUGIN_HEAD + OFF.replace("ON", when).replace("FACTOR", repr(off)))

    def ended(tolerance: dict[str, Tolerance]) -> tuple[Status, str]:
        (tmp_path / "timed").unlink(missing_ok=True)
        it = trial(arm("mine.py:it", root=str(tmp_path), dtype=dtype, tolerance=tolerance))
        outcome = it.prepare()
        if outcome.status is Status.OK:
            (tmp_path / "timed").touch()
            it.window()
            outcome = it.finish()
        return outcome.status, outcome.message

    assert ended({})[0] is Status.OK
    other = "bfloat16" if dtype == "float32" else "float32"
    assert ended({other: Tolerance(kernel=1e-9)})[0] is Status.OK
    assert ended({dtype: Tolerance(attention=1e-9, logits=1e-9)})[0] is Status.OK
    status, message = ended({dtype: Tolerance(kernel=stricter)})
    assert status is Status.INCORRECT
    assert f"limit {stricter:.2e}" in message and "the limit is the rule's: rule.tolerance" in message


def test_a_large_error_is_not_blamed_on_the_rule_s_limit_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN_HEAD + "def it(q, *a): return torch.zeros_like(q)")
    found = trial(arm("mine.py:it", root=str(tmp_path), tolerance={"bfloat16": Tolerance(kernel=1e-3)})).prepare()
    assert found.status is Status.INCORRECT and "rule.tolerance" not in found.message


@pytest.mark.parametrize("op", ["norm.rmsnorm", "gemm.qkv"])
def test_every_operation_is_held_to_the_rule_s_limit(op: str) -> None:
    one = arm(kernels={"norm": "torch-rmsnorm", "gemm": "torch-gemm"})
    assert trial(one, "4*1@127", op).prepare().status is Status.OK
    strict = one.model_copy(update={"tolerance": {"float32": Tolerance(kernel=1e-10)}})
    found = trial(strict, "4*1@127", op).prepare()
    assert found.status is Status.INCORRECT and "rule.tolerance" in found.message


def test_a_cache_written_while_the_timer_warms_up_is_a_changed_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is fast warms up with many calls: what they did must not become what is compared with."""
    it = plugin(
        tmp_path,
        "def it(q, kv, batch, spec):\n    if timed(): kv.v[0].zero_()\n    return right(q, kv, batch, spec)\n",
    )
    marker = tmp_path / "timed"

    def warmed_up(*args: Any, **named: Any) -> Any:
        marker.touch()
        try:
            return prepared_timer(*args, **named)
        finally:
            marker.unlink()

    monkeypatch.setattr("kbench.measure.kernel.prepared_timer", warmed_up)
    assert it.prepare().status is Status.OK
    it.window()
    finished = it.finish()
    assert finished.status is Status.INCORRECT
    assert finished.message == "timed calls changed what they may only read"
