"""What a plug-in declares is checked before anything of it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbench import catalog
from kbench.catalog import Case
from kbench.errors import UsageError
from kbench.kernels.declare import declared, implementation
from kbench.kernels.registry import load
from kbench.measure.kernel import KernelTrial
from kbench.protocol import Status
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

MINE = """
from kbench.kernels.declare import implementation

@implementation("norm.rmsnorm", dtypes=("bfloat16",), devices=("cuda",))
def mine(x, weight, eps):
    raise AssertionError("it must not be called")
"""


def test_a_declaration_travels_with_the_function(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    found = declared(load("mine.py:mine", "norm.rmsnorm", tmp_path))
    assert found is not None and found.ops == ("norm.rmsnorm",) and found.dtypes == ("bfloat16",)
    assert declared(len) is None


def test_all_reasons_at_once_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    arm = Arm(
        name="it",
        model=ModelSettings(preset="tiny"),
        engine=EngineSettings(),
        prefill="reference",
        decode="reference",
        page_size=16,
        layout="NHD",
        seed=1,
        kernels={"norm.rmsnorm": "mine.py:mine"},
        root=str(tmp_path),
    )
    case = Case("kernel", "norm.rmsnorm", "tiny", "rows=3,hidden=64")
    outcome = KernelTrial(case, arm, "cpu", Measure(), 1).prepare()
    assert outcome.status is Status.UNSUPPORTED
    assert "device: wants cpu" in outcome.message and "dtype: wants float32" in outcome.message


def test_an_unknown_operation_is_refused_when_declared() -> None:
    with pytest.raises(UsageError, match="no operation"):
        implementation("norm.magic")


def test_an_installed_package_brings_implementations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "strange_norms-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange-norms\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kbench.kernels]\nstrange@norm.rmsnorm = strange_norms:fn\nodd@no.op = strange_norms:fn\nsdpa@rope = x:y\n"
    )
    (tmp_path / "strange_norms.py").write_text("def fn(x, weight, eps): return x * weight\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    catalog.registry.cache_clear()
    try:
        assert "strange" in [found.name for found in catalog.implementations("norm.rmsnorm")]
        assert catalog.implementation("sdpa").summary != "from strange-norms"
        with pytest.raises(UsageError, match="no implementation 'odd'"):
            catalog.implementation("odd")
        made = load("strange", "norm.rmsnorm")
        assert made.run({"x": 2, "weight": 3, "eps": 0}, None, ()) == 6
    finally:
        catalog.registry.cache_clear()
