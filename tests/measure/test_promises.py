"""What implementations promise to be seen by: kept by every honest one, broken by one that lets another compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kbench.catalog import Case, Implementation, implementations
from kbench.kernels.declare import implementation
from kbench.kernels.registry import load
from kbench.measure.kernel import KernelTrial
from kbench.measure.promises import held, promises
from kbench.measure.selftest import honest_shape
from kbench.measure.step import StepTrial
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

torch.set_num_threads(1)
QUICK = Measure(window_steps=1, window_ms=0.1)
COMPILED = ("compile", "compiled")
PROMISING = [
    (found, op)
    for found in implementations()
    for op in found.ops
    if promises(found, "cpu") and "cpu" in found.devices and not found.requires and not found.name.startswith(COMPILED)
]


def make_arm(op: str, name: str, preset: str, root: str = ".", **changes: object) -> Arm:
    attention = {"prefill": "reference", "decode": "reference"}
    phase = op.removeprefix("attention.")
    chosen = {phase: name} if phase in attention else {"kernels": {op: name}}
    keys = {"name": "arm", "model": ModelSettings(preset=preset), "engine": EngineSettings(), **attention, **chosen,
            "page_size": 16, "layout": "NHD", "seed": 1, "root": root, **changes}  # fmt: skip
    return Arm.model_validate(keys)


@pytest.mark.parametrize(("found", "op"), PROMISING, ids=lambda one: getattr(one, "name", one))
def test_every_honest_implementation_is_seen_as_itself(found: Implementation, op: str) -> None:
    model, shape = honest_shape(op)
    dtype = "float32" if "float32" in found.dtypes else found.dtypes[0]
    arm = make_arm(op, found.name, model, model=ModelSettings(preset=model, dtype=dtype))
    traced = KernelTrial(Case("kernel", op, model, shape), arm, "cpu", QUICK, 1).trace()
    assert traced.status is Status.OK, traced.message
    assert traced.facts["selection"]["observed"] == found.name, traced.facts


def test_most_that_run_on_a_cpu_can_be_told_from_others() -> None:
    families = {op.partition(".")[0] for _, op in PROMISING}
    assert families >= {"attention", "gemm", "norm", "sampling", "moe"}


FACTS = Implementation("mine", ("gemm",), "x:y", "")


@pytest.mark.parametrize(
    ("facts", "names", "device", "problem"),
    [
        ({"expects_kernel": "aten::mm"}, ["aten::mm"], "cpu", ""),
        ({"expects_kernel": "aten::mm"}, ["aten::bmm"], "cpu", "no aten::mm among aten::bmm"),
        ({"expects_kernel": "_tile"}, ["aten::bmm"], "cpu", None),
        ({"expects_kernel": "_tile"}, ["void_tile_1"], "cuda", ""),
        ({"expects_kernel": "_tile"}, ["ampere_gemm"], "cuda", "no _tile among ampere_gemm"),
        ({"expects_operator": "scaled"}, ["kernel"], "cuda", None),
        ({"never": ("scaled",)}, ["kernel"], "cuda", None),
        ({"never": ("scaled",)}, ["aten::mm"], "cuda", ""),
        ({"expects_operator": "scaled"}, ["aten::mm"], "cuda", "no scaled among aten::mm"),
        ({"never": ("scaled",)}, ["aten::mm", "aten::scaled_x"], "cpu", "aten::scaled_x"),
        ({"never": ("scaled",)}, [], "cpu", "nothing was seen"),
    ],
)
def test_a_promise_is_held_against_names(
    facts: dict[str, object], names: list[str], device: str, problem: str | None
) -> None:
    assert held(replace(FACTS, **facts), names, device) == problem  # type: ignore[arg-type]


def test_kernels_of_others_keep_a_promise_and_break_none() -> None:
    made = replace(FACTS, expects_kernel="_tile", never=("cudnn",))
    assert held(made, ["aten::mm"], "cuda", ["void_tile", "cudnn_x"]) == ""


def test_a_declaration_of_ones_own_has_the_same_keys() -> None:
    @implementation("gemm", expects_operator="aten::mm", never=("bmm",), roles=("target",))
    def mine(a: object, b: object) -> object:
        return None

    made: Implementation = mine.__kbench__  # type: ignore[attr-defined]
    assert (made.expects_operator, made.never, made.roles) == ("aten::mm", ("bmm",), ("target",))


# ------------------------------------------------------------------------------------- hostile implementations

HOSTILE = """
import torch
from kbench.kernels.declare import implementation
from kbench.kernels.registry import load

