from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kbench.catalog import parse_point
from kbench.errors import UsageError
from kbench.kernels.registry import is_plugin, load
from kbench.ops.attention import AttentionSpec
from kbench.ops.base import InputSettings
from kbench.protocol import Status

from .holding import hold

OP = "attention.decode"
FUNCTION = """
import torch
from kbench.ops.attention import same_dtype
def attend(q, kv, batch, spec):
    return same_dtype(q, kv, batch, spec, torch.empty_like(q))
"""
CLASS = """
import torch
from dataclasses import replace
from kbench.ops.attention import same_dtype
class Attend:
    def convert(self, kv):
        k, v = (t.transpose(1, 2).contiguous() for t in (kv.k, kv.v))
        return replace(kv, k=k, v=v, layout="HND" if kv.layout == "NHD" else "NHD")
    def plan(self, batch, spec, kv):
        return batch, spec
    def run(self, q, kv, plan, out):
        return same_dtype(q, kv, *plan, out)
"""


def write(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return "mine.py"


@pytest.mark.parametrize(("text", "name"), [(FUNCTION, "attend"), (CLASS, "Attend"), (CLASS + "it = Attend()", "it")])
def test_both_forms_load_and_are_right(tmp_path: Path, text: str, name: str) -> None:
    made = load(f"{write(tmp_path, text)}:{name}", OP, tmp_path)
    assert made.name == name
    settings = InputSettings(16, "NHD", torch.float32, torch.device("cpu"), 1)
    assert hold(made, OP, parse_point("2*1@40"), AttentionSpec(4, 2, 16), settings).status is Status.OK


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (FUNCTION, "other", "no 'other'"),
        ("def attend(q, kv): ...", "attend", "does not take 4 arguments"),
        ("attend = 3", "attend", "is int"),
        ("class Attend:\n    def run(self, q, kv, plan, out): ...", "Attend", "lacks convert, plan"),
        (CLASS + "    def __init__(self, size): ...", "Attend", "cannot be made"),
        (CLASS.replace("def plan(self, batch, spec, kv)", "def plan(self, batch)"), "Attend", "Attend.plan"),
        ("def attend(:", "attend", "SyntaxError"),
        ("import does_not_exist_anywhere", "attend", "does_not_exist_anywhere"),
        ("raise SystemError('on\\nimport')", "attend", "SystemError: on import"),
    ],
)
def test_malformed_plugins_say_what_is_wrong_and_where(tmp_path: Path, text: str, name: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(f"{write(tmp_path, text)}:{name}", OP, tmp_path)
    message = str(caught.value)
    assert said in message and "mine.py" in message and "\n" not in message
    assert caught.value.problems[0].remedy


@pytest.mark.parametrize("reference", ["missing.py:attend", "mine.py", "mine.py:"])
def test_a_reference_that_leads_nowhere(tmp_path: Path, reference: str) -> None:
    write(tmp_path, FUNCTION)
    with pytest.raises(UsageError):
        load(reference, OP, tmp_path)


def test_references_are_files_or_names() -> None:
    assert is_plugin("a/b.py:f") and is_plugin("b.py") and not is_plugin("sdpa-gather")
