from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from kbench.catalog import OPS, implementations
from kbench.errors import UsageError
from kbench.kernels.base import Attention, TensorKernel
from kbench.kernels.registry import PAGED, load

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize("name", [impl.name for impl in implementations()])
def test_every_catalogue_entry_leads_to_an_implementation_of_its_name(name: str) -> None:
    """What needs a package that is not here says so; only names from this repository may do without."""
    entry = next(impl for impl in implementations() if impl.name == name)
    op = entry.ops[0] if entry.ops[0] in OPS else f"{entry.ops[0]}.qkv"
    absent = [package for package in entry.requires if importlib.util.find_spec(package) is None]
    if absent or ("Triton" in entry.entry and not HAS_TRITON):
        with pytest.raises(UsageError, match="needs"):
            load(name, op)
        return
    made = load(name, op)
    assert isinstance(made, Attention if op in PAGED else TensorKernel) and made.name == name


def test_an_unknown_name_or_phase_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="sdpa-gather"):
        load("nothing", "attention.decode")
    with pytest.raises(UsageError, match="one of reference, sdpa"):
        load("blocked", "attention.prefill")


def test_triton_is_not_imported_for_other_kernels() -> None:
    code = (
        "import sys; from kbench.kernels.registry import load; import kbench.kernels.triton_paged; "
        "load('blocked', 'attention.decode'); sys.exit('kbench.kernels.paged_decode' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
