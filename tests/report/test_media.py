"""Terminal, Markdown and progress lines: complete, narrow-safe, and deaf to hostile names."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from kbench.decide import Decision, Evidence, decide
from kbench.report import tables
from kbench.report.markdown import escape, report_markdown
from kbench.report.plain import PlainProgress
from kbench.report.text import clean, duration, number, percent
from kbench.report.verdicts import Boundaries, boundary_grid
from kbench.report.views import kernel_view, step_view, timeline_view, workload_view
from kbench.suite.schema import Suite

from .conftest import HOSTILE, KERNEL, NEW, OLD, POINT, Bench, full_bench, make_suite
from .test_views import level_0


def decision_of(suite: Suite, bench: Bench) -> Decision:
    return decide(suite, Evidence.of([bench.run()], aborted=1, void=0))


def printed(renderable: object, width: int = 200, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, no_color=not color, legacy_windows=False)
    console.print(renderable)
    return stream.getvalue()


def hostile_bench() -> Bench:
    """A run in which every free text is hostile: a variant's name, messages, flags, the environment."""
    bench = full_bench(header={"environment": {"os": {"name": HOSTILE}, HOSTILE: [HOSTILE]}})
    bench.windows(KERNEL, HOSTILE, "latency", [[1.0, 1.0]] * 6, flags=("A|B", "<b>"))
    bench.ended(KERNEL, HOSTILE, "failed", message=HOSTILE, facts={"flags": [HOSTILE]})
    bench.ended("timeline/step/tiny/all", OLD, facts={"analysis": {**level_0(POINT, 40), "warnings": [HOSTILE]}})
    return bench


# ------------------------------------------------------------------------------------ terminal


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_every_table_fits_its_terminal(suite: Suite, width: int) -> None:
    bench = hostile_bench()
    runs = [bench.run()]
    for shown in (
        tables.verdict_table(decision_of(suite, bench)),
        tables.kernel_table(kernel_view(suite, runs)),
        tables.step_table(step_view(suite, runs)),
        tables.workload_table(workload_view(suite, runs)),
        tables.timeline_table(timeline_view(suite, runs)),
    ):
        text = printed(shown, width)
        assert text.strip()
        assert max(len(line) for line in text.splitlines()) <= width


def test_names_are_text_and_never_markup_or_control_codes(suite: Suite) -> None:
    text = printed(tables.kernel_table(kernel_view(suite, [hostile_bench().run()])), 2000)
    assert "[red]x[/red]" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_verdict_table_says_what_and_why(suite: Suite) -> None:
    decision = decision_of(suite, full_bench())
    text = printed(tables.verdict_table(decision), 400)
    assert "long-context" in text and "enable" in text
    assert "everything" in text and decision.verdict("everything").value in text
    for regime in decision.regimes:
        for reason in regime.reasons:
            assert clean(reason) in text
    assert f"exit code {int(decision.exit_code)}" in text
    assert "1 aborted" in text
    assert "no clause" in text


def test_the_three_boundaries_show_what_no_clause_asks_for(suite: Suite) -> None:
    runs = [full_bench().run()]
    measured = Boundaries(suite, kernel_view(suite, runs), step_view(suite, runs), workload_view(suite, runs))
    rows = {row[0]: row[1:] for row in boundary_grid(decision_of(suite, full_bench()), measured).rows}
    kernel, step, workload, verdict = rows["long-context"]
    assert kernel == "no clause; latency 25.00 % saved; cells: 1 faster"
    assert step.startswith("step_time 25.00 % saved [") and step.endswith("pass")
    assert workload == "no clause; goodput 99.00 % to 99.00 %"
    assert verdict == "enable"


def test_colour_is_the_consoles_choice(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tables.verdict_table(decision_of(suite, full_bench()))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;32m" in printed(shown, color=True)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    Console(file=stream, width=200, force_terminal=True).print(shown)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", stream.getvalue())


def test_every_number_has_its_unit_and_count(suite: Suite) -> None:
    text = printed(tables.kernel_table(kernel_view(suite, [full_bench().run()])), 300)
    assert "6 sessions, 72 windows" in text
    assert "µs" in text
    assert "of 1.00e-06" in text or "1e-06" in text


def test_a_trace_and_an_empty_run_are_shown_too(suite: Suite) -> None:
    assert "attention" in printed(tables.timeline_table(level_0(POINT, 40)))
    assert "nothing was measured" in printed(tables.kernel_table(kernel_view(suite, [Bench().run()])))


def test_a_plan_is_shown() -> None:
    document = {
        "suite": "s", "plan_hash": "ab" * 32, "arms": {"a": "cd" * 32}, "looks": [6], "sessions": {"step": 0},
        "cases": [KERNEL], "estimated_s": 12.0, "smallest_visible_saving": {"0.1%": 0.002},
    }  # fmt: skip
    text = printed(tables.plan_table(document))
    assert KERNEL in text and "12.00 s" in text and "0.20 %" in text


