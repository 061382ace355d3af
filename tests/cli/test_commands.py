"""Every command: one JSON document or nothing on stdout, one line a problem on stderr, the right exit code."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer.main

from cli.conftest import SUITE, Said, kbench
from kbench.cli import app
from kbench.record import list_runs, read_run


def commands() -> list[list[str]]:
    def walk(command: Any, path: list[str]) -> list[list[str]]:
        children = getattr(command, "commands", None)
        if not children:
            return [path]
        return [path, *(found for name, child in children.items() for found in walk(child, [*path, name]))]

    return walk(typer.main.get_command(app), [])


@pytest.mark.parametrize("path", commands(), ids=lambda path: " ".join(path) or "kbench")
def test_every_command_has_help(path: list[str]) -> None:
    said = kbench(*path, "--help")
    assert said.code == 0
    assert "Usage:" in said.out and said.err == ""


@pytest.mark.parametrize(
    "name", [" ".join(path) for path in commands() if path and path not in (["trace"], ["ledger"])]
)
def test_every_command_takes_json_and_debug(name: str) -> None:
    said = kbench(*name.split(), "--help")
    assert "--json" in said.out and "--debug" in said.out


def out(folder: Path) -> tuple[object, ...]:
    return folder / "suite.toml", "--out", folder / "results"


REGIME = {"regime", "verdict", "clauses", "reasons"}
CLAUSE = {"level", "metric", "test", "mode", "status", "observed", "low", "high", "threshold"}


def test_decide_has_the_keys_of_the_contract(folder: Path) -> None:
    said = kbench("decide", *out(folder), "--json")
    document = said.document
    assert {"suite", "plan_hash", "exit_code", "regimes", "runs"} <= document.keys()
    assert {"total", "aborted", "void"} <= document["runs"].keys()
    assert document["runs"]["total"] == 2
    assert document["exit_code"] == said.code == 4
    [regime] = document["regimes"]
    assert regime.keys() >= REGIME
    assert regime["verdict"] == "missing-evidence"
    assert all(clause.keys() >= CLAUSE for clause in regime["clauses"])
    written = {clause["metric"]: clause["status"] for clause in regime["clauses"]}
    assert (written["latency"], written["step_time"], written["goodput"]) == ("pass", "pass", "missing")
    assert all(isinstance(reason, str) for reason in regime["reasons"]) and regime["reasons"]


def test_looking_again_changes_nothing(folder: Path) -> None:
    kbench("decide", *out(folder))
    kept = {path: path.read_bytes() for path in (folder / "results" / "claim").iterdir() if path.is_file()}
    assert kbench("decide", *out(folder)).code == 4
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_suite_of_kernels_alone_starts_no_engine(fresh: Path) -> None:
    """Level 0 of a large model takes minutes, and no step is claimed here."""
    text = SUITE[: SUITE.index('  [[regime.require]]\n  level = "step"')]
    for left_out in ('[step]\npoints = ["1*1@127"]\n', '[workload]\ntraces = { chat = "chat.parquet" }\n'):
        text = text.replace(left_out, "")
    (fresh / "suite.toml").write_text(text.replace('trace_class = ["chat"]\n', ""))
    said = kbench("run", fresh / "suite.toml", "--out", fresh / "results", "--device", "cpu")
    assert said.code in (0, 1, 3), said.err
    [run] = [read_run(path) for path in list_runs(fresh / "results" / "claim")]
    assert {trial.case.split("/")[0] for trial in run.trials} == {"kernel"}


def without_workload(folder: Path) -> None:
    """The same claim without level 3, measured by the fake."""
    text = SUITE[: SUITE.rindex("  [[regime.require]]")].replace('[workload]\ntraces = { chat = "chat.parquet" }\n', "")
    (folder / "suite.toml").write_text(text.replace('trace_class = ["chat"]\n', ""))
    shutil.rmtree(folder / "results", ignore_errors=True)


@pytest.mark.parametrize("gone", ["kernel", "step"])
def test_a_cell_that_was_not_measured_is_missing_evidence(fresh: Path, gone: str) -> None:
    without_workload(fresh)
    for level in {"kernel", "step"} - {gone}:
        assert kbench(level, *out(fresh)).code == 0
    said = kbench("decide", *out(fresh), "--json")
    assert said.code == said.document["exit_code"] == 4
    assert [regime["verdict"] for regime in said.document["regimes"]] == ["missing-evidence"]
    assert kbench(gone, *out(fresh)).code == 0
    said = kbench("decide", *out(fresh), "--json")
    assert (said.code, said.document["regimes"][0]["verdict"]) == (0, "enable")


def test_single_levels_have_the_keys_of_the_contract(folder: Path) -> None:
    kernel = kbench("kernel", *out(folder), "--json").document
    keys = {"case", "point", "op", "variant", "status", "latency_us", "flags", "correctness"}
    assert {case["variant"] for case in kernel["cases"]} == {"a", "b"}
    for case in kernel["cases"]:
        assert keys <= case.keys()
        assert {"median", "low", "high", "sessions"} <= case["latency_us"].keys()
    for comparison in kernel["comparisons"]:
        assert {"case", "ratio", "verdict"} <= comparison.keys()
        assert {"point", "low", "high"} <= comparison["ratio"].keys()
        assert comparison["verdict"] in ("faster", "slower", "equivalent", "inconclusive")
    step = kbench("step", *out(folder), "--json").document
    assert "waterfalls" in step
    for case in step["cases"]:
        keys = {"case", "point", "variant", "wall_us", "device_us", "phases", "closure", "selection"}
        assert keys <= case.keys()
        assert case["closure"] == 1.0


def test_a_plan_runs_nothing(fresh: Path) -> None:
    for arguments in (("plan", *out(fresh)), ("run", *out(fresh), "--dry-run"), ("step", *out(fresh), "--dry-run")):
        said = kbench(*arguments, "--json")
        assert said.code == 0
        assert len(said.document["plan_hash"]) == 64
        assert not (fresh / "results").exists()
    assert kbench("plan", *out(fresh)).out == ""


def test_seed_and_hash(fresh: Path) -> None:
    first = kbench("plan", *out(fresh), "--json").document["plan_hash"]
    assert kbench("plan", *out(fresh), "--json").document["plan_hash"] == first
    assert kbench("plan", *out(fresh), "--seed", 5, "--json").document["plan_hash"] != first


def test_measuring_commands_leave_stdout_empty(folder: Path, fresh: Path) -> None:
    for arguments in (("kernel", *out(folder)), ("step", *out(folder)), ("decide", *out(folder))):
        said = kbench(*arguments)
        assert said.out == ""
        assert said.err
    said = kbench("kernel", *out(fresh), "--exploratory")
    assert (said.code, said.out) == (0, "")
    assert not (fresh / "results" / "claim" / "ledger.jsonl").exists()


def test_the_other_documents(folder: Path, tmp_path: Path) -> None:
    for topic in ("ops", "kernels", "models", "suites", "presets"):
        assert topic in kbench("list", topic, "--json").document
        assert kbench("list", topic).code == 0
    assert {"environment", "warnings"} <= kbench("env", "--json").document.keys()
    report = kbench("report", *out(folder), "--json").document["report"]
    assert Path(report).read_text().startswith("#")
    made = kbench("trace", "synth", "chat", "-o", tmp_path / "t.parquet", "--requests", 20, "--json").document
    assert made["requests"] == 20
    info = kbench("trace", "info", tmp_path / "t.parquet", "--page", 16, "--page", 64, "--json").document
    assert info["requests"] == 20
    assert set(info["infinite_cache_hit_ratio"]) == {"16", "64"}


def test_the_ledger_commands(folder: Path) -> None:
    entries = kbench("ledger", "show", *out(folder), "--json").document["entries"]
    assert [entry["kind"] for entry in entries] == ["plan", "run_start", "run_end", "run_start", "run_end"]
    head = kbench("ledger", "anchor", *out(folder), "--json").document["head"]
    assert head == entries[-1]["hash"]
    intact = kbench("ledger", "verify", *out(folder), "--anchor", head, "--json")
    assert (intact.code, intact.document["intact"], intact.document["torn_bytes"]) == (0, True, 0)
    ledger = folder / "results" / "claim" / "ledger.jsonl"
    assert kbench("ledger", "verify", ledger.parent).out == "intact: 5 entries\n"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"n":6')
    assert "6 bytes of a torn last line are passed over" in kbench("ledger", "verify", ledger).out
    ledger.write_bytes(whole.splitlines(keepends=True)[0])
    assert kbench("ledger", "verify", ledger).code == 5  # its runs lie beside it, and it does not know them
    ledger.write_bytes(whole)
    ledger.write_text(ledger.read_text().replace('"n":2', '"n":7'))
    broken = kbench("ledger", "verify", ledger, "--json")
    assert (broken.code, broken.document["intact"]) == (5, False)
    said = kbench("ledger", "verify", ledger)
    assert said.code == 5 and said.out == ""
    one_line_each(kbench("decide", *out(folder)), 5)


def said_plan(line: str) -> str:
    """The end of a line like `114.8 µs  claim: 3 cases, plan bf1e8a655826a5ca`."""
    found = re.search(r"claim: 3 cases, plan [0-9a-f]{16}$", line)
    return found[0] if found else "\n"


def one_line_each(said: Said, code: int) -> list[str]:
    """Every line on stderr is `kbench: …`, and there is no traceback and nothing on stdout."""
    # The first line of a command that measures says what it is about to do.
    lines = [line for line in said.err.splitlines() if not line.endswith(said_plan(line))]
    assert said.code == code, said.err
    assert said.out == ""
    assert lines and all(line.startswith("kbench: ") for line in lines), said.err
    assert "Traceback" not in said.err
    return lines


ON_A_SUITE = ["plan", "run", "timeline", "kernel", "step", "workload", "decide", "report", "ledger amend --reason x"]


@pytest.mark.parametrize("command", ON_A_SUITE)
def test_a_suite_with_two_mistakes_is_two_lines(fresh: Path, command: str) -> None:
    text = SUITE.replace("blocks = 2", "block = 2").replace('"tiny"', '"tinny"')
    (fresh / "suite.toml").write_text(text)
    lines = one_line_each(kbench(*command.split(), *out(fresh)), 2)
    assert len(lines) == 2
    for line, mistake in zip(lines, ("tinny", "block = 2"), strict=True):
        assert f"suite.toml:{text[: text.index(mistake)].count(chr(10)) + 1}:" in line
    assert not (fresh / "results").exists()
    said = kbench(*command.split(), *out(fresh), "--json")
    assert said.document["exit_code"] == said.code == 2
    assert len(said.document["errors"]) == 2


@pytest.mark.parametrize("command", ON_A_SUITE)
def test_a_suite_that_is_not_there_is_one_line(tmp_path: Path, command: str) -> None:
    lines = one_line_each(kbench(*command.split(), *out(tmp_path)), 2)
    assert len(lines) == 1 and "no such suite" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("kernel", "{suite}", "--device", "abacus"), "no device 'abacus'"),
        (("plan", "{suite}", "--trace", "chat"), "is not NAME=FILE"),
        (("plan", "{suite}", "--trace", "chat=gone.parquet"), "no such file"),
        (("plan", "{suite}", "--costs", "a=gone.parquet"), "no such file"),
        (("trace", "info", "gone.parquet"), "gone.parquet"),
        (("trace", "info", "{suite}"), "suite.toml"),
        (("trace", "synth", "jazz", "-o", "x.parquet"), "jazz"),
        (("trace", "import", "papyrus", "{suite}", "-o", "x.parquet"), "papyrus"),
        (("trace", "import", "mooncake", "gone.jsonl", "-o", "x.parquet"), "gone.jsonl"),
        (("ledger", "verify", "gone.jsonl"), "no such ledger"),
        (("ledger", "verify", "{suite}", "--anchor", "xyz"), "is not a hash"),
        (("ledger", "amend", "{suite}", "--reason", " "), "needs a reason"),
        (("timeline", "gone.json"), "gone.json"),
    ],
)
def test_users_mistakes_are_one_line(fresh: Path, arguments: tuple[str, ...], said: str) -> None:
    filled = [argument.replace("{suite}", str(fresh / "suite.toml")) for argument in arguments]
    [line] = one_line_each(kbench(*filled), 2)
    assert said in line


def test_a_level_that_the_suite_lacks_is_one_line(fresh: Path) -> None:
    without_workload(fresh)
    [line] = one_line_each(kbench("workload", *out(fresh)), 2)
    assert "no [workload]" in line


@pytest.mark.parametrize("edit", ["seed", "rule", "trace"])
def test_an_edit_after_evidence_is_exit_5_with_the_difference(folder: Path, edit: str) -> None:
    options: tuple[object, ...] = ()
    if edit == "seed":
        options, shown = ("--seed", 5), "seed: 1 → 5"
    elif edit == "rule":
        (folder / "suite.toml").write_text(SUITE.replace("margin = 0.03", "margin = 0.5"))
        shown = "margin: 0.03 → 0.5"
    else:
        made = kbench("trace", "synth", "chat", "-o", folder / "chat.parquet", "--requests", 20, "--seed", 9)
        assert made.code == 0
        shown = "traces.chat"
    for command in ("decide", "kernel", "run", "plan", "report"):
        lines = one_line_each(kbench(command, *out(folder), *options), 5)
        assert "changed after evidence" in lines[0]
        assert shown in "\n".join(lines)
    said = kbench("decide", *out(folder), *options, "--json")
    assert said.document["exit_code"] == said.code == 5
    if edit == "rule":
        assert kbench("ledger", "amend", *out(folder), "--reason", "a better rule").code == 0
        assert kbench("decide", *out(folder)).code == 4


def test_altered_evidence_is_exit_5(folder: Path) -> None:
    run = list_runs(folder / "results" / "claim")[0]
    data = (run / "samples.parquet").read_bytes()
    (run / "samples.parquet").write_bytes(data[:-5] + b"?" + data[-4:])
    [line] = one_line_each(kbench("decide", *out(folder)), 5)
    assert "altered" in line and "samples.parquet" in line


def test_a_results_root_that_cannot_be_written_is_exit_6(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "results").touch()
    [line] = one_line_each(kbench("kernel", *out(fresh)), 6)
    assert "results" in line
    (fresh / "results").unlink()

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.mkdir", read_only)
        for options in ((), ("--exploratory",)):
            [line] = one_line_each(kbench("kernel", *out(fresh), *options), 6)
            assert "Read-only file system" in line


def test_ctrl_c_is_one_line_and_resume_goes_on(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("kbench.run.session.Session._windows", interrupted)
        said = kbench("kernel", *out(fresh))
    assert said.code == 6
    assert "--resume" in said.err.splitlines()[-1] and "Traceback" not in said.err
    assert kbench("kernel", *out(fresh), "--resume").code == 0
    assert len(list_runs(fresh / "results" / "claim")) == 1


def test_only_measures_what_it_names_and_is_exploratory(fresh: Path) -> None:
    said = kbench("step", *out(fresh), "-k", "1*1@127", "--json")
    assert said.code == 0
    assert said.document["cases"]
    assert not (fresh / "results" / "claim" / "ledger.jsonl").exists()


def test_debug_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kbench.errors import SuiteError

    monkeypatch.delenv("KBENCH_DEBUG", raising=False)
    with pytest.raises(SuiteError):
        kbench("plan", tmp_path / "gone.toml", "--debug")
    monkeypatch.delenv("KBENCH_DEBUG", raising=False)
