"""Clocks, power, temperature and throttle reasons of a CUDA device, read through NVML, never changed.

What cannot be read is absent from the answer, not zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

THROTTLE_REASONS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


class DeviceClock:
    """One device's sensors; on a CPU, or without NVML, `read` returns an empty dictionary."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if device.type == "cuda":
            self._open(device)

    def _open(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            properties = torch.cuda.get_device_properties(device)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            self._nvml = pynvml
        except (pynvml.NVMLError, AttributeError):
            self._handle = None

    def read(self) -> dict[str, Any]:
        """`sm_mhz`, `memory_mhz`, `power_w`, `temperature_c`, `throttle` (reasons in words), `flags`."""
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        values: dict[str, Any] = {}
        self._take(values, "sm_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        self._take(values, "memory_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        self._take(values, "power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1_000)
        self._take(values, "temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        self._take(values, "throttle_bits", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        if "throttle_bits" in values:
            values["throttle"] = throttle_reasons(int(values.pop("throttle_bits")))
            values["flags"] = ["THROTTLED"] if values["throttle"] else []
        return values

    def _take(self, values: dict[str, Any], name: str, read: Callable[[], Any]) -> None:
        try:
            values[name] = read()
        except self._nvml.NVMLError:
            return


def throttle_reasons(bits: int) -> list[str]:
    """The reasons that slow a busy device down; idleness and chosen clocks are none."""
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


def peak_bytes_per_us(device: torch.device) -> float | None:
    """Physical memory bandwidth from clock and bus width, None where the device does not tell."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "memory_clock_rate", 0)
    bus_bits = getattr(properties, "memory_bus_width", 0)
    if not clock_khz or not bus_bits:
        return None
    return 2 * clock_khz * 1_000 * bus_bits / 8 / 1e6
