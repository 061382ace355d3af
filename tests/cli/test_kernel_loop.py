"""The development loop: an operation and two implementations on the command line, a case in words, its command."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Said, kbench

MINE = "def mine(x, weight, eps):\n    return x * weight\n"
ANY = {"--op": "norm.rmsnorm", "--baseline": "torch-rmsnorm", "--points": "1*1@127 rows=3,hidden=64"}


def loop(tmp_path: Path, **options: str) -> Said:
    (tmp_path / "mine.py").write_text(MINE)
    given = ANY | {"--impl": f"{tmp_path / 'mine.py'}:mine"} | {f"--{name}": value for name, value in options.items()}
    words = [word for option, value in given.items() if value for word in (option, value)]
    return kbench("kernel", *words, "--device", "cpu", "--out", tmp_path / "results", "--json")


def test_an_operation_is_measured_without_a_suite_and_locks_nothing(tmp_path: Path) -> None:
    said = loop(tmp_path)
    assert said.code == 0, said.err
    cases = {row["case"] for row in said.document["cases"]}
    assert cases == {"kernel/norm.rmsnorm/small/1*1@127", "kernel/norm.rmsnorm/small/hidden=64,rows=3"}
    assert {row["variant"] for row in said.document["cases"]} == {"baseline", "candidate"}
    assert not list((tmp_path / "results").rglob("ledger.jsonl"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": "norm.magic"}, "no operation 'norm.magic'"),
        ({"impl": "magic"}, "no implementation 'magic'"),
        ({"impl": "gone.py:mine"}, "no plug-in file"),
        ({"impl": "mine.py"}, "names no function"),
        ({"points": "rows=3"}, "cannot be measured"),
        ({"points": "1*1@127,hidden=x"}, "is no number"),
        ({"points": "rows=3,hidden=4,hidden=5"}, "named twice"),
        ({"model": "gpt"}, "no model preset"),
        ({"dtype": "int8"}, "dtype"),
        ({"cache": "lukewarm"}, "cache"),
        ({"op": ""}, "nothing to measure"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, options: dict[str, str], said: str) -> None:
    found = loop(tmp_path, **options)
    assert found.code == 2
    assert found.err.count("\n") == 1 and said in found.err, found.err
    assert found.document["exit_code"] == 2


def test_a_suite_and_options_exclude_each_other(folder: Path) -> None:
    said = kbench("kernel", folder / "suite.toml", "--op", "norm.rmsnorm")
    assert said.code == 2 and "a suite says what is compared" in said.err


def test_a_case_is_explained_in_words_and_repeated_by_a_command(folder: Path) -> None:
    out = ("--out", folder / "results")
    said = kbench("explain", folder / "suite.toml", "attention.decode", *out, "--json")
    assert said.code == 0, said.err
    document = said.document
    assert document["axes"]["q_heads"] == 8 and document["case"] == "kernel/attention.decode/tiny/1*1@127"
    assert "paged KV cache" in document["what"][0] and "one head" in document["why"][0]
    again = kbench("repro", folder / "suite.toml", "attention.decode", *out, "--json").document
    assert again["command"].startswith("kbench kernel") and "'kernel/attention.decode/tiny/1*1@127'" in again["command"]


@pytest.mark.parametrize(("text", "said"), [("nothing-like-it", "no case contains"), ("tiny", "2 cases contain")])
def test_a_case_must_be_one(folder: Path, text: str, said: str) -> None:
    found = kbench("repro", folder / "suite.toml", text)
    assert found.code == 2 and said in found.err
