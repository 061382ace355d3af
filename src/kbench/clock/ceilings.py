"""What this device reaches: bandwidths and GEMM rates, measured once and kept; and what it cannot exceed.

Owns the measurement of the ceilings that a kernel is compared with, and their file in a folder that the caller names,
valid for one device, one torch and one number of threads. Measured ceilings may be passed: percentages above 100 are
news, not errors. The *physical* peak, from clocks and widths, is kept apart: only above it is a time impossible.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from kbench.clock.cache import last_level_bytes, plan_state
from kbench.clock.device import peak_bytes_per_us
from kbench.clock.profiler import profile_calls
from kbench.clock.timer import Call, prepared_timer

SCHEMA_VERSION = 2
WINDOWS = 3
WINDOW_MS = {"cuda": 30.0, "cpu": 150.0}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 512 << 20}
"""A buffer is at most this long, and as a rule many times the last-level cache."""
GEMM_SIZES = {"cuda": (4_096, 8_192), "cpu": (1_024,)}
FLOPS_PER_CLOCK = {
    (8, 0): {"bfloat16": 2_048, "float16": 2_048, "tf32": 1_024, "float32": 128},
    (9, 0): {"bfloat16": 4_096, "float16": 4_096, "float8": 8_192, "tf32": 2_048, "float32": 256},
}
"""Dense, of one multiprocessor, by compute capability: NVIDIA's A100 and H100 architecture papers."""


class Ceilings(BaseModel):
    """Bytes per µs are MB/s; FLOPs per µs are MFLOP/s."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    device: str
    uuid: str
    torch: str
    threads: int
    date: str
    cache_bytes: int
    copy_bytes_per_us: float
    """Read and written, both counted."""
    read_bytes_per_us: float
    write_bytes_per_us: float
    gemm_flops_per_us: dict[str, float]
    """By dtype; `tf32` in place of `float32` where torch was set to it; absent where the device cannot."""
    peak_bytes_per_us: float = 0.0
    """Physical; 0 where the device does not tell."""
    peak_flops_per_us: dict[str, float] = {}
    node_gap_us: dict[str, float] = {}
    """By cache state, `hot` or `cold`: what a node of a captured graph takes beyond its kernel's own time."""

    def impossible(self, latency_us: float, *, bytes_moved: float = 0.0, flops: float = 0.0, dtype: str = "") -> bool:
        """Whether a time is below what physics allows. Count only bytes that had to come from memory (cold)."""
        if latency_us <= 0:
            return True
        peak_flops = self.peak_flops_per_us.get(dtype, 0.0)
        too_many_bytes = self.peak_bytes_per_us > 0 and bytes_moved / latency_us > self.peak_bytes_per_us
        return too_many_bytes or (peak_flops > 0 and flops / latency_us > peak_flops)

    def roofline_us(self, *, bytes_read: float, bytes_written: float, flops: float, dtype: str) -> float:
        """Time at the measured ceilings: the larger of moving the bytes and doing the arithmetic."""
        rate = self.read_bytes_per_us if bytes_written < 0.1 * bytes_read else self.copy_bytes_per_us
        if bytes_read < 0.1 * bytes_written:
            rate = self.write_bytes_per_us
        gemm = self.gemm_flops_per_us.get(dtype, 0.0)
        return max((bytes_read + bytes_written) / rate, flops / gemm if gemm else 0.0)


def ceilings(device: torch.device, folder: Path) -> Ceilings:
    """What is stored in `folder` for this device, torch and threads, else measured now and stored there."""
    stored = load(device, folder)
    if stored is not None:
        return stored
    made = measure(device)
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(device, folder)
    draft = path.with_suffix(".draft")
    draft.write_text(made.model_dump_json(indent=1) + "\n")
    draft.replace(path)
    return made


def load(device: torch.device, folder: Path) -> Ceilings | None:
    """What is stored, or None: nothing, of another version, or unreadable (it is measured again then)."""
    try:
        stored = Ceilings.model_validate_json(_path(device, folder).read_text())
    except (OSError, ValidationError):
        return None
    return stored if stored.schema_version == SCHEMA_VERSION else None


