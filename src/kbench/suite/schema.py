"""The suite file as types: closed, frozen, every key documented, unknown keys rejected.

Owns the shape of a claim (DESIGN §8). It checks what one file can tell by itself; whether a trace exists, a kernel
supports a page size or a rule can be satisfied is the business of `suite.checks` and of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from kbench import catalog
from kbench.errors import UsageError

SCHEMA = "kbench.suite/1"

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Multiple = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?x$")]


def _checked(text: str, parse: Callable[[str], object]) -> str:
    """Turn a catalogue error into one that pydantic collects with all the others."""
    try:
        parse(text)
    except UsageError as error:
        problem = error.problems[0]
        raise ValueError(f"{problem.what} | {problem.remedy}") from error
    return text


def _op(text: str) -> None:
    if text not in catalog.OPS:
        raise UsageError(f"no operation {text!r}", remedy=f"one of {', '.join(catalog.OPS)}")


PointText = Annotated[str, AfterValidator(lambda text: _checked(text, catalog.parse_point))]
PresetName = Annotated[str, AfterValidator(lambda text: _checked(text, catalog.model_shape))]
OpName = Annotated[str, AfterValidator(lambda text: _checked(text, _op))]
Level = Literal["kernel", "step", "workload"]
Mode = Literal["virtual", "exec"]
Test = Literal["superiority", "noninferiority", "max_increase", "equivalence"]
Metric = Literal[
    "latency",
    "step_time",
    "step_time_p99",
    "conversion_time",
    "metadata_time",
    "goodput",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "preemptions_per_1k",
    "recomputed_tokens",
    "hit_ratio",
    "output_divergence",
]
METRICS_OF_LEVEL: dict[str, tuple[str, ...]] = {
    "kernel": ("latency",),
    "step": ("step_time", "step_time_p99", "conversion_time", "metadata_time"),
    "workload": (
        "goodput",
        "ttft_p50",
        "ttft_p99",
        "tpot_p50",
        "tpot_p99",
        "preemptions_per_1k",
        "recomputed_tokens",
        "hit_ratio",
        "output_divergence",
    ),
}


class Strict(BaseModel):
    """Base of every table: frozen, closed, and a string under a field is that field's documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


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


class AttentionChoice(Strict):
    prefill: str
    """Implementation of attention.prefill: a name, or FILE.py:FUNCTION relative to the suite."""
    decode: str
    """Implementation of attention.decode: a name, or FILE.py:FUNCTION relative to the suite."""


class Variant(Strict):
    extends: Name | None = None
    """Start from this variant's keys."""
    attention: AttentionChoice | None = None
    """Who computes attention, in each phase."""
    page_size: int | None = Field(default=None, ge=1, le=65_536)
    """Tokens a KV page."""
    layout: Literal["NHD", "HND"] | None = None
    """Order of a KV page: tokens before heads (NHD, the default) or heads before tokens (HND)."""
    engine: EngineOverride = EngineOverride()
    """Keys of `[engine]` that this variant overrides."""


class KernelLevel(Strict):
    ops: tuple[OpName, ...] = Field(default=("attention.decode",), min_length=1)
    """Operations to measure; see `kbench list ops`."""
    points: tuple[PointText, ...] = Field(min_length=1)
    """Batches, in the grammar [N*]Q[@K] joined by +."""


class StepLevel(Strict):
    points: tuple[PointText, ...] = Field(min_length=1)
    """Batches, in the grammar [N*]Q[@K] joined by +."""


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
    trial_timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """A worker that is silent for longer is hung: it is ended and its trial recorded as such."""


class Clause(Strict):
    level: Level
    metric: Metric
    test: Test
    min_saving: float | None = Field(default=None, ge=0, lt=1)
    """superiority: the saving of time that the lower bound must exceed."""
    margin: float | None = Field(default=None, gt=0, lt=10)
    """noninferiority, max_increase, equivalence: relative margin."""
    across: Literal["every-cell", "weighted"] = "every-cell"
    """Whether every cell must pass by itself, or the cells weighted by recorded shapes."""
    mode: Mode | None = None
    """Workload clauses: how it is measured; absent: the mode of [workload]."""


class When(Strict):
    """A region that a dispatcher can recognise per step; bounds are inclusive."""

    context: tuple[int, int] | None = None
    batch: tuple[int, int] | None = None


class Regime(Strict):
    id: Name
    trace_class: tuple[Name, ...] = ()
    """Trace classes that this regime speaks about."""
    when: When | None = None
    """For changes that can be switched per step: ranges instead of trace classes."""
    points: tuple[PointText, ...] = ()
    """Kernel and step cells that this regime needs; every one must be measured."""
    require: tuple[Clause, ...] = Field(min_length=1)
    """All of them must pass."""


class RulePolicy(Strict):
    stop: Literal["never", "when-decided"] = "when-decided"
    """Whether to go on measuring what can no longer change a verdict."""
    selector_ttl_days: int = Field(default=90, ge=1, le=3_650)
    """How long after its newest run a selector may enable anything."""


class Rule(Strict):
    alpha: float = Field(default=0.05, gt=0, le=0.2)
    """Probability of a wrong enable of any regime."""
    looks: tuple[int, ...] = Field(default=(6, 8, 12), min_length=1)
    """Numbers of sessions at which the evidence is looked at."""
    policy: RulePolicy = RulePolicy()


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
    root: str
    """Folder that relative paths start from."""
