"""Annotations, step summary, JUnit and exit codes: the worst first, within limits, deaf to hostile names."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbench.decide import ClauseResult, ClauseStatus, Decision, RegimeVerdict, RunCount, Verdict
from kbench.errors import ExitCode, MeasurementError, Problem, UsageError
from kbench.report import ci
from kbench.report.junit import junit, junit_error, write_junit

from .conftest import HOSTILE

GITHUB = HOSTILE + "\r\n::error::x\n##[add-mask]y %0A a:b,c \ufffe\ud800\x0b]]>"
VERDICTS = list(Verdict)


def regime(name: str, verdict: Verdict, *reasons: str) -> RegimeVerdict:
    clause = ClauseResult("step", "step_time", "superiority", "", ClauseStatus.PASS, 0.1, 0.09, math.nan, 0.02, "said")
    return RegimeVerdict(name, verdict, (clause,), reasons or (f"because of {name}",))


def decision(*regimes: RegimeVerdict, name: str = "practice") -> Decision:
    return Decision(name, "f" * 64, regimes, RunCount(3, 1, 0), 6, 0.025)


def of(*verdicts: Verdict) -> Decision:
    return decision(*(regime(f"r{number}", verdict) for number, verdict in enumerate(verdicts)))


def parsed(command: str) -> tuple[str, dict[str, str], str]:
    """As GitHub's runner reads a command: one line, `::name key=value,…::data`, unescaped after splitting."""
    assert "\n" not in command and "\r" not in command
    match = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", command)
    assert match is not None

    def plain(text: str) -> str:
        for escaped, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
            text = text.replace(escaped, char)
        return text

    properties = dict(item.split("=", 1) for item in match[2].split(","))
    return match[1], {name: plain(value) for name, value in properties.items()}, plain(match[3])


def test_annotations_are_worst_first_at_their_lines_and_speak_when_all_is_well() -> None:
    given_order = of(Verdict.ENABLE, Verdict.INCONCLUSIVE, Verdict.DISABLE, Verdict.MISSING, Verdict.INVALID)
    lines = {f"r{number}": 10 + number for number in range(5)}
    found = [parsed(command) for command in ci.github_annotations(given_order, "suites/a.toml", lines)]
    assert [kind for kind, _, _ in found] == ["error", "error", "error", "warning", "notice"]
    assert [properties["line"] for _, properties, _ in found] == ["14", "12", "13", "11", "10"]
    assert found[1][1]["title"] == "kbench practice, r2: disable"
    assert found[1][1]["file"] == "suites/a.toml" and found[1][2] == "because of r2"
    assert parsed(ci.github_annotations(of(Verdict.ENABLE), "a.toml", {})[0])[0] == "notice"
    assert "nothing was decided" in ci.github_annotations(of(), "a.toml", {})[0]


@pytest.mark.parametrize(("regimes", "shown", "rest"), [(9, 9, 0), (10, 10, 0), (11, 10, 2), (40, 10, 31)])
def test_at_most_ten_and_the_rest_is_counted(regimes: int, shown: int, rest: int) -> None:
    verdicts = [Verdict.ENABLE, *([Verdict.DISABLE] * (regimes - 1))]
    commands = ci.github_annotations(of(*verdicts), "a.toml", {})
    assert len(commands) == shown
    assert ("more regimes in the step summary" in commands[-1]) == (rest > 0)
    if rest:
        assert parsed(commands[-1])[2].startswith(f"{rest} more regimes in the step summary: {rest - 1} disable, 1 en")


def test_a_hostile_command_stays_one_command() -> None:
    hostile = decision(regime(GITHUB, Verdict.DISABLE, GITHUB), name=GITHUB)
    (command,) = ci.github_annotations(hostile, GITHUB, {})
    kind, properties, message = parsed(command)
    assert kind == "error" and properties.keys() == {"file", "title"}
    assert "::error::x" in message and "%0A a:b,c" in message  # shown as it was, and read as text
    assert not re.search("[\x00-\x1f\u202e\ud800]", command)


