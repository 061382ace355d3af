"""ServeGen: what is drawn has the published rates and lengths, and no text of a file is ever run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kbench.errors import TraceError
from kbench.traces.importers import ImportOptions, import_trace

from .samples import SERVEGEN_DATASET, SERVEGEN_TRACE


def client(folder: Path, trace: bytes = SERVEGEN_TRACE, dataset: bytes = SERVEGEN_DATASET, number: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"chunk-{number}-trace.csv").write_bytes(trace)
    (folder / f"chunk-{number}-dataset.json").write_bytes(dataset)
    return folder


def test_windows_have_their_requests_and_lengths(tmp_path: Path) -> None:
    trace = import_trace("servegen", client(tmp_path / "m"), ImportOptions(seconds=7_200))
    assert len(trace) == 30 + 60 + 12  # 0.05, 0.1 and 0.02 requests/s for 600 s each
    starts = trace.arrival_us.values / 1e6 + (600 - trace.arrival_us.values[30] / 1e6) * 0
    assert starts[-1] <= 2_400 and set(trace.input_tokens.tolist()) == {18, 500}
    assert set(trace.output_tokens.tolist()) == {1}
    assert trace.meta.options["seconds"] == 7_200 and trace.meta.options["seed"] == 0


def test_a_part_of_the_recording_a_seed_and_one_file(tmp_path: Path) -> None:
    folder = client(tmp_path / "m")
    late = import_trace("servegen", folder, ImportOptions(from_s=43_200, seconds=600))
    assert len(late) == 12 and set(late.input_tokens.tolist()) == {7} and set(late.output_tokens.tolist()) == {9}
    part = import_trace("servegen", folder, ImportOptions(from_s=700, seconds=100))
    assert 0 < len(part) < 60 and part.arrival_us.values.max() < 100e6
    file = folder / "chunk-3-trace.csv"
    assert import_trace("servegen", file).sha256 == import_trace("servegen", folder).sha256
    assert import_trace("servegen", file, ImportOptions(seed=1)).sha256 != import_trace("servegen", file).sha256


def test_windows_without_lengths_are_counted(tmp_path: Path) -> None:
    trace = import_trace("servegen", client(tmp_path / "m"), ImportOptions(from_s=21_000, seconds=30_000))
    assert len(trace) == 12 and trace.meta.dropped == {"lengths unknown": 6}


def test_clients_are_drawn_apart(tmp_path: Path) -> None:
    folder = client(tmp_path / "m")
    one = import_trace("servegen", folder)
    client(folder, number=4)
    two = import_trace("servegen", folder)
    assert len(two) == 2 * len(one) and len(np.unique(two.arrival_us.values)) > 1.9 * len(one)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"2400,0.1,1,Pareto,1,1", r"chunk-3-trace.csv:7: pattern: neither Gamma nor Weibull"),
        (b"2400,-0.1,1,Gamma,1,1", r"chunk-3-trace.csv:7: rate: not a rate"),
        (b"2400,0.1,1,Gamma,0,1", r"chunk-3-trace.csv:7: shape: not between"),
        (b"2400,nan,1,Gamma,1,1", r"chunk-3-trace.csv:7: rate: not a number"),
        (b"-1,0.1,1,Gamma,1,1", r"chunk-3-trace.csv:7: window start: not a time"),
        (b"2400,0.1", r"chunk-3-trace.csv:7: columns: 2 columns where 6"),
    ],
)
def test_bad_windows_are_named_and_counted(tmp_path: Path, line: bytes, message: str) -> None:
    folder = client(tmp_path / "m", SERVEGEN_TRACE + line)
    with pytest.raises(TraceError, match=message):
        import_trace("servegen", folder)
    assert sum(import_trace("servegen", folder, ImportOptions(skip_bad_rows=True)).meta.dropped.values()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').system('touch pwned')", "input_tokens: window 0: not the text of a dictionary"),
        ("{1: 0.5", "not the text of a dictionary"),
        ("[" * 5_000, "not the text of a dictionary"),
        ("{0: 1.0}", "not tokens and their probability: 0: 1.0"),
        ("{5: -1.0}", "not tokens and their probability"),
        ("{'5': 1.0}", "no lengths with a probability above 0"),
        ("{5: 0}", "no lengths with a probability above 0"),
    ],
)
def test_literals_are_read_and_not_run(tmp_path: Path, text: str, message: str) -> None:
    data = json.dumps({"0": {"input_tokens": text, "output_tokens": "{1: 1.0}"}}).encode()
    with pytest.raises(TraceError, match=message):
        import_trace("servegen", client(tmp_path / "m", dataset=data))
    assert not list(Path().glob("pwned"))


def test_files_that_are_missing(tmp_path: Path) -> None:
    folder = client(tmp_path / "m")
    (folder / "chunk-3-dataset.json").unlink()
    with pytest.raises(TraceError, match=r"chunk-3-dataset\.json: no such file"):
        import_trace("servegen", folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"no chunk-I-trace\.csv"):
        import_trace("servegen", tmp_path / "empty")
    with pytest.raises(TraceError, match="no requests between 9e"):
        import_trace("servegen", client(tmp_path / "m"), ImportOptions(from_s=9e6))
    with pytest.raises(TraceError, match="only servegen reads folders"):
        import_trace("azure", tmp_path / "empty")


def test_the_real_clients(real_trace: Callable[[str], Path]) -> None:
    trace = import_trace("servegen", real_trace("servegen/chunk-14-trace.csv"), ImportOptions(seconds=600, seed=2))
    assert len(trace) == round(19.053333333333335 * 600)
    gaps = np.diff(trace.arrival_us.values)
    # The window's published CV is 5.30; of one draw of 11,432 gaps from its Weibull, shape 0.405, about 3.
    assert 2.4 < gaps.std() / gaps.mean() < 3.6
    assert trace.input_tokens.min() >= 18 and 0.2 < (trace.output_tokens == 1).mean() < 0.26
    both = import_trace("servegen", real_trace("servegen/chunk-27-trace.csv").parent, ImportOptions(seconds=600))
    assert len(both) > len(trace)