def measure(device: torch.device, *, scale: float = 1.0) -> Ceilings:
    """Some seconds on a GPU, longer on a CPU. `scale` below 1 shrinks buffers, GEMMs and windows: for tests."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    cache = last_level_bytes(device)
    elements = int(scale * min(COPY_BYTES[kind], max(64 << 20, 16 * cache if kind == "cuda" else 2 * cache))) // 4
    window_ms = scale * WINDOW_MS[kind]
    with torch.inference_mode():
        copy, read, write = _bandwidths(max(1, elements), device, window_ms)
        gemms: dict[str, float] = {}
        for name, side, call in _gemms(device, [max(16, int(scale * side)) for side in GEMM_SIZES[kind]]):
            gemms[name] = max(gemms.get(name, 0.0), 2 * side**3 / best_us([call], device, window_ms))
    return Ceilings(
        device=device_name(device),
        uuid=device_uuid(device),
        torch=torch.__version__,
        threads=_threads(device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cache_bytes=cache,
        copy_bytes_per_us=copy,
        read_bytes_per_us=read,
        write_bytes_per_us=write,
        gemm_flops_per_us=gemms,
        peak_bytes_per_us=peak_bytes_per_us(device) or 0.0,
        peak_flops_per_us=peak_flops_per_us(device),
        node_gap_us=_node_gaps(device, window_ms) if device.type == "cuda" else {},
    )


def _node_gaps(device: torch.device, window_ms: float) -> dict[str, float]:
    """Graph reading less profiler time of a small kernel, hot and in a rotation of 3× the cache. Read before profiled:
    a profiler leaves later nodes longer."""
    timers = {}
    for state, elements in (("hot", 4_096), ("cold", 1 << 20)):
        plan = plan_state(8 * elements, 0, last_level_bytes(device), device.type, "cold")
        sets = [torch.ones(elements, device=device) for _ in range(plan.sets if state == "cold" else 1)]
        calls: list[Call] = [partial(torch.neg, values, out=values) for values in sets]
        timers[state] = prepared_timer(calls, device)
    readings = {state: median(timer.window(3, window_ms)) for state, timer in timers.items()}
    gaps = {}
    for state, timer in timers.items():
        seen = profile_calls(timer.witnessed, timer.round_calls, device)
        if seen is not None and timer.name == "graph":
            gaps[state] = readings[state] - seen.span_us
    return gaps


def _bandwidths(elements: int, device: torch.device, window_ms: float) -> tuple[float, float, float]:
    """Copied (read and written both counted), read alone and written alone, in bytes per µs."""
    source = torch.ones(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    size = 4 * elements
    calls: tuple[Call, ...] = (lambda: target.copy_(source), source.sum, lambda: target.fill_(1.0))
    copy, read, write = (size / best_us([call], device, window_ms) for call in calls)
    return 2 * copy, read, write


def best_us(calls: list[Call], device: torch.device, window_ms: float) -> float:
    """The fastest of a few windows' medians: a ceiling is what can be reached."""
    timer = prepared_timer(calls, device)
    return min(median(timer.window(3, window_ms)) for _ in range(WINDOWS))


def peak_flops_per_us(device: torch.device) -> dict[str, float]:
    """Physical peak by dtype at the highest clock; empty where the device or its architecture does not tell."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    per_clock = FLOPS_PER_CLOCK.get((properties.major, properties.minor), {})
    mhz = _highest_mhz(device)
    return {name: mhz * properties.multi_processor_count * flops for name, flops in per_clock.items()} if mhz else {}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def device_uuid(device: torch.device) -> str:
    """Of a GPU its own; of a CPU a hash of what it is called and how many there are."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    text = f"{platform.machine()} {models[:1]} {len(models)}"
    return f"cpu-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _threads(device: torch.device) -> int:
    return torch.get_num_threads() if device.type == "cpu" else 0


def _path(device: torch.device, folder: Path) -> Path:
    precise = "" if device.type == "cpu" or not torch.backends.cuda.matmul.allow_tf32 else "-tf32"
    version = torch.__version__.replace("+", "-")
    return folder / f"ceilings-{device_uuid(device)}-torch-{version}-threads-{_threads(device)}{precise}.json"


def _highest_mhz(device: torch.device) -> float:
    try:
        import pynvml
    except ImportError:
        return 0.0
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return float(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))
    except (pynvml.NVMLError, AttributeError):
        return 0.0


def _gemms(device: torch.device, sides: list[int]) -> Iterator[tuple[str, int, Call]]:
    """Square products of random values (zeros would draw less power and run faster) that this device supports."""
    fast = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    names = {torch.float32: "tf32" if fast else "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    for side in sides:
        for dtype, name in names.items():
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            yield from _if_supported(name, side, _product(a, b))
        if device.type == "cuda":
            yield from _if_supported("float8", side, partial(_float8, side, device))


def _product(a: Tensor, b: Tensor) -> Callable[[], Call]:
    out = torch.empty_like(a)
    return lambda: lambda: torch.mm(a, b, out=out)


def _if_supported(name: str, side: int, make: Callable[[], Call]) -> Iterator[tuple[str, int, Call]]:
    try:
        call = make()
        call()
    except (RuntimeError, AttributeError, TypeError):  # torch's words for a dtype that the device or build lacks
        return
    yield name, side, call


def _float8(side: int, device: torch.device) -> Call:
    a = torch.randn(side, side, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(side, side, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