@given(texts=st.lists(st.text(max_size=30), min_size=3, max_size=3))
def test_any_text_survives_the_runner_s_reading(texts: list[str]) -> None:
    _, properties, message = parsed(ci.workflow_command("error", texts[0], file="f" + texts[1], title="t" + texts[2]))
    assert properties.keys() == {"file", "title"}
    assert message == ci.clean(texts[0])
    assert (properties["file"], properties["title"]) == (ci.clean("f" + texts[1]), ci.clean("t" + texts[2]))


def test_errors_are_annotated_at_the_suite_s_line() -> None:
    problems = [Problem("unknown key", "suites/a.toml", 7, "rule.x", "remove it"), Problem("gone", "b.json", 3)]
    first, second = (parsed(command) for command in ci.error_annotations(problems, "repo/suites/a.toml"))
    assert (first[0], first[1]["line"]) == ("error", "7") and "remove it" in first[2]
    assert "line" not in second[1] and "b.json:3" in second[2]
    assert len(ci.error_annotations(problems * 9, "a.toml")) == 10


def test_the_lines_are_those_of_the_suite_and_a_changed_file_gives_none(tmp_path: Path) -> None:
    file = tmp_path / "suite.toml"
    file.write_text(
        'schema = "x"\n\n[[regime]]\nid = "r1"\n  [[regime.require]]\n  level = "step"\n\n[[regime]]\nid = "r0"\n'
    )
    assert ci.regime_lines(file, of(Verdict.ENABLE, Verdict.ENABLE)) == {"r1": 3, "r0": 8}
    assert ci.regime_lines(file, of(Verdict.ENABLE)) == {"r0": 8}
    for text in ("regime = 3", "regime = [1]", "not toml ["):
        file.write_text(text)
        assert ci.regime_lines(file, of(Verdict.ENABLE)) == {}
    assert ci.regime_lines(tmp_path / "none", of(Verdict.ENABLE)) == {}


@pytest.mark.parametrize("kinds", [k for n in range(1, 4) for k in itertools.combinations(ci.FAIL_ON, n)])
def test_fail_on_counts_the_named_kinds_and_integrity(kinds: tuple[str, ...]) -> None:
    fail_on = ci.parse_fail_on(", ".join(kinds))
    codes = {"disable": ExitCode.DISABLE, "inconclusive": ExitCode.INCONCLUSIVE, "missing": ExitCode.MISSING}
    for name, verdict in ci.FAIL_ON.items():
        assert ci.softened(of(Verdict.ENABLE, verdict), fail_on) == (codes[name] if name in kinds else ExitCode.DONE)
    everything = of(*Verdict)
    assert ci.softened(everything, fail_on) == ExitCode.INTEGRITY == ci.softened(everything)
    without = of(Verdict.INCONCLUSIVE, Verdict.MISSING, Verdict.DISABLE)
    assert ci.softened(without, fail_on) == ExitCode.worst(codes[name] for name in kinds)


@given(verdicts=st.lists(st.sampled_from(VERDICTS), max_size=5))
def test_softening_never_invents_a_failure(verdicts: list[Verdict]) -> None:
    found = of(*verdicts)
    assert ci.softened(found) == found.exit_code
    assert ci.softened(found, frozenset()) in (ExitCode.DONE, ExitCode.INTEGRITY)


@pytest.mark.parametrize("text", ["", "disable,", "enable", "invalid", "DISABLE", "missing-evidence"])
def test_fail_on_takes_nothing_else(text: str) -> None:
    with pytest.raises(UsageError, match="comma list of disable, inconclusive, missing"):
        ci.parse_fail_on(text)


def test_the_summary_is_a_table_worst_first_with_the_anchor() -> None:
    text = ci.step_summary(of(Verdict.ENABLE, Verdict.DISABLE), ledger_head="abc123")
    rows = [line for line in text.splitlines() if line.startswith("| r")]
    assert [row.split(" | ")[:2] for row in rows] == [["| regime", "verdict"], ["| r1", "disable"], ["| r0", "enable"]]
    assert "because of r1" in text and "abc123" in text and "exit code 1" in text
    assert "nothing was decided" in ci.step_summary(of())


