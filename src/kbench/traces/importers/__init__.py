"""Public traces, each in its own format, to `Trace`: the registry and the one function that callers use.

An importer is a module of this package with `read(source, options) -> Trace`, listed in IMPORTERS by name and imported
when it is used. Importers know formats; what makes a trace valid is `integrity`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from kbench.errors import TraceError, UsageError
from kbench.traces.importers.common import ImportOptions
from kbench.traces.trace import Trace

__all__ = ["IMPORTERS", "ImportOptions", "Importer", "import_trace"]


@dataclass(frozen=True, slots=True)
class Importer:
    """A named door: `module` holds `read(source, options) -> Trace`."""

    name: str
    module: str
    title: str

    def load(self) -> Callable[[Path, ImportOptions], Trace]:
        reader: Callable[[Path, ImportOptions], Trace] = import_module(self.module).read
        return reader


IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        importer.name: importer
        for importer in (
            Importer("azure", f"{__name__}.azure", "Azure LLM inference traces 2023 and 2024 (CSV)"),
            Importer("mooncake", f"{__name__}.mooncake", "Mooncake FAST'25 traces (JSONL with 512-token prefix ids)"),
            Importer(
                "qwen-bailian", f"{__name__}.qwen_bailian", "Qwen-Bailian traces (JSONL with 16-token ids, turns)"
            ),
            Importer("burstgpt", f"{__name__}.burstgpt", "BurstGPT (CSV, whole seconds)"),
            Importer("servegen", f"{__name__}.servegen", "ServeGen clients (a folder); requests are drawn, seeded"),
            Importer("tracelab", f"{__name__}.tracelab", "TraceLab sessions (replay CSV, or round trace JSONL)"),
            Importer("otel", f"{__name__}.otel", "OpenTelemetry spans of model calls (JSON, OTLP JSON, JSONL)"),
            Importer("jsonl", f"{__name__}.jsonl", "your own: JSONL with the columns of kbench's schema"),
        )
    }
)


def import_trace(name: str, source: Path, options: ImportOptions | None = None) -> Trace:
    """Read `source` with the importer called `name`.

    Raises UsageError for an unknown name, TraceError (file, line, field) for a source or row that cannot be used; with
    `skip_bad_rows` bad rows are left out and counted by reason in `trace.meta.dropped`.
    """
    importer = IMPORTERS.get(name)
    if importer is None:
        raise UsageError(f"unknown trace format {name!r}", remedy=f"one of {', '.join(IMPORTERS)}")
    if not source.exists():
        raise TraceError("no such file", file=str(source), remedy="docs/traces.md says where published traces are")
    if not source.is_file() and not (name == "servegen" and source.is_dir()):
        raise TraceError("not a file", file=str(source), remedy="name the file itself; only servegen reads folders")
    with _no_garbage_collection():
        return importer.load()(source, options or ImportOptions())


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Rows hold no cycles; looking for some among millions of them takes longer than reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
