from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from kbench.catalog import implementations
from kbench.errors import UsageError
from kbench.kernels.base import Attention
from kbench.kernels.registry import load

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.parametrize("name", [impl.name for impl in implementations()])
def test_every_catalogue_entry_leads_to_an_implementation_of_its_name(name: str) -> None:
    entry = next(impl for impl in implementations() if impl.name == name)
    if name == "triton-paged" and not HAS_TRITON:
        with pytest.raises(UsageError, match="not installed"):
            load(name, entry.ops[0])
        return
    made = load(name, entry.ops[0])
    assert isinstance(made, Attention) and made.name == name


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
