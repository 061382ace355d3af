"""A decision as JUnit XML: one test case a regime.

Owns the mapping (enable passes, disable fails, inconclusive is skipped, missing evidence and broken integrity are
errors) and the removal of characters that XML does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as xml

from kbench.decide import Decision, Verdict
from kbench.errors import MeasurementError, Problem
from kbench.report.text import clean

_TAGS = {
    Verdict.DISABLE: "failure",
    Verdict.INCONCLUSIVE: "skipped",
    Verdict.MISSING: "error",
    Verdict.INVALID: "error",
}
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(decision: Decision, file: str, lines: Mapping[str, int]) -> bytes:
    """The whole document. file: the suite as the CI system knows it; lines: regime → line, where known."""
    suite = _suite(decision.suite)
    properties = xml.SubElement(suite, "properties")
    for name, value in (
        ("plan_hash", decision.plan_hash),
        ("sessions", decision.sessions),
        ("runs", decision.runs.total),
        ("aborted", decision.runs.aborted),
        ("void", decision.runs.void),
    ):
        xml.SubElement(properties, "property", name=name, value=_text(value))
    for item in decision.regimes:
        case = _case(suite, decision.suite, item.regime, file, lines.get(item.regime))
        tag = _TAGS.get(item.verdict)
        if tag is None:
            xml.SubElement(case, "system-out").text = "\n".join(_text(reason) for reason in item.reasons)
            continue
        message = _text(item.reasons[0]) if item.reasons else item.verdict.value
        outcome = xml.SubElement(case, tag, type=item.verdict.value, message=message)
        outcome.text = "\n".join(_text(reason) for reason in item.reasons)
    return _document(suite)


def junit_error(name: str, problems: Sequence[Problem], file: str) -> bytes:
    """The document where there is no verdict: one test case that ended in an error."""
    suite = _suite(name)
    case = _case(suite, name, "verdict", file, None)
    said = [_text(problem) for problem in problems]
    error = xml.SubElement(case, "error", type="no-verdict", message=said[0] if said else "no verdict")
    error.text = "\n".join(said)
    return _document(suite)


def write_junit(document: bytes, path: Path) -> None:
    """Write it, whole, or say why not."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(document)
        partial.replace(path)
    except OSError as error:
        raise MeasurementError(
            f"cannot write the JUnit file: {error.strerror or error}", where=str(path), remedy="choose another --junit"
        ) from error


def _suite(name: str) -> xml.Element:
    return xml.Element("testsuite", name=_text(name))


def _case(suite: xml.Element, name: str, regime: str, file: str, line: int | None) -> xml.Element:
    case = xml.SubElement(suite, "testcase", classname=f"kbench.{_text(name)}", name=_text(regime), time="0")
    case.set("file", _text(file))
    if line is not None:
        case.set("line", str(line))
    return case


def _document(suite: xml.Element) -> bytes:
    counts = {"tests": len(suite.findall("testcase"))}
    counts |= {name: len(suite.findall(f"testcase/{tag}")) for name, tag in _COUNTED.items()}
    root = xml.Element("testsuites", name="kbench")
    for element in (root, suite):
        for name, number in counts.items():
            element.set(name, str(number))
        element.set("time", "0")
    root.append(suite)
    xml.indent(root)
    text: bytes = xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def _text(value: object) -> str:
    return _NOT_XML.sub("?", clean(value))