def test_rich_is_imported_only_to_print() -> None:
    code = (
        "import sys, kbench.report.tables, kbench.report.markdown, kbench.report.plain;"
        "sys.exit(any(name in sys.modules for name in ('rich', 'torch', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------ Markdown


def test_the_report_is_whole(suite: Suite) -> None:
    bench = hostile_bench()
    decision = decision_of(suite, bench)
    text = report_markdown(decision, [bench.run()], suite, command=("kbench", "run", "suites/a b.toml"))
    for heading in (
        "# kbench report: claim",
        "## Verdict: claim",
        "## Reasons",
        "## Three boundaries",
        "## Clauses",
        "## Timeline",
        "## Kernel",
        "## Step",
        "## Waterfall 32\\*1@4096",
        "## Workload (modelled)",
        "## Requests",
        "## Calibration",
        "## Runs and ledger",
        "## Environment",
        "## How to repeat",
    ):
        assert heading in text, heading
    assert "1 aborted" in text
    assert decision.plan_hash in text
    assert "    kbench run 'suites/a b.toml'" in text


def test_no_name_breaks_the_tables_or_becomes_html() -> None:
    suite = make_suite()
    bench = hostile_bench()
    text = report_markdown(decision_of(suite, bench), [bench.run()], suite)
    found: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            found.append(tag)

    Tags().feed(text)
    assert found == []
    assert not re.search(r"(?<!\\)!?(?<!\\)\[", text)
    assert "http://" not in text and "https://" not in text
    assert not re.search(r"(?<!\\)`", text)
    widths: list[int] = []
    for line in text.splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line))
        if line.startswith("| "):
            widths.append(cells)
            assert cells == widths[0]
        else:
            assert cells == 0
            widths = []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a|b", "a\\|b"),
        ("a`b`", "a\\`b\\`"),
        ("<img src=x>", "&lt;img src=x&gt;"),
        ("&lt;", "&amp;lt;"),
        ("two\nlines", "two lines"),
        ("step_time", "step_time"),
        ("_em_", "\\_em\\_"),
        ("[a](javascript:b)", "\\[a\\](javascript&#58;b)"),
        ("\\", "\\\\"),
        ("\x00\x1b[2J", "??\\[2J"),
    ],
)
def test_escape(name: str, shown: str) -> None:
    assert escape(name) == shown


def test_a_report_without_a_rule_or_a_suite() -> None:
    text = report_markdown(None, [full_bench().run()])
    assert "Verdict" not in text
    assert "## Kernel" in text


def test_markdown_is_read_as_tables_by_a_reader_of_its_own(suite: Suite) -> None:
    """Against markdown-it, which renders GitHub's tables."""
    markdown_it = pytest.importorskip("markdown_it")
    bench = hostile_bench()
    text = report_markdown(decision_of(suite, bench), [bench.run()], suite)
    html = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    assert "<script" not in html and "<img" not in html and "<a " not in html
    assert html.count("<table>") == len(re.findall(r"^\| --- ", text, re.MULTILINE))
    assert clean(HOSTILE).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in html


# ------------------------------------------------------------------------------------ progress


def test_one_line_a_trial() -> None:
    stream = io.StringIO()
    times = iter([0.0, 1.5, 2.0, 2.5, 3.0])
    observe = PlainProgress(stream, clock=lambda: next(times))
    observe("trial_done", session=1, case=KERNEL, variant=NEW, status="ok", message="")
    observe("window_recorded", session=1, case=KERNEL, block=1, position=2)
    observe("trial_done", session=1, case=KERNEL, variant=NEW, status="failed", message="a\nb\x1b[31m")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].split("  ")[-1] == f"{KERNEL} {NEW} ok"
    assert "session 2" in lines[0] and "1.500 s" in lines[0]
    assert "\x1b" not in lines[1] and "failed: a b?[31m" in lines[1]


@pytest.mark.parametrize(
    ("event", "facts", "word"),
    [
        ("announced", {"name": "s", "plan_hash": "a" * 64, "cases": 3}, "3 cases"),
        ("run_started", {"run": "r1"}, "r1"),
        ("session_started", {"session": 0}, "session 1"),
        ("session_lost", {"session": 0, "case": KERNEL, "variant": OLD, "message": "signal 11"}, "signal 11"),
        ("job_done", {"session": 0, "job": "costs", "variant": OLD, "status": "ok"}, "costs"),
        ("timeline_failed", {"message": "m"}, "timeline"),
        ("budget_spent", {"left_s": 1.0, "session_s": 2.0}, "budget"),
        ("nothing_due", {"plan_hash": "x"}, "nothing"),
    ],
)
def test_events_for_people(event: str, facts: dict[str, object], word: str) -> None:
    stream = io.StringIO()
    PlainProgress(stream)(event, **facts)
    assert word in stream.getvalue()


def test_a_closed_reader_ends_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    PlainProgress(stream)("run_started", run="r")


def test_an_ascii_log_gets_every_line() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    PlainProgress(stream)("run_started", run="µ")
    assert raw.getvalue().endswith(b"run ?\n")


# ---------------------------------------------------------------------------------------- text


def test_numbers() -> None:
    assert [duration(x) for x in (0.0, 1.5, 999.0, 1234.0, 2.5e6, None, float("nan"))] == [
        "0 µs", "1.500 µs", "999.0 µs", "1.234 ms", "2.500 s", "–", "–",
    ]  # fmt: skip
    assert duration(-140.0) == "-140.0 µs"
    assert percent(0.028) == "2.80 %"
    assert percent(0.028, signed=True) == "+2.80 %"
    assert number(12031) == "12,031"
    assert number(0.75) == "0.7500"


def test_a_decision_is_not_touched_by_printing_it(suite: Suite) -> None:
    decision = decision_of(suite, full_bench())
    before = decision.to_json()
    printed(tables.verdict_table(replace(decision)))
    assert decision.to_json() == before