class Base:
    def __init__(self):
        self.mine, self.other = load("blocked", "attention.decode"), load("sdpa-gather", "attention.decode")
        self.calls = 0
    def convert(self, kv): return kv
    def plan(self, batch, spec, kv): return self.mine.plan(batch, spec, kv), self.other.plan(batch, spec, kv)

@implementation("attention.decode", never=("scaled_dot_product",))
class Delegates(Base):
    def run(self, q, kv, plan, out): return self.other.run(q, kv, plan[1], out)

@implementation("attention.decode")
class Turns(Base):
    "Itself for the first calls, somebody else ever after; the same code decides."
    def run(self, q, kv, plan, out):
        self.calls += 1
        if self.calls <= 8:
            return self.mine.run(q, kv, plan[0], out)
        return self.other.run(q, kv, plan[1], out)

@implementation("attention.decode", dtypes=("bfloat16",))
class Lies(Base):
    "Can do float32, and says that it cannot."
    def run(self, q, kv, plan, out): return self.mine.run(q, kv, plan[0], out)

@implementation("attention.decode", page_multiple_of=1)
class Boasts(Base):
    "Says that it does any page, and does multiples of 16."
    def plan(self, batch, spec, kv):
        if kv.page_size % 16: raise RuntimeError("pages of 16, please")
        return super().plan(batch, spec, kv)
    def run(self, q, kv, plan, out): return self.mine.run(q, kv, plan[0], out)
"""


def step(tmp_path: Path, name: str, **changes: object) -> StepTrial:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    arm = make_arm("attention.decode", f"hostile.py:{name}", "tiny", str(tmp_path), **changes)
    return StepTrial(Case("step", "step", "tiny", "2*1@70"), arm, "cpu", QUICK, 1)


@pytest.mark.parametrize(
    ("name", "said"),
    [("Delegates", "not what it promises: aten::"), ("Turns", "not the same throughout: first ")],
)
def test_who_lets_another_compute_is_seen(tmp_path: Path, name: str, said: str) -> None:
    traced = step(tmp_path, name).trace()
    assert traced.facts["selection"]["decode"]["observed"].startswith(said)


def test_what_a_plugin_says_of_itself_is_believed_until_it_shows(tmp_path: Path) -> None:
    refused = step(tmp_path, "Lies").prepare()
    assert refused.status is Status.UNSUPPORTED and refused.facts["refused"]
    assert refused.facts["reasons"] == ["hostile.py:Lies: dtype: wants float32, has bfloat16"]
    boasted = step(tmp_path, "Boasts", page_size=24).prepare()
    assert boasted.status is Status.FAILED and "pages of 16, please" in boasted.message


def test_code_that_promises_nothing_is_not_called_seen(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(
        "from kbench.kernels.registry import load\n"
        "def fn(q, kv, batch, spec):\n"
        "    it = load('reference', 'attention.decode')\n"
        "    return it.run(q, kv, it.plan(batch, spec, kv), q.clone())\n"
    )
    arm = make_arm("attention.decode", "plain.py:fn", "tiny", str(tmp_path))
    selection = StepTrial(Case("step", "step", "tiny", "2*1@70"), arm, "cpu", QUICK, 1).trace().facts["selection"]
    assert (selection["decode"]["resolved"], selection["decode"]["observed"]) == ("plain.py:fn", "")
    assert load("reference", "attention.decode").name == "reference"
