"""`kbench list` and `kbench env`: what there is, and what this machine is like."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kbench.cli import common


class Topic(StrEnum):
    OPS = "ops"
    KERNELS = "kernels"
    MODELS = "models"
    SUITES = "suites"
    PRESETS = "presets"


@common.one_line_errors
def list_(
    topic: Annotated[Topic, typer.Argument(help="What to list.")],
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """List operations, kernels, models, shipped suites or trace presets."""
    from kbench.report import listing

    rows = _rows(topic)
    if as_json:
        common.print_json({topic.value: rows})
        return
    for line in listing.lines(topic.value, rows):
        typer.echo(line)


def _rows(topic: Topic) -> list[dict[str, Any]]:
    from kbench import catalog

    if topic is Topic.OPS:
        from kbench.catalog.arguments import ARGUMENTS

        return [
            {
                "name": op.name,
                "summary": op.summary,
                "function": f"fn({', '.join(ARGUMENTS[op.name])})",
                "axes": ", ".join(op.axes),
                "batches": op.batches,
                "kernels": ", ".join(found.name for found in catalog.implementations(op.name)),
            }
            for op in catalog.OPS.values()
        ]
    if topic is Topic.KERNELS:
        return [
            {
                "name": found.name,
                "ops": ", ".join(found.ops),
                "devices": ", ".join(found.devices),
                "dtypes": ", ".join(found.dtypes),
                "page_multiple_of": found.page_multiple_of,
                "features": ", ".join(found.features),
                "graph": str(found.graph),
                "requires": ", ".join(found.requires),
                "summary": found.summary,
            }
            for found in catalog.implementations()
        ]
    if topic is Topic.MODELS:
        from kbench.catalog.field_sources import field_sources

        return [
            {
                **asdict(shape),
                "kinds": [str(kind) for kind in shape.kinds],
                "hosted": not shape.foreign,
                "sources": field_sources(shape),
            }
            for shape in catalog.MODELS.values()
        ]
    if topic is Topic.SUITES:
        return [{"path": str(path)} for path in sorted(Path("suites").glob("*.toml"))]
    from kbench.traces.synth import PRESETS

    return [{"name": name} for name in PRESETS]


@common.one_line_errors
def env(as_json: common.Json = False, debug: common.Debug = False) -> None:
    """Show what will be recorded of this machine, and what makes it unfit for measuring."""
    from kbench import env as machine

    snapshot = machine.snapshot()
    warnings = machine.warnings(snapshot)
    if as_json:
        common.print_json({"environment": snapshot, "warnings": warnings})
        return
    for name, value in snapshot.items():
        typer.echo(f"{name}: {value}")
    for line in warnings:
        typer.echo(f"kbench: warning: {line}", err=True)
