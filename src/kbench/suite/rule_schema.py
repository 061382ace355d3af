"""The rule of a suite as types: regimes and their clauses, errors and looks, what voids, where an enable holds.

Whether a rule can be satisfied in its suite is the business of `suite.checks`, `suite.rules` and of the plan.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kbench.suite.fields import Level, Metric, Mode, Name, ShapeText, Strict, Test


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
    points: tuple[ShapeText, ...] = ()
    """Kernel and step cells that this regime needs; every one must be measured. A point with attributes is a step's."""
    require: tuple[Clause, ...] = Field(min_length=1)
    """All of them must pass."""


class RulePolicy(Strict):
    stop: Literal["never", "when-decided"] = "when-decided"
    """Whether to go on measuring what can no longer change a verdict."""
    selector_ttl_days: int = Field(default=90, ge=1, le=3_650)
    """How long after its newest run a selector may enable anything."""


VoidCode = Literal["baseline_crash", "throttle", "ecc", "gpu_lost", "wrong_backend", "host_contention"]
"""Every code that something can raise; `decide.voids` says on what evidence."""

VersionRange = Annotated[str, StringConstraints(pattern=r"^(>=|<=|==|>|<)\d+(\.\d+)*(,(>=|<=|==|>|<)\d+(\.\d+)*)*$")]


class Power(Strict):
    """What the plan must be able to see; `kbench plan` says whether it can, from the scatter of earlier sessions."""

    target: float = Field(default=0.9, gt=0.5, lt=1)
    """Probability of an enable where the candidate truly saves `at_saving`."""
    at_saving: float = Field(gt=0, lt=1)
    """The true saving of time that is hoped for; it must exceed every `min_saving`."""


class Validity(Strict):
    """Where an enable holds beyond the very machine that was measured; what was measured must lie inside."""

    gpu: Annotated[str, StringConstraints(pattern=r"^[^*<>=]{3,128}\*?$")] | None = None
    """Name of the GPU, or its beginning followed by *; absent: exactly the measured one."""
    driver: VersionRange | None = None
    """Range of driver versions, e.g. ">=570,<600"; absent: exactly the measured one."""
    torch: VersionRange | None = None
    """Range of torch versions; what follows a + is not compared. Absent: exactly the measured one."""
    kbench: VersionRange | None = None
    """Range of kbench versions, the measured engine; absent: exactly the measured one."""


class Tolerance(Strict):
    """Largest relative L2 errors of one element type, each stricter than what ships with kbench."""

    kernel: float | None = Field(default=None, gt=0)
    """Of an output row of an operation in this type (level 1); absent: 3× the reference's own error."""
    attention: float | None = Field(default=None, gt=0)
    """Of a token and head of a layer's attention inside a step of this type (level 2)."""
    logits: float | None = Field(default=None, gt=0)
    """Of a row of logits of a step of this type (level 2), from the step with the reference attention."""


Tolerances = dict[Literal["float32", "float16", "bfloat16"], Tolerance]
"""Element type → what is forgiven in it."""


class Diagnostics(Strict):
    contaminated: Literal["report", "inconclusive"] = "report"
    """A step cell whose control phases (those that the candidate cannot touch) moved: say so, or refuse to enable."""


class Rule(Strict):
    alpha: float = Field(default=0.05, gt=0, le=0.2)
    """Probability of a wrong enable of any regime."""
    looks: tuple[int, ...] = Field(default=(6, 8, 12), min_length=1)
    """Numbers of sessions at which the evidence is looked at."""
    void_codes: tuple[VoidCode, ...] = ("baseline_crash",)
    """Events that void a session for both arms, whichever arm they came from. Nothing else is ever left out."""
    max_void_fraction: float = Field(default=1.0, ge=0, le=1)
    """Largest share of void and lost sessions; above it nothing is enabled: inconclusive."""
    max_runs: int | None = Field(default=None, ge=1, le=10_000)
    """Most runs of one plan, aborted ones included; with more it is not confirmatory any longer: inconclusive."""
    require_committed: bool = False
    """The suite file must be committed and unchanged in git before anything is measured."""
    power: Power | None = None
    """What the plan must be able to see."""
    validity: Validity = Validity()
    """Where an enable holds beyond the very machine that was measured."""
    tolerance: Tolerances = Field(default_factory=dict)
    """Element type → tolerances of correctness that are stricter than those that ship."""
    diagnostics: Diagnostics = Diagnostics()
    """What follows from a cell whose control phases moved."""
    policy: RulePolicy = RulePolicy()


class Gate(Strict):
    """How `kernel --gate` and `step --gate` judge a change before it is merged. It is no part of the rule."""

    sessions: int = Field(default=1, ge=1, le=3)
    """Sessions of the quick tier, which needs the host's noise card; without one it is the rule's first look."""
    margin: float = Field(default=0.02, gt=0, lt=10)
    """A cell passes when no slow-down beyond this is left possible, relative."""
