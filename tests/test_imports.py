"""What an import costs: nothing that plans, decides or reports loads torch, and help loads nothing heavy at all."""

from __future__ import annotations

import subprocess
import sys

TORCH_FREE = [
    "kbench.cli",
    "kbench.run.execute",
    "kbench.report.markdown",
    "kbench.report.tables",
    "kbench.decide",
    "kbench.plan",
    "kbench.record",
    "kbench.ledger",
    "kbench.protocol",
    "kbench.timeline",
    "kbench.suite",
    "kbench.traces.schema",
    "kbench.catalog",
    "kbench.checkpoints",
    "kbench.selection",
    "kbench.stats",
    "kbench.env",
    "kbench.engine.core",
    "kbench.engine.blocks",
    "kbench.engine.scheduler",
    "kbench.engine.costs",
    "kbench.targets.base",
    "kbench.targets.virtual",
    "kbench.engine",
    "kbench.targets",
    "kbench.measure",
    "kbench.run",
    "kbench.hashing",
    "kbench.report.views",
    "kbench.report.plain",
    "kbench.traces.synth",
    "kbench.traces.importers",
    "kbench.traces.statistics",
    "kbench.worker",
]


def loaded_after(code: str, *names: str) -> set[str]:
    """Which of `names` are in sys.modules of a fresh interpreter after `code`."""
    report = f"import sys\n{code}\nprint('LOADED', *sorted({set(names)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=120)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    return set(line.split()[1:])


def test_no_import_of_these_loads_torch() -> None:
    # One process for all: each import is followed by a look, so that the culprit is named.
    code = "import importlib\n"
    for name in TORCH_FREE:
        code += f"importlib.import_module({name!r}); assert not {{'torch', 'triton'}} & set(sys.modules), {name!r}\n"
    assert loaded_after(code, "torch", "triton") == set()


def test_empty_packages_are_empty() -> None:
    for name in ("kbench.engine", "kbench.targets", "kbench.measure", "kbench.run", "kbench.ops", "kbench.kernels"):
        assert loaded_after(f"import {name}", "numpy", "pydantic", "torch") == set(), name


def test_help_loads_nothing_heavy() -> None:
    # (typer itself loads pydantic for the help of a command, where it is installed.)
    heavy = ("torch", "triton", "scipy", "pandas", "pyarrow", "numpy", "psutil", "pynvml")
    for arguments in (["--help"], ["run", "--help"], ["trace", "--help"], ["--version"]):
        code = f"sys.argv = ['kbench', *{arguments!r}]\nfrom kbench.cli import main\n"
        code += "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
        assert loaded_after(code, *heavy) == set(), arguments
