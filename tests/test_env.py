"""The snapshot on this machine, on an empty one and on a laid-out one; warnings and host keys from snapshots alone."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kbench import env

QUIET: dict[str, Any] = {
    "os": {"machine": "x86_64"},
    "cpu": {
        "model": "Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz",
        "logical_cores": 16,
        "usable_cores": 16,
        "quota_cores": None,
        "governors": ["performance"],
        "turbo": True,
    },
    "memory": {"total_bytes": 128 * 2**30, "available_bytes": 100 * 2**30},
    "load_average": [0.1, 0.1, 0.1],
    "battery": {"percent": 80, "plugged_in": True},
    "variables": {"CUDA_LAUNCH_BLOCKING": "0"},
    "gpus": [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "power_limit_w": 700.0,
            "power_limit_default_w": 700.0,
            "temperature_c": 33,
            "throttle_reasons": ["gpu-idle"],
            "ecc_uncorrected": 0,
            "mig": False,
            "persistence": True,
            "other_processes": [],
        }
    ],
    "gpu_error": None,
}


def changed(place: str, value: object) -> dict[str, Any]:
    snapshot = copy.deepcopy(QUIET)
    *path, last = place.split(".")
    part: Any = snapshot
    for key in path:
        part = part[int(key) if key.isdigit() else key]
    part[last] = value
    return snapshot


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails


# this machine


def test_the_snapshot_is_json_and_agrees_with_the_system() -> None:
    snapshot = env.snapshot()
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert snapshot["schema"] == env.SCHEMA
    assert snapshot["os"]["kernel"] == os.uname().release
    assert snapshot["cpu"]["logical_cores"] == os.cpu_count()
    assert snapshot["python"]["version"] == sys.version.split()[0]
    assert snapshot["python"]["packages"]["numpy"] == importlib.metadata.version("numpy")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert snapshot["memory"]["total_bytes"] == pytest.approx(pages, rel=0.02)
    assert env.host_key(snapshot) == env.host_key(env.snapshot())
    assert all(isinstance(warning, str) for warning in env.warnings(snapshot))


def test_a_snapshot_imports_no_torch() -> None:
    program = (
        "import sys\nfrom kbench import env\ns = env.snapshot(); env.warnings(s); env.host_key(s)\n"
        "print(sorted({'torch', 'triton', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_any_of_the_files_has_unknown_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))  # no git either
    snapshot = env.snapshot(root=tmp_path, cwd=tmp_path)
    assert snapshot["checkout"] is None
    assert snapshot["gpus"] == [] and snapshot["gpu_error"] is None
    assert snapshot["cpu"]["governors"] == []
    for key in ("quota_cores", "turbo", "smt", "virtual"):
        assert snapshot["cpu"][key] is None
    assert snapshot["os"]["name"] is None and snapshot["os"]["container"] is None
    assert env.host_key(snapshot)
    env.warnings(snapshot)


def lay_out(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.usefixtures("no_gpu")
def test_the_kernel_files_are_read(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/cpuinfo": "processor: 0\nmodel name\t: AMD EPYC 9654\nflags\t: fpu hypervisor\n\nprocessor: 1\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "performance\n",
            "sys/devices/system/cpu/smt/active": "1\n",
            "sys/devices/system/cpu/intel_pstate/no_turbo": "1\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "etc/os-release": 'NAME=X\nPRETTY_NAME="Debian GNU/Linux 12"\n',
            "proc/1/cgroup": "0::/kubepods/besteffort\n",
        },
    )
    snapshot = env.snapshot(root=tmp_path, cwd=tmp_path)
    expected = {
        "model": "AMD EPYC 9654",
        "governors": ["performance", "powersave"],
        "smt": True,
        "turbo": False,
        "quota_cores": 1.5,
        "virtual": True,
    }
    assert expected.items() <= snapshot["cpu"].items()
    assert snapshot["os"]["name"] == "Debian GNU/Linux 12"


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("text", ["max 100000", "max", "", "what 0", "5 0"])
def test_a_control_group_without_a_limit_gives_no_quota(tmp_path: Path, text: str) -> None:
    lay_out(tmp_path, {"sys/fs/cgroup/cpu.max": text})
    assert env.snapshot(root=tmp_path, cwd=tmp_path)["cpu"]["quota_cores"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_checkout_is_described(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--initial-branch=topic")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    inner = tmp_path / "inner"
    inner.mkdir()
    expected = {"commit": git("rev-parse", "HEAD"), "branch": "topic", "dirty": False}
    assert env.snapshot(cwd=inner)["checkout"] == expected
    (tmp_path / "file").write_text("two")
    assert env.snapshot(cwd=inner)["checkout"] == {**expected, "dirty": True}
    git("checkout", "--detach", "--force", "HEAD")
    assert env.snapshot(cwd=inner)["checkout"]["branch"] is None


def test_only_variables_that_are_set_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    snapshot = env.snapshot()
    assert snapshot["variables"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "TRITON_INTERPRET" not in snapshot["variables"]
    assert any("CUDA_LAUNCH_BLOCKING" in warning for warning in env.warnings(snapshot))


# GPUs, through a stand-in for NVML


class NVMLError(Exception):
    pass


class LibraryNotFound(NVMLError):
    pass


class DriverNotLoaded(NVMLError):
    pass


def nvml(**replaced: Any) -> types.ModuleType:
    """The part of the binding that is used; one device, which does not report persistence mode."""

    def refuse(*_: object) -> None:
        raise NVMLError("Not Supported")

    module = types.ModuleType("pynvml")
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlSystemGetDriverVersion": lambda: b"580.159",
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: b"GPU-1",
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=150 * 10**9, used=10**9),
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 345, 2: 3201}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
        "nvmlDeviceGetPowerUsage": lambda handle: 76500,
        "nvmlDeviceGetPowerManagementLimit": lambda handle: 700000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda handle: 700000,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 31,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x4 | 0x1 | 0x200,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 0,
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetPersistenceMode": refuse,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
            types.SimpleNamespace(pid=2**31 - 1, usedGpuMemory=None),
        ],
        "NVMLError": NVMLError,
        "NVMLError_LibraryNotFound": LibraryNotFound,
        "NVMLError_DriverNotLoaded": DriverNotLoaded,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
    }
    for name, answer in {**answers, **replaced}.items():
        setattr(module, name, answer)
    return module


def with_nvml(monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> dict[str, Any]:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(**replaced))
    return env.snapshot()


def failing(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_device_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = with_nvml(monkeypatch)
    (gpu,) = snapshot["gpus"]
    expected = {
        "name": "NVIDIA H200",
        "uuid": "GPU-1",
        "compute_capability": "9.0",
        "sm_clock_mhz": 345,
        "sm_clock_max_mhz": 1980,
        "power_w": 76.5,
        "power_limit_w": 700.0,
        "temperature_c": 31,
        "throttle_reasons": ["gpu-idle", "software-power-cap", "0x200"],
        "mig": False,
        "persistence": None,
        "other_processes": [{"pid": 2**31 - 1, "name": None, "memory_bytes": None}],
    }
    assert expected.items() <= gpu.items()
    assert snapshot["gpu_driver"] == "580.159"
    json.dumps(snapshot)


def test_a_device_that_answers_nothing_is_still_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in vars(nvml()) if name.startswith("nvmlDeviceGet")]
    silent = {name: failing(NVMLError("Not Supported")) for name in names}
    del silent["nvmlDeviceGetCount"], silent["nvmlDeviceGetHandleByIndex"]
    snapshot = with_nvml(monkeypatch, **silent)
    (gpu,) = snapshot["gpus"]
    assert {key for key, value in gpu.items() if value is not None} == {"index"}
    assert env.host_key(snapshot)
    env.warnings(snapshot)


@pytest.mark.parametrize("error", [LibraryNotFound("no library"), DriverNotLoaded("no driver")])
def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    snapshot = with_nvml(monkeypatch, nvmlInit=failing(error))
    assert (snapshot["gpus"], snapshot["gpu_error"]) == ([], None)


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    snapshot = with_nvml(monkeypatch, **{function: failing(NVMLError("driver mismatch"))})
    assert (snapshot["gpus"], snapshot["gpu_error"]) == ([], "driver mismatch")
    assert any("driver mismatch" in warning for warning in env.warnings(snapshot))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("1, 0", [1, 0]),
        ("GPU-b", [1]),
        ("GPU-aa", [0]),
        ("GPU-", []),
        ("0,7,1", [0]),
        ("gpu", []),
    ],
)
def test_the_visible_devices_are_those_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[int]
) -> None:
    uuids = ["GPU-aa", "GPU-bb"]
    stand_in = nvml(nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetUUID=lambda handle: uuids[handle])
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu["index"] for gpu in env.gpus()] == expected


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi")
def test_nvidia_smi_sees_the_same_devices() -> None:
    query = "--query-gpu=name,uuid,driver_version,clocks.max.sm,power.limit"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True
    )
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    snapshot = env.snapshot()
    assert [
        [gpu["name"], gpu["uuid"], snapshot["gpu_driver"], gpu["sm_clock_max_mhz"], gpu["power_limit_w"]]
        for gpu in snapshot["gpus"]
    ] == [[name, uuid, driver, int(clock), float(limit)] for name, uuid, driver, clock, limit in rows]


# warnings and keys


def test_a_quiet_host_warns_of_nothing() -> None:
    assert env.warnings(QUIET) == []


@pytest.mark.parametrize("snapshot", [{}, {"cpu": None, "gpus": None}, {"gpus": [{}], "load_average": None}])
def test_unknown_facts_warn_of_nothing(snapshot: dict[str, Any]) -> None:
    assert env.warnings(snapshot) == []
    assert env.host_key(snapshot)


@pytest.mark.parametrize(
    ("place", "value", "word", "remedy"),
    [
        ("load_average", [9.5, 1.0, 1.0], "load average 9.5", "stop it"),
        ("cpu.governors", ["performance", "powersave"], "governor powersave", "cpupower"),
        ("cpu.quota_cores", 2.0, "grants 2 of 16", "raise the limit"),
        ("memory.available_bytes", 2**30, "1.0 of 128.0 GiB", "free"),
        ("battery", {"percent": 50, "plugged_in": False}, "battery", "plug"),
        ("variables.TRITON_INTERPRET", "1", "TRITON_INTERPRET", "unset"),
        ("variables.CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps", "MPS", "without it"),
        ("gpus.0.other_processes", [{"pid": 7, "name": "python"}], "python 7", "--device"),
        ("gpus.0.throttle_reasons", ["gpu-idle", "software-power-cap"], "software-power-cap", "cool"),
        ("gpus.0.temperature_c", 88, "88 °C", "cool"),
        ("gpus.0.power_limit_w", 500.0, "500 W", "this limit only"),
        ("gpus.0.ecc_uncorrected", 3, "3 uncorrected", "replace"),
        ("gpus.0.mig", True, "MIG", "slice"),
        ("gpus.0.persistence", False, "persistence", "nvidia-smi -pm 1"),
    ],
)
def test_each_disturbance_is_one_line_with_a_remedy(place: str, value: object, word: str, remedy: str) -> None:
    (warning,) = env.warnings(changed(place, value))
    assert word in warning and remedy in warning and "\n" not in warning


def test_the_host_key_reads_as_the_host() -> None:
    assert env.host_key(QUIET).startswith("h200-x1-intel-xeon-platinum-8480c-16c-")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("load_average", [9.0, 9.0, 9.0]),
        ("memory.available_bytes", 1),
        ("gpus.0.temperature_c", 70),
        ("gpus.0.throttle_reasons", ["software-power-cap"]),
        ("gpus.0.uuid", "GPU-2"),
        ("time", "2026-01-01T00:00:00Z"),
    ],
)
def test_the_host_key_ignores_what_passes(place: str, value: object) -> None:
    assert env.host_key(changed(place, value)) == env.host_key(QUIET)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("cpu.model", "AMD EPYC 9654"),
        ("cpu.usable_cores", 8),
        ("cpu.governors", ["powersave"]),
        ("gpus.0.name", "NVIDIA H100"),
        ("gpus.0.power_limit_w", 500.0),
        ("gpus", []),
    ],
)
def test_the_host_key_tells_classes_apart(place: str, value: object) -> None:
    assert env.host_key(changed(place, value)) != env.host_key(QUIET)
