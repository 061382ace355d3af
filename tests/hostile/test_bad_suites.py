"""A malformed suite: one line a problem, with its place, and nothing that follows from another problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kbench.errors import SuiteError, TraceError, UsageError
from kbench.suite import load_suite
from kbench.traces.schema import write_trace
from kbench.traces.synth import synthesise


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "\n[x]\na = " + "[" * 5_000 + "]" * 5_000, "nested too deeply"),
        ("looks = [2]", "looks = [true]", "valid integer"),
        ("margin = 5.0", "margin = nan", "finite"),
        ("looks = [2]", "looks = [2, 99999999999]", "at most 1000"),
        ("[kernel]", "[[kernel]]", "object"),
        ("page_size = 16", "page_sise = 16", "did you mean page_size?"),
        ("[model]", "[model]\nzzz = 1", "one of preset, checkpoint, layers, dtype"),
        ('preset = "nano"\nlayers = 1', 'checkpoint = "nowhere"', "no config.json"),
        ('id = "all"', 'id = "all"\nwhen = { context = [500, 100] }', "[lowest, highest]"),
        ('"blocked"', '"mine.py"', "names no function"),
        ('"blocked"', '"mine.py:"', "names no function"),
        ('"blocked"', '"nofile.py:fn"', "no plug-in file"),
        ('"blocked"', '"broken.py:fn"', "broken.py:2 is not Python"),
        ('"blocked"', '"binary.py:fn"', "is not Python"),
        ('"blocked"', '"mine.py:nosuch"', "has no 'nosuch'"),
    ],
)
def test_one_problem_is_one_line(write: Callable[..., Path], old: str, new: str, said: str) -> None:
    path = write(old, new)
    (path.parent / "mine.py").write_text("def fn(q, kv, batch, spec):\n    return q\n")
    (path.parent / "broken.py").write_text("x = 1\ndef fn(:\n")
    (path.parent / "binary.py").write_bytes(b"\x00\x01")
    with pytest.raises(SuiteError) as caught:
        load_suite(path)
    [problem] = caught.value.problems
    assert said in str(problem)
    assert problem.line is not None or "deeply" in said


@pytest.mark.parametrize(
    "text",
    [
        "def fn(q, kv, batch, spec): return q",
        "from elsewhere import fn",
        "from elsewhere import *",
        "fn = make()",
        "globals()['f' + 'n'] = 1",
    ],
)
def test_a_plugin_that_may_have_the_name_is_not_refused(write: Callable[..., Path], text: str) -> None:
    path = write('"blocked"', '"mine.py:fn"')
    (path.parent / "mine.py").write_text(text)
    assert load_suite(path).candidate.decode == "mine.py:fn"


def test_a_byte_order_mark_is_no_error(write: Callable[..., Path]) -> None:
    path = write()
    path.write_text("\ufeff" + path.read_text(), encoding="utf-8")
    assert load_suite(path).suite.claim.name == "hostile"


def test_a_trace_for_a_suite_without_a_workload_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"no \[workload\]"):
        load_suite(write(), traces={"t": "any.parquet"})


def test_an_arm_survives_a_change_of_folder(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    monkeypatch.chdir(path.parent)
    assert Path(load_suite(Path(path.name)).candidate.root).is_absolute()


def test_a_scale_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="scale"):
        synthesise("chat", 5, 1, scale=float("nan"))


def test_a_trace_is_not_written_over_a_folder(tmp_path: Path) -> None:
    trace = synthesise("chat", 5, 1)
    for place in (tmp_path, Path()):
        with pytest.raises(TraceError, match="a folder"):
            write_trace(trace, place)
