"""Facts of the host, its Python and the checkout, as one JSON-ready dict. Unknown is None."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = "kbench.env/1"
_PACKAGES = (
    "kbench", "torch", "triton", "numpy", "scipy", "pandas", "pyarrow", "pydantic", "transformers", "safetensors",
    "nvidia-ml-py", "flashinfer-python", "flash-attn", "flash-attn-3", "flash-linear-attention", "vllm", "sglang",
    "nvidia-cutlass-dsl", "quack-kernels", "liger-kernel", "xformers", "ray",
)  # fmt: skip
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS",
    "TRITON_INTERPRET", "CUDA_MPS_PIPE_DIRECTORY",
)  # fmt: skip
_GIT_TIMEOUT_S = 10.0


def snapshot(*, root: Path = Path("/"), cwd: Path | None = None) -> dict[str, Any]:
    """What this machine and this Python are, now. Takes well under a second; raises nothing for what is missing.

    `root` is where /proc and /sys lie; `cwd` is the folder whose checkout is described, by default the current one.
    """
    from kbench.env.gpu import gpu_facts

    return {
        "schema": SCHEMA,
        "time": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "os": _os_facts(root),
        "cpu": _cpu_facts(root),
        "memory": _memory_facts(),
        "load_average": _quiet(lambda: [round(load, 2) for load in os.getloadavg()]),
        "battery": _battery_facts(),
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "packages": _package_versions(),
        },
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "checkout": _checkout_facts(Path.cwd() if cwd is None else cwd),
        **gpu_facts(),
    }


def _os_facts(root: Path) -> dict[str, Any]:
    release = dict(line.split("=", 1) for line in (_text(root / "etc/os-release") or "").splitlines() if "=" in line)
    return {
        "system": platform.system(),
        "name": release.get("PRETTY_NAME", "").strip("\"'") or None,
        "kernel": platform.release(),
        "machine": platform.machine(),
        "container": _container(root),
    }


def _container(root: Path) -> str | None:
    """The kind of container, as far as it shows; None where nothing points to one."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    groups = _text(root / "proc/1/cgroup") or ""
    return next((kind for kind in ("docker", "kubepods", "containerd", "lxc") if kind in groups), None)


def _cpu_facts(root: Path) -> dict[str, Any]:
    info: dict[str, str] = {}
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        key, found, value = line.partition(":")
        if found:
            info.setdefault(key.strip(), value.strip())
    folder = root / "sys/devices/system/cpu"
    governors = {_text(path) for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")} - {None}
    smt = _text(folder / "smt/active")
    return {
        "model": info.get("model name") or info.get("Hardware") or platform.processor() or None,
        "logical_cores": os.cpu_count(),
        "physical_cores": _psutil("cpu_count", logical=False),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "quota_cores": _quota_cores(root),
        "governors": sorted(str(governor) for governor in governors),
        "turbo": _turbo(folder),
        "smt": None if smt is None else smt == "1",
        "virtual": "hypervisor" in info["flags"].split() if "flags" in info else None,
    }


def _turbo(folder: Path) -> bool | None:
    disabled, boost = _text(folder / "intel_pstate/no_turbo"), _text(folder / "cpufreq/boost")
    if disabled is not None:
        return disabled == "0"
    return None if boost is None else boost == "1"


def _quota_cores(root: Path) -> float | None:
    """CPU time that a control group grants a second of wall time; None where it sets no limit."""
    quota, _, period = (_text(root / "sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return _quiet(lambda: int(quota) / int(period)) if quota != "max" else None


def _memory_facts() -> dict[str, Any]:
    memory = _psutil("virtual_memory")
    return {"total_bytes": memory.total, "available_bytes": memory.available} if memory else {}


def _battery_facts() -> dict[str, Any] | None:
    battery = _psutil("sensors_battery")
    return {"percent": round(battery.percent), "plugged_in": battery.power_plugged} if battery else None


def _package_versions() -> dict[str, str]:
    """Versions of those packages that are installed, from their metadata: nothing is imported."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, KeyError, OSError):
            continue
    return found


def _checkout_facts(cwd: Path) -> dict[str, Any] | None:
    """Commit, branch and cleanliness of the Git checkout around `cwd`; None where there is none, or no Git."""
    commit = _git(cwd, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(cwd, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": _git(cwd, "symbolic-ref", "--quiet", "--short", "HEAD"),
        "dirty": None if status is None else status != "",
    }


def _git(cwd: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(cwd), *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_GIT_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None


def _psutil(function: str, **arguments: Any) -> Any:
    """What psutil says, or None where this system has no such function or refuses it."""
    try:
        import psutil
    except ImportError:
        return None
    if not hasattr(psutil, function):
        return None
    try:
        return getattr(psutil, function)(**arguments)
    except (OSError, psutil.Error, NotImplementedError, KeyError, ValueError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _quiet(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, AttributeError, ValueError, ZeroDivisionError):
        return None
