"""What a snapshot says about the measurement to come: what would disturb it, and which class of host this is.

Pure functions of the snapshot, so that a stored one can be judged elsewhere. Nothing here refuses a measurement.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BUSY_SHARE = 0.25
_LOW_MEMORY_SHARE = 0.10
_HOT_C = 80
_HARMLESS_THROTTLE = {"gpu-idle", "applications-clocks-setting", "sync-boost", "display-clock-setting"}


def warnings(snapshot: Mapping[str, Any]) -> list[str]:
    """One line for each thing that makes measurements on this host noisier or slower, with what to do about it.

    A fact that the snapshot lacks warns of nothing.
    """
    return [*_host_warnings(snapshot), *_variable_warnings(snapshot), *_gpu_warnings(snapshot)]


def host_key(snapshot: Mapping[str, Any]) -> str:
    """A readable, stable name of the class of host: `h200-x1-intel-xeon-16c-1f2e3d4c`.

    Two snapshots share it when processor, usable cores, governor, and the GPUs' names and power limits agree: what an
    A/A calibration depends on. Load, temperature, versions and the machine's name are not part of it.
    """
    cpu, gpus = _part(snapshot, "cpu"), _gpus(snapshot)
    cores = cpu.get("usable_cores") or 0
    identity = {
        "machine": _part(snapshot, "os").get("machine"),
        "cpu": cpu.get("model"),
        "logical_cores": cpu.get("logical_cores"),
        "usable_cores": cores,
        "quota_cores": cpu.get("quota_cores"),
        "governors": cpu.get("governors"),
        "turbo": cpu.get("turbo"),
        "gpus": sorted(f"{gpu.get('name')} {gpu.get('power_limit_w')} W mig={gpu.get('mig')}" for gpu in gpus),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    names = sorted({_slug(str(gpu.get("name") or "gpu")) for gpu in gpus})
    device = f"{'-'.join(names)}-x{len(gpus)}-" if gpus else ""
    return f"{device}{_slug(str(cpu.get('model') or 'cpu'))}-{cores}c-{digest}"


def _host_warnings(snapshot: Mapping[str, Any]) -> Iterator[str]:
    cpu, memory = _part(snapshot, "cpu"), _part(snapshot, "memory")
    cores, load = cpu.get("usable_cores"), snapshot.get("load_average")
    if cores and load and load[0] > _BUSY_SHARE * cores:
        yield f"load average {load[0]:g} on {cores} usable core(s): other work runs here; wait for it or stop it"
    uneasy = sorted(set(cpu.get("governors") or ()) - {"performance"})
    if uneasy:
        yield (
            f"CPU governor {', '.join(uneasy)}: clocks follow the load; "
            "ask an administrator for `cpupower frequency-set -g performance`"
        )
    quota = cpu.get("quota_cores")
    if quota and cores and quota < cores:
        yield (
            f"a control group grants {quota:g} of {cores} core(s): processes are paused when it is used up; "
            "raise the limit or pin fewer cores"
        )
    total, available = memory.get("total_bytes"), memory.get("available_bytes")
    if total and available is not None and available < _LOW_MEMORY_SHARE * total:
        yield f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB memory free: both arms must fit; free some"
    battery = snapshot.get("battery")
    if battery and battery.get("plugged_in") is False:
        yield f"on battery ({battery.get('percent')} %): clocks are held down; plug the power in"


def _variable_warnings(snapshot: Mapping[str, Any]) -> Iterator[str]:
    variables = _part(snapshot, "variables")
    if variables.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield "CUDA_LAUNCH_BLOCKING is set: every launch waits for its kernel; unset it"
    if variables.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield "TRITON_INTERPRET is set: Triton kernels run in Python; unset it"
    if variables.get("CUDA_MPS_PIPE_DIRECTORY"):
        yield "CUDA_MPS_PIPE_DIRECTORY is set: the GPU may be shared through MPS; measure without it"


def _gpu_warnings(snapshot: Mapping[str, Any]) -> Iterator[str]:
    if snapshot.get("gpu_error"):
        yield f"the NVIDIA driver does not answer ({snapshot['gpu_error']}): check `nvidia-smi`, reload the driver"
    for gpu in _gpus(snapshot):
        name = f"GPU {gpu.get('index')} ({gpu.get('name')})"
        others = gpu.get("other_processes") or []
        if others:
            who = ", ".join(f"{process.get('name') or 'process'} {process.get('pid')}" for process in others)
            yield f"{name}: used by {who}; end it or choose another with --device"
        reasons = sorted(set(gpu.get("throttle_reasons") or ()) - _HARMLESS_THROTTLE)
        if reasons:
            yield f"{name}: clocks are held down by {', '.join(reasons)}; let it cool and idle, check power and cooling"
        if (gpu.get("temperature_c") or 0) >= _HOT_C:
            yield f"{name}: {gpu['temperature_c']} °C before any work; let it cool"
        limit, default = gpu.get("power_limit_w"), gpu.get("power_limit_default_w")
        if limit and default and limit < default:
            yield f"{name}: power limit {limit:g} W, default {default:g} W; results hold for this limit only"
        if gpu.get("ecc_uncorrected"):
            yield f"{name}: {gpu['ecc_uncorrected']} uncorrected memory error(s); results cannot be trusted, replace it"
        if gpu.get("mig"):
            yield f"{name}: MIG is on, neighbours share memory bandwidth; results hold for this slice only"
        if gpu.get("persistence") is False:
            yield f"{name}: persistence mode is off, the first call pays for start-up; `nvidia-smi -pm 1`"


def _part(snapshot: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = snapshot.get(key)
    return part if isinstance(part, Mapping) else {}


def _gpus(snapshot: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [gpu for gpu in snapshot.get("gpus") or () if isinstance(gpu, Mapping)]


def _slug(name: str) -> str:
    """`NVIDIA H200` → `h200`, `Intel(R) Xeon(R) Platinum 8480C` → `intel-xeon-platinum-8480c`."""
    plain = re.sub(r"\((r|tm|c)\)|nvidia|\bcpu\b|\bprocessor\b|@.*", " ", name.lower())
    return "-".join(re.findall(r"[a-z0-9]+", plain)) or "unknown"
