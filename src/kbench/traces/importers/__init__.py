"""Public traces, each in its own format, to `Trace`: the registry and the one function that callers use.

An importer is a module of this package with `read(source, options) -> Trace`, listed in IMPORTERS by name and imported
when it is used. Importers know formats; what makes a trace valid is `integrity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    if not source.is_file():
        raise TraceError(
            "no such file", file=str(source), remedy="see `kbench trace import --help` for where to get it"
        )
    return importer.load()(source, options or ImportOptions())