def test_a_hostile_summary_keeps_its_columns() -> None:
    text = ci.step_summary(decision(regime(GITHUB, Verdict.DISABLE, GITHUB), name=GITHUB))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {5}
    assert "<script" not in text and "\x1b" not in text and "\u202e" not in text
    assert not re.search(r"(?<!\\)\]\(", text) and text.encode()


def test_the_summary_fits_beside_what_is_there_already(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    large = decision(*(regime(f"r{number}", Verdict.INCONCLUSIVE, "ä" * 5_000) for number in range(700)))
    ci.append_summary(large, file)
    first = file.read_text(encoding="utf-8")
    assert 900_000 < len(first.encode()) <= ci.LARGEST_SUMMARY
    assert re.search(r"\n\d+ more regimes in the report\.\n", first)
    ci.append_summary(of(Verdict.ENABLE), file)
    ci.append_summary(large, file)
    assert file.read_text(encoding="utf-8").startswith(first) and file.stat().st_size <= ci.LARGEST_SUMMARY
    file.write_bytes(b"x" * ci.LARGEST_SUMMARY)
    ci.append_summary(of(Verdict.ENABLE), file)
    assert file.stat().st_size == ci.LARGEST_SUMMARY
    with pytest.raises(MeasurementError, match="GITHUB_STEP_SUMMARY"):
        ci.append_summary(of(Verdict.ENABLE), tmp_path)


def outcome(case: ElementTree.Element) -> str:
    return next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "pass")


def test_junit_maps_every_verdict_and_counts_it() -> None:
    text = junit(of(*Verdict), "suites/a.toml", {"r1": 12})
    suites = ElementTree.fromstring(text)
    (suite,) = suites
    wanted = {"enable": "pass", "disable": "failure", "inconclusive": "skipped", "missing-evidence": "error",
              "invalid": "error"}  # fmt: skip
    cases = suite.findall("testcase")
    assert [outcome(case) for case in cases] == [wanted[verdict] for verdict in Verdict]
    for element in (suites, suite):
        assert [element.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["5", "1", "2", "1"]
    assert (cases[1].get("line"), cases[0].get("line"), cases[1].get("file")) == ("12", None, "suites/a.toml")
    assert cases[1][0].get("message") == "because of r1" == cases[1][0].text
    assert cases[0].find("system-out") is not None
    assert ElementTree.fromstring(junit(of(), "a.toml", {})).get("tests") == "0"


@given(text=st.text(max_size=40))
def test_junit_is_xml_whatever_the_texts_hold(text: str) -> None:
    name = "n" + text
    for hostile in (name, name + GITHUB):
        root = ElementTree.fromstring(
            junit(decision(regime(hostile, Verdict.DISABLE, hostile), name=hostile), hostile, {})
        )
        (case,) = root.iter("testcase")
        assert outcome(case) == "failure" and len(list(root.iter())) == 10
        assert ElementTree.fromstring(junit_error(hostile, [Problem(hostile)], hostile)).get("errors") == "1"


def test_junit_where_there_is_no_verdict() -> None:
    root = ElementTree.fromstring(junit_error("practice", [Problem("the declaration changed", "a.toml")], "a.toml"))
    (case,) = root.iter("testcase")
    assert outcome(case) == "error" and case[0].get("message") == "a.toml: the declaration changed"


def test_junit_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_junit(b"<a/>", tmp_path / "deep" / "junit.xml")
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["junit.xml"]
    with pytest.raises(MeasurementError, match="--junit"):
        write_junit(b"<a/>", tmp_path / "deep" / "junit.xml" / "x.xml")


def test_reasons_may_be_empty() -> None:
    bare: Any = replace(regime("r", Verdict.DISABLE), reasons=())
    assert "no reason was given" in ci.github_annotations(decision(bare), "a.toml", {})[0]
    assert b'message="disable"' in junit(decision(bare), "a.toml", {})
