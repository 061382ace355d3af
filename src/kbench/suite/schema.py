"""The suite file as types: closed, frozen, every key documented, unknown keys rejected.

Owns the shape of a claim (DESIGN §8). It checks what one file can tell by itself; whether a trace exists, a kernel
supports a page size or a rule can be satisfied is the business of `suite.checks` and of the plan.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from kbench.errors import UsageError
from kbench.suite.fields import (
    Mode,
    Multiple,
    Name,
    OpName,
    PresetName,
    ShapeText,
    StepText,
    Strict,
    checked,
    known_op,
)
from kbench.suite.rule_schema import Gate, Regime, Rule, Tolerances

SCHEMA = "kbench.suite/1"


class Claim(Strict):
    name: Name
    """Names the claim, and the folder under the results root."""
    baseline: Name
    """The variant in use today."""
    candidate: Name
    """The variant that is proposed."""
    expected_saving: float | None = Field(default=None, gt=0, lt=1)
    """Share of the operation's *time* that the candidate is expected to save; level 0 uses it."""
    changes_shared_state: bool = False
    """Page size, layout or memory change for everyone: regimes are trace classes, the scope is the deployment."""


class ModelSettings(Strict):
    preset: PresetName | None = None
    """A model shape with seeded weights; see `kbench list models`."""
    checkpoint: str | None = None
    """A Hugging Face checkpoint folder, relative to the suite."""
    layers: int | None = Field(default=None, ge=1, le=512)
    """Use this many layers instead of the preset's."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Element type of weights, activations and KV."""


class EngineSettings(Strict):
    kv_tokens: int = Field(default=16_384, ge=16, le=2**31)
    """Size of the KV pool that workloads share, in tokens. A step or kernel point gets the pool that it needs."""
    max_batched_tokens: int = Field(default=512, ge=1, le=2**20)
    """Token budget of one step, prefill chunks and decodes together."""
    max_seqs: int = Field(default=32, ge=1, le=65_536)
    """Sequences that may run at once."""
    graph: Literal["eager", "graph"] = "eager"
    """Launch kernels one by one, or replay captured CUDA graphs."""
    prefix_caching: bool = True
    """Reuse full pages whose whole prefix matches."""
    chunked_prefill: bool = True
    """Let a prompt be computed over several steps; off: a prompt waits until it fits into one step."""
    watermark: float = Field(default=0.0, ge=0, lt=1)
    """Share of the pages that admission leaves free."""


class EngineOverride(Strict):
    """The same keys as `[engine]`, for one variant only."""

    kv_tokens: int | None = Field(default=None, ge=16, le=2**31)
    max_batched_tokens: int | None = Field(default=None, ge=1, le=2**20)
    max_seqs: int | None = Field(default=None, ge=1, le=65_536)
    graph: Literal["eager", "graph"] | None = None
    prefix_caching: bool | None = None
    chunked_prefill: bool | None = None
    watermark: float | None = Field(default=None, ge=0, lt=1)


def _slot(text: str) -> None:
    name, at, op = text.partition("@")
    if not (at and name):
        raise UsageError(f"{text!r} is no slot", remedy="write NAME@OP, e.g. custom@attention.decode")
    known_op(op)


SlotName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}@[a-z0-9_.]+$"),
    AfterValidator(lambda text: checked(text, _slot)),
]


class AttentionChoice(Strict):
    prefill: str
    """Implementation of attention.prefill: a name, or FILE.py:FUNCTION relative to the suite."""
    decode: str
    """Implementation of attention.decode: a name, or FILE.py:FUNCTION relative to the suite."""


class Fallback(Strict):
    """Who may stand in for the implementation of one operation where that cannot be had."""

    op: OpName
    """The operation: attention.decode, attention.prefill or a key of `kernels`."""
    use: str
    """A name, or FILE.py:NAME relative to the suite. Several entries of one operation are asked in their order."""
    benchmarked: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{12,64})?$")] = ""
    """Hash of the plan that measured it. Without one nothing is enabled. It points at evidence and declares nothing, so
    that adding it later is no edit of the suite."""


