"""NVIDIA devices as NVML reports them, without torch and without a CUDA context.

A machine without the driver has no GPUs and no error; a driver that does not answer is an error text beside an empty
list. A fact that a device does not report is None. NVML's clocks lag by up to a second: they describe the state of
rest here, not a kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_THROTTLE_BITS = {
    0x001: "gpu-idle",
    0x002: "applications-clocks-setting",
    0x004: "software-power-cap",
    0x008: "hardware-slowdown",
    0x010: "sync-boost",
    0x020: "software-thermal-slowdown",
    0x040: "hardware-thermal-slowdown",
    0x080: "hardware-power-brake",
    0x100: "display-clock-setting",
}


def gpu_facts() -> dict[str, Any]:
    """`gpus` (a list, empty without NVIDIA devices), `gpu_driver` and `gpu_error` (None when all is well)."""
    none: dict[str, Any] = {"gpus": [], "gpu_driver": None, "gpu_error": None}
    try:
        import pynvml
    except ImportError:
        return none
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return none
    except pynvml.NVMLError as error:
        return {**none, "gpu_error": str(error)}
    try:
        devices = range(pynvml.nvmlDeviceGetCount())
        return {
            "gpus": [_device(pynvml, i) for i in devices],
            "gpu_driver": _plain(_ask(pynvml, "nvmlSystemGetDriverVersion")),
            "gpu_error": None,
        }
    except pynvml.NVMLError as error:
        return {**none, "gpu_error": str(error)}
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[dict[str, Any]]:
    """The devices that CUDA would show this process: those of NVML that CUDA_VISIBLE_DEVICES, if set, lets through.

    As CUDA reads it: indices or UUID prefixes in the wanted order, up to the first that names no device; empty or -1
    hides all. Torch is not asked, so that a parent process need not hold a GPU to know that there is one.
    """
    found: list[dict[str, Any]] = gpu_facts()["gpus"]
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return found
    visible: list[dict[str, Any]] = []
    for name in (part.strip() for part in wanted.split(",")):
        matches = [gpu for gpu in found if name in (str(gpu["index"]), gpu["uuid"]) or _is_prefix(name, gpu["uuid"])]
        if len(matches) != 1:
            break
        visible += matches
    return visible


def capability(device: str) -> tuple[int, int] | None:
    """Compute capability of the first visible GPU where `device` is cuda, as NVML has it; None: unknown."""
    first = next(iter(gpus()), None) if device == "cuda" else None
    major, _, minor = str(first["compute_capability"] or "").partition(".") if first is not None else ("", "", "")
    return (int(major), int(minor)) if major and minor else None


def throttle_reasons(bits: int) -> list[str]:
    """The names of the set bits of NVML's clock event reasons; a bit without a name is given in hexadecimal."""
    return [_THROTTLE_BITS.get(1 << i, hex(1 << i)) for i in range(bits.bit_length()) if bits >> i & 1]


def _device(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        return _ask(nvml, function, handle, *arguments)

    memory = ask("nvmlDeviceGetMemoryInfo")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons")  # the name before driver 535
    mig = ask("nvmlDeviceGetMigMode")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    limit_mw, default_mw = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    power_mw = ask("nvmlDeviceGetPowerUsage")
    return {
        "index": index,
        "name": _plain(ask("nvmlDeviceGetName")),
        "uuid": _plain(ask("nvmlDeviceGetUUID")),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "memory_total_bytes": None if memory is None else int(memory.total),
        "memory_used_bytes": None if memory is None else int(memory.used),
        "sm_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "memory_clock_max_mhz": ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        "power_w": None if power_mw is None else power_mw / 1000,
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "power_limit_default_w": None if default_mw is None else default_mw / 1000,
        "temperature_c": ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None if bits is None else throttle_reasons(bits),
        "ecc_uncorrected": ask(
            "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        "mig": None if mig is None else bool(mig[0]),
        "persistence": _flag(ask("nvmlDeviceGetPersistenceMode")),
        "other_processes": _other_processes(ask("nvmlDeviceGetComputeRunningProcesses")),
    }


def _other_processes(running: Any) -> list[dict[str, Any]] | None:
    """Compute processes but this one and its descendants. A container may number its own otherwise than NVML does."""
    if running is None:
        return None
    import psutil

    own = {os.getpid()}
    own.update(child.pid for child in psutil.Process().children(recursive=True))
    return [
        {"pid": process.pid, "name": _process_name(psutil, process.pid), "memory_bytes": process.usedGpuMemory}
        for process in running
        if process.pid not in own
    ]


def _process_name(psutil: Any, pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """One NVML query; None where the device, the driver or this version of the binding has no answer."""
    query: Callable[..., Any] | None = getattr(nvml, function, None)
    if query is None:
        return None
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None


def _plain(value: Any) -> str | None:
    """Text; bindings before 11.5 answered in bytes."""
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _is_prefix(name: str, uuid: str | None) -> bool:
    return name.startswith(("GPU-", "MIG-")) and uuid is not None and uuid.startswith(name)


def _flag(value: Any) -> bool | None:
    return None if value is None else bool(value)
