"""Who attends in an engine: chosen apart for prefill, decode and draft, two engines of one process apart, and whoever
changes after it was chosen is seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kbench.engine.core import EngineConfig
from kbench.engine.runner import Engine, Runner
from kbench.errors import UsageError
from kbench.kernels.identity import Identity
from kbench.kernels.registry import load
from kbench.selection import SelectionRefused
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)
PROMPTS = [[5, 6, 7, 8] * 9, [1, 2, 3]]

MINE = """
import torch
from kbench.kernels.registry import load

class Other:
    def __init__(self): self.inner = load("reference", "attention.decode")
    def convert(self, kv): return kv
    def plan(self, batch, spec, kv): return self.inner.plan(batch, spec, kv)
    def run(self, q, kv, plan, out): return self.inner.run(q, kv, plan, out)

class Changes(Other):
    "Replaces its own method after the first call."
    def run(self, q, kv, plan, out):
        self.run = self.later
        return self.inner.run(q, kv, plan, out)
    def later(self, q, kv, plan, out):
        return self.inner.run(q, kv, plan, out)

class Compiles(Other):
    "Keeps what it made at its first call, as honest code does."
    made = None
    def run(self, q, kv, plan, out):
        if self.made is None:
            self.made = self.inner.run
        return self.made(q, kv, plan, out)
"""


@pytest.fixture
def make_arm(tmp_path: Path) -> Callable[..., Arm]:
    (tmp_path / "mine.py").write_text(MINE)

    def make(**changes: Any) -> Arm:
        keys = {
            "name": "arm",
            "model": ModelSettings(preset="tiny"),
            "engine": EngineSettings(kv_tokens=2_048, max_batched_tokens=256),
            "prefill": "sdpa",
            "decode": "sdpa-gather",
            "page_size": 16,
            "layout": "NHD",
            "seed": 1,
            "root": str(tmp_path),
        }
        return Arm.model_validate(keys | changes)

    return make


def resolved(engine: Engine) -> dict[str, str]:
    return {phase: record.resolved for phase, record in engine.runner.selection.items()}


def test_two_engines_of_one_process_resolve_apart(make_arm: Callable[..., Arm]) -> None:
    custom = {"registered": {"custom@attention.decode": "mine.py:Other"}}
    first = Engine(make_arm(decode="custom", **custom), "cpu")
    second = Engine(make_arm(decode="blocked"), "cpu", decoder=first.runner.decoder)
    third = Engine(make_arm(decode="auto", prefill="auto"), "cpu", decoder=first.runner.decoder)
    assert resolved(first) == {"decode": "custom", "prefill": "sdpa"}
    assert resolved(second) == {"decode": "blocked", "prefill": "sdpa"}
    assert resolved(third) == {"decode": "sdpa-gather", "prefill": "sdpa"}
    wanted = first.generate(PROMPTS, 6)
    assert second.generate(PROMPTS, 6) == wanted == third.generate(PROMPTS, 6)
    with pytest.raises(UsageError, match=r"slot .custom. of attention\.decode is empty"):
        Engine(make_arm(decode="custom"), "cpu")


def test_a_draft_attends_with_what_is_named_for_drafts(make_arm: Callable[..., Arm]) -> None:
    arm = make_arm(draft={"prefill": "reference", "decode": "blocked"})
    target, draft = Engine(arm, "cpu"), Engine(arm, "cpu", role="draft")
    assert resolved(target) == {"decode": "sdpa-gather", "prefill": "sdpa"}
    assert resolved(draft) == {"decode": "blocked", "prefill": "reference"}
    assert {record.role for record in draft.runner.selection.values()} == {"draft"}
    assert draft.generate(PROMPTS, 6) == target.generate(PROMPTS, 6)
    alike = Engine(make_arm(), "cpu", role="draft")
    assert resolved(alike) == resolved(target)


def test_prefill_and_decode_are_refused_together_with_all_reasons(make_arm: Callable[..., Arm]) -> None:
    with pytest.raises(SelectionRefused) as caught:
        Engine(make_arm(decode="triton-paged", prefill="sdpa-flash", page_size=24), "cpu")
    assert [problem.what.partition(" cannot")[0] for problem in caught.value.problems] == ["triton-paged", "sdpa-flash"]
    assert "triton-paged: page_size: wants 24, has a multiple of 16" in caught.value.reasons
    assert "sdpa-flash: dtype: wants float32, has float16 or bfloat16" in caught.value.reasons


def test_a_fallback_serves_one_phase_and_leaves_the_other(make_arm: Callable[..., Arm]) -> None:
    entry = {"op": "attention.decode", "use": "blocked"}
    engine = Engine(make_arm(decode="triton-paged", policy="fallback", fallback=(entry,)), "cpu")
    record = engine.runner.selection["decode"]
    assert (record.requested, record.resolved, record.drift) == ("triton-paged", "blocked", False)
    assert [reason.field for reason in record.candidates[0].reasons] == ["device"]
    assert not engine.runner.selection["prefill"].fell_back


@pytest.mark.parametrize(("name", "changed"), [("Other", []), ("Compiles", []), ("Changes", ["run()"])])
def test_whoever_replaces_its_code_after_it_was_chosen_is_drift(
    make_arm: Callable[..., Arm], name: str, changed: list[str]
) -> None:
    engine = Engine(make_arm(decode=f"mine.py:{name}"), "cpu")
    assert not engine.runner.selection["decode"].drift
    engine.generate(PROMPTS, 4)
    record = engine.runner.selection["decode"]
    assert [mutation.field for mutation in record.mutations] == changed
    assert record.drift == bool(changed)


def test_a_pool_that_is_not_what_the_arm_asked_for_is_drift(make_arm: Callable[..., Arm]) -> None:
    arm = make_arm()
    other = EngineConfig.from_arm(make_arm(page_size=32))
    record = Runner(arm, "cpu", other).selection["decode"]
    assert [str(mutation) for mutation in record.mutations] == ["page_size changed from 16 to 32"]


def test_a_class_that_is_patched_is_another_class() -> None:
    made = load("blocked", "attention.decode")
    before = Identity.of(made)
    assert before.changes(made) == ()
    kind = type(made)
    kept = kind.run
    try:
        kind.run = lambda self, q, kv, plan, out: out  # type: ignore[method-assign,assignment]
        assert [change.field for change in before.changes(made)] == ["run()"]
    finally:
        kind.run = kept  # type: ignore[method-assign]
    assert before.changes(made) == ()


def test_a_plugin_that_cannot_be_imported_is_a_reason_under_fallback(
    make_arm: Callable[..., Arm], tmp_path: Path
) -> None:
    (tmp_path / "gone.py").write_text("import no_such_library\ndef fn(q, kv, batch, spec): ...\n")
    entry = {"op": "attention.decode", "use": "mine.py:Other"}
    engine = Engine(make_arm(decode="gone.py:fn", policy="fallback", fallback=(entry,)), "cpu")
    record = engine.runner.selection["decode"]
    assert record.resolved == "mine.py:Other" and "no_such_library" in str(record.candidates[0].reasons[0])
    with pytest.raises(UsageError, match=r"gone\.py.*no_such_library"):
        Engine(make_arm(decode="gone.py:fn"), "cpu")
    shutil.rmtree(tmp_path)