class Variant(Strict):
    extends: Name | None = None
    """Start from this variant's keys."""
    attention: AttentionChoice | None = None
    """Who computes attention, in each phase."""
    draft: AttentionChoice | None = None
    """Who computes attention of a draft model beside it; absent: the same as the target's."""
    policy: Literal["reject", "fallback", "auto"] | None = None
    """Where an implementation cannot be had: stop with all reasons (reject, the default), take a declared fallback, or
    the first in the order of `kbench backends` that can."""
    fallback: tuple[Fallback, ...] | None = None
    """Under `fallback`: who is asked next, an operation at a time, in this order."""
    register_: dict[SlotName, str] = Field(default_factory=dict, alias="register")
    """NAME@OP → FILE.py:NAME: an implementation under a new name, e.g. into the slot custom@attention.decode."""
    override: dict[SlotName, str] = Field(default_factory=dict)
    """NAME@OP → FILE.py:NAME: as `register`, under a name that is taken, in this variant alone."""
    page_size: int | None = Field(default=None, ge=1, le=65_536)
    """Tokens a KV page."""
    layout: Literal["NHD", "HND"] | None = None
    """Order of a KV page: tokens before heads (NHD, the default) or heads before tokens (HND)."""
    kernels: dict[OpName, str] = Field(default_factory=dict)
    """Who computes other operations: op, or family of ops, → a name, or FILE.py:NAME relative to the suite."""
    engine: EngineOverride = EngineOverride()
    """Keys of `[engine]` that this variant overrides."""


class KernelLevel(Strict):
    ops: tuple[OpName, ...] = Field(default=("attention.decode",), min_length=1)
    """Operations to measure; see `kbench list ops`."""
    points: tuple[ShapeText, ...] = ()
    """Batches in the grammar [N*]Q[@K] joined by + (or vLLM's, 2q2k_32q1s4k), axes by name (m=4000,n=4000,k=4000), or
    both; an operation is measured at every one that fits it. May be left out where a file below brings shapes."""
    shapes: str | None = None
    """A CSV or TOML file of shapes (point, axes, weight), relative to the suite: all of them are measured."""
    recorded: str | None = None
    """What a workload had: steps.parquet of a run or the run's folder, relative to the suite; FILE#VARIANT where the
    baseline was named otherwise there. It weighs the summary; without `points` its commonest shapes are measured."""
    definition: str | None = None
    """A FlashInfer-Trace definition (JSON), relative to the suite; it needs `workload`."""
    workload: str | None = None
    """The workloads of that definition (JSON or JSONL), relative to the suite."""


class StepLevel(Strict):
    points: tuple[StepText, ...] = Field(min_length=1)
    """Batches, in the grammar [N*]Q[@K][c][:D] joined by +, and attributes after them: 32*1@4096;graph=off;tail=full.
    Attributes are page, tail, scatter, prefix_share, moe, sampling and graph."""


class Slo(Strict):
    ttft: Multiple | None = None
    """Time to first token, as a multiple of the unloaded baseline's median, e.g. "5x"."""
    tpot: Multiple | None = None
    """Time per output token after the first, as a multiple of the unloaded baseline's median."""
    ttft_ms: float | None = Field(default=None, gt=0)
    """Time to first token, absolute."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Time per output token after the first, absolute."""


class WorkloadLevel(Strict):
    traces: dict[Name, str] = Field(min_length=1)
    """Trace class → Parquet file, relative to the suite."""
    mode: Mode = "virtual"
    """How workload clauses are measured unless they name their own mode."""
    rate: Multiple | None = None
    """Request rate as a multiple of the baseline's capacity, e.g. "0.8x"; absent with requests_per_s: as recorded."""
    requests_per_s: float | None = Field(default=None, gt=0)
    """Request rate, absolute."""
    slo: Slo = Slo(ttft="5x", tpot="3x")
    """What makes a request good. Every named limit must hold."""
    segments: int = Field(default=20, ge=2, le=1_000)
    """Equal-count slices of the measured part of the trace, by session arrival: the unit of replication."""
    warmup: float = Field(default=0.1, ge=0, lt=0.9)
    """Share of the trace at its start that warms the cache and is not judged."""
    max_extrapolated: float = Field(default=0.05, ge=0, le=1)
    """Largest share of modelled steps outside the measured cost grid; above it the evidence is missing."""
    costs: dict[Name, str] = Field(default_factory=dict)
    """Variant → cost grid (Parquet), relative to the suite; absent: measured by level 2."""
    exec_s: float = Field(default=4.0, gt=0, le=3_600)
    """Length of the real slice that calibrates the model and compares outputs, in seconds a trace and arm."""


