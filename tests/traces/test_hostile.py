"""Whatever bytes a source or a trace file holds: a trace, or one line that says what is wrong and where."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kbench.errors import TraceError, UsageError
from kbench.traces.importers import IMPORTERS, ImportOptions, import_trace
from kbench.traces.schema import Trace, read_trace, write_trace
from kbench.traces.synth import synthesise

from .samples import SERVEGEN_DATASET, SERVEGEN_TRACE, SOURCES

PLAIN = [(kind, data) for kind, samples in SOURCES.items() for data in samples]
ids = [f"{kind}-{number}" for kind, samples in SOURCES.items() for number in range(len(samples))]
LOOSE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tried(kind: str, path: Path, skip: bool = False) -> Trace | None:
    """The trace, or None where the source was refused as it should be."""
    try:
        return import_trace(kind, path, ImportOptions(skip_bad_rows=skip, block_tokens=None))
    except UsageError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return None


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A good source with some of it replaced: by any bytes, or by what tends to hurt."""
    kind, data = draw(st.sampled_from(PLAIN))
    hurts = [
        b"-1",
        b"9" * 5_000,
        b"1e999",
        b"NaN",
        b"null",
        b"{}",
        b"[" * 3_000,
        b'"\\ud800"',
        b"\0",
        b",",
        b"\n",
        b"0",
    ]
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        stop = draw(st.integers(start, min(len(data), start + 12)))
        data = data[:start] + draw(st.binary(max_size=8) | st.sampled_from(hurts)) + data[stop:]
    return kind, data


@LOOSE
@given(damaged(), st.booleans())
def test_a_damaged_source_is_a_trace_or_a_line(tmp_path: Path, source: tuple[str, bytes], skip: bool) -> None:
    kind, data = source
    path = tmp_path / "source"
    path.write_bytes(data)
    trace = tried(kind, path, skip)
    if trace is not None:
        write_trace(trace, tmp_path / "t.parquet")
        assert read_trace(tmp_path / "t.parquet").sha256 == trace.sha256


@LOOSE
@given(st.sampled_from(sorted(SOURCES)), st.binary(max_size=200), st.booleans())
@example("jsonl", b"", False)
@example("azure", b"\n\n\n", True)
@example("otel", b"[" * 100_000, False)
@example("tracelab", b"\xff\xfe{\x00", False)
@example("mooncake", b"\x1f\x8b", False)
def test_any_bytes_are_a_trace_or_a_line(tmp_path: Path, kind: str, data: bytes, skip: bool) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    tried(kind, path, skip)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 200), st.binary(max_size=9), st.booleans())
def test_damaged_clients_are_a_trace_or_a_line(tmp_path: Path, at: int, put: bytes, in_trace: bool) -> None:
    files = {"chunk-1-trace.csv": SERVEGEN_TRACE, "chunk-1-dataset.json": SERVEGEN_DATASET}
    name = sorted(files)[in_trace]
    files[name] = files[name][:at] + put + files[name][at + 4 :]
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    tried("servegen", tmp_path)


@pytest.mark.parametrize(("kind", "data"), PLAIN, ids=ids)
def test_packed_marked_and_with_other_line_ends_it_is_the_same_trace(tmp_path: Path, kind: str, data: bytes) -> None:
    plain = data.replace(b"\r\n", b"\n").rstrip()
    forms = {
        "plain": plain,
        "returns": plain.replace(b"\n", b"\r\n"),
        "marked": b"\xef\xbb\xbf" + plain,
        "ended": plain + b"\n\n",
        "packed": gzip.compress(plain),
        "packed and marked": gzip.compress(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n")),
    }
    hashes = set()
    for name, content in forms.items():
        (tmp_path / name).write_bytes(content)
        hashes.add(import_trace(kind, tmp_path / name).sha256)
    assert len(hashes) == 1
    assert len(import_trace(kind, tmp_path / "plain")) >= 3


def test_a_packed_file_cut_short_is_named(tmp_path: Path) -> None:
    packed = gzip.compress(b"\n".join([SOURCES["mooncake"][0]] * 200), mtime=0)
    for cut in (3, 12, len(packed) // 2, len(packed) - 3):
        (tmp_path / "x.gz").write_bytes(packed[:cut])
        with pytest.raises(TraceError, match=r"x\.gz:\d+: packed with gzip, and cut short or damaged"):
            import_trace("mooncake", tmp_path / "x.gz")


def test_every_importer_has_a_sample() -> None:
    assert set(SOURCES) | {"servegen"} == set(IMPORTERS)


# --------------------------------------------------------------------------------------------- trace files


@pytest.fixture(scope="module")
def good() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        write_trace(synthesise("chat", 30, 1), path)
        return path.read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_trace_file_is_whole_or_refused(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(good) - 1))
    cut = data.draw(st.booleans())
    put = data.draw(st.binary(min_size=1, max_size=4))
    path = tmp_path / "t.parquet"
    path.write_bytes(good[:at] if cut else good[:at] + put + good[at + len(put) :])
    try:
        trace = read_trace(path)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert trace.sha256 == synthesise("chat", 30, 1).sha256
