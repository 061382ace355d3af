"""`kbench trace`: tables for people, one document for programs, one line and exit 2 for mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kbench.cli import app
from kbench.traces.schema import write_trace
from kbench.traces.synth import synthesise

from .samples import AZURE, BURSTGPT, MOONCAKE, lines, mooncake


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_info_is_readable(tmp_path: Path) -> None:
    write_trace(synthesise("prefix-heavy", 100, 1), tmp_path / "t.parquet")
    said = run("info", tmp_path / "t.parquet")
    assert said.exit_code == 0 and "{" not in said.stdout
    for text in ("requests/s", "tokens a request", "hits by page size", "misses by cache size", "16 tokens", "90 %"):
        assert text in said.stdout
    document = json.loads(run("info", tmp_path / "t.parquet", "--json").stdout)
    shown = f"{100 * document['infinite_cache_hit_ratio']['64']:.2f} %"
    assert shown in said.stdout


def test_info_warns_of_rounded_arrivals_until_they_are_spread(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(lines(*(mooncake(3_000 * (row // 4), 100, [row]) for row in range(60))))
    assert run("import", "mooncake", tmp_path / "m", "-o", tmp_path / "m.parquet").exit_code == 0
    assert "--dejitter" in run("info", tmp_path / "m.parquet").stdout
    run("import", "mooncake", tmp_path / "m", "-o", tmp_path / "d.parquet", "--dejitter")
    run("slice", tmp_path / "d.parquet", "-o", tmp_path / "s.parquet", "--sessions", 50)
    said = run("info", tmp_path / "s.parquet").stdout
    assert "Import with" not in said and "slice of mooncake --dejitter" in said


def test_bad_rows_are_counted_in_output_and_file(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_bytes(BURSTGPT + b"46,GPT-4,5,0,5,API log\n46,GPT-4,x,1,1,API log")
    refused = run("import", "burstgpt", tmp_path / "b.csv", "-o", tmp_path / "b.parquet")
    assert refused.exit_code == 2 and len(refused.stderr.splitlines()) == 1
    assert "b.csv:5: Response tokens: 0 tokens" in refused.stderr and "--skip-bad" in refused.stderr
    assert not (tmp_path / "b.parquet").exists()
    said = run("import", "burstgpt", tmp_path / "b.csv", "-o", tmp_path / "b.parquet", "--skip-bad")
    assert said.exit_code == 0 and "left out 2 bad rows (Request tokens: 1, Response tokens: 1)" in said.stderr
    document = json.loads(run("info", tmp_path / "b.parquet", "--json").stdout)
    assert document["source"]["dropped"] == {"Request tokens": 1, "Response tokens": 1}
    assert "rows left out" in run("info", tmp_path / "b.parquet").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("import", "azure", "{m}", "-o", "x"), "m:1: header"),
        (("import", "mooncake", "{m}", "-o", "x", "--block-tokens", 0), "block_tokens: 0"),
        (("import", "mooncake", "{m}", "-o", "x", "--seed", -1), "seed: -1"),
        (("import", "otel", "{m}", "-o", "x", "--chars-per-token", 0), "chars_per_token"),
        (("import", "servegen", "{m}", "-o", "x", "--seconds", -3), "seconds: -3.0"),
        (("import", "papyrus", "{m}", "-o", "x"), "azure, mooncake, qwen-bailian"),
        (("synth", "chat", "-o", "x", "--arrivals", "weekly"), "poisson, gamma, weibull, bursty"),
        (("slice", "{t}", "-o", "x", "--from-s", 1e9), "no session is left"),
        (("scale", "{t}", "-o", "x"), "--factor"),
        (("mix", "{t}", "{t}=0.5", "-o", "x"), "is not TRACE=SHARE"),
        (("mix", "{t}=1", "{t}=-0.5", "-o", "x"), "a share above 0"),
        (("mix", "{t}=1", "gone.parquet=1", "-o", "x"), "gone.parquet: no such file"),
        (("info", "{m}"), "not a Parquet file"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path: Path, arguments: tuple[object, ...], said: str) -> None:
    (tmp_path / "m").write_bytes(MOONCAKE)
    write_trace(synthesise("burst", 20, 1), tmp_path / "t.parquet")
    places = {"{m}": str(tmp_path / "m"), "{t}": str(tmp_path / "t.parquet")}
    filled = []
    for argument in arguments:
        text = str(argument)
        for name, place in places.items():
            text = text.replace(name, place)
        filled.append(str(tmp_path / "x.parquet") if text == "x" else text)
    done = run(*filled)
    assert done.exit_code == 2, done.output
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr and done.stdout == ""
    assert not (tmp_path / "x.parquet").exists()


def test_azure_at_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(AZURE)
    document = json.loads(run("import", "azure", tmp_path / "a.csv", "-o", tmp_path / "a.parquet", "--json").stdout)
    assert document["requests"] == 3 and document["dropped"] == {}