class Measure(Strict):
    """How long a session measures. The defaults are the demo's."""

    blocks: int = Field(default=6, ge=2, le=200)
    """Blocks of four windows (ABBA or BAAB) a case and session."""
    window_steps: int = Field(default=3, ge=1, le=10_000)
    """Fewest calls or steps in a window."""
    window_ms: float = Field(default=50.0, gt=0, le=60_000)
    """Shortest window."""
    cache: Literal["serving", "cold", "hot", "flush"] = "serving"
    """State of the caches that kernels are timed in: weights and KV cold and activations hot (serving), everything
    cold by rotation (cold) or by a flush before every call (flush), or the same buffers again (hot)."""
    timer: Literal["auto", "graph", "event", "profiler", "wall"] = "auto"
    """What reads the time of kernels: auto is graph replay on CUDA where it can be captured, else events; on a CPU the
    wall."""
    tuning: Literal["heuristic", "build", "warm-up", "live"] = "heuristic"
    """Which configuration an implementation with something to tune runs with: its own rule of thumb, what the cache
    holds (build), the cache after tuning this case first (warm-up), or tuned when first called (live)."""
    tuning_cache: str = ""
    """Folder of tuned configurations, relative to the suite; `kbench tune` fills it."""
    trial_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """A worker that is silent for longer is hung: it is ended and its trial recorded as such."""


class Suite(Strict):
    """One claim, whole: what is compared, where it is measured, and the rule that decides."""

    schema_: Literal["kbench.suite/1"] = Field(alias="schema")
    seed: int = Field(default=1, ge=0, lt=2**31)
    claim: Claim
    model: ModelSettings
    engine: EngineSettings = EngineSettings()
    variants: dict[Name, Variant] = Field(min_length=1)
    kernel: KernelLevel | None = None
    step: StepLevel | None = None
    workload: WorkloadLevel | None = None
    measure: Measure = Measure()
    rule: Rule = Rule()
    gate: Gate = Gate()
    regime: tuple[Regime, ...] = ()


class Arm(Strict):
    """One variant with everything resolved: what a worker needs to host it, and what the plan hashes."""

    name: Name
    model: ModelSettings
    engine: EngineSettings
    prefill: str
    decode: str
    page_size: int
    layout: Literal["NHD", "HND"]
    seed: int
    kernels: dict[str, str] = Field(default_factory=dict)
    """Implementations of operations other than paged attention."""
    tolerance: Tolerances = Field(default_factory=dict)
    """What the rule declares stricter than kbench's own limits; both arms are held to it."""
    root: str
    """Folder that relative paths start from."""
    draft: AttentionChoice | None = None
    """Who attends in the role of a draft model; None: as in that of the target."""
    policy: Literal["reject", "fallback", "auto"] = "reject"
    fallback: tuple[Fallback, ...] = ()
    registered: dict[str, str] = Field(default_factory=dict)
    """NAME@OP → reference, under a new name."""
    overridden: dict[str, str] = Field(default_factory=dict)
    """NAME@OP → reference, under a name that was taken."""
    without: tuple[str, ...] = ()
    """Implementations to be treated as gone (`--without`)."""

    def tolerated(self, check: Literal["kernel", "attention", "logits"]) -> dict[str, float]:
        """Element type → the rule's own limit of this check, where it has one."""
        limits = {dtype: getattr(given, check) for dtype, given in self.tolerance.items()}
        return {dtype: limit for dtype, limit in limits.items() if limit is not None}

    def implementation_of(self, op: str) -> str | None:
        """Who computes `op` in this arm: named for it, for its family (`gemm` for `gemm.qkv`), or nobody."""
        phases = {"attention.decode": self.decode, "attention.prefill": self.prefill}
        return phases.get(op) or self.kernels.get(op) or self.kernels.get(op.partition(".")[0])
