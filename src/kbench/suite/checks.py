"""What one table of a suite says about another: names that must exist, rules that can be satisfied.

Owns the cross-references. They work on a validated `Suite` and report every problem they find, as paths and sentences;
the loader adds file and line. Problems stop the suite, warnings are shown and kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kbench import catalog
from kbench.checkpoints import check_checkpoint
from kbench.errors import UsageError
from kbench.suite.choice_checks import choice_problems, served_problems
from kbench.suite.fields import METRICS_OF_LEVEL
from kbench.suite.regimes import regime_problems, regime_warnings
from kbench.suite.rule_schema import Clause, Regime
from kbench.suite.rules import rule_problems, rule_warnings
from kbench.suite.schema import Arm, AttentionChoice, ModelSettings, Suite, Variant
from kbench.suite.step_points import step_problems

MOST_SESSIONS = 1_000
PAGED = ("attention.decode", "attention.prefill")
"""Operations whose implementation a variant names under `attention`."""
KeyPath = tuple[str | int, ...]
Found = tuple[KeyPath, str, str]
"""Where, what is wrong, the remedy."""


def arm_of(suite: Suite, name: str, root: Path) -> Arm:
    """The variant with all that it extends and overrides filled in. Raises UsageError if something is missing."""
    chain = _chain(suite, name)
    attention = next((variant.attention for variant in chain if variant.attention), _unused_attention(suite))
    page_size = next((variant.page_size for variant in chain if variant.page_size), _unused_page(suite))
    layout = next((variant.layout for variant in chain if variant.layout), None)
    if attention is None or page_size is None:
        missing = "attention" if attention is None else "page_size"
        raise UsageError(f"variant {name!r} has no {missing}", remedy=f"set variants.{name}.{missing} or extend one")
    engine = suite.engine
    for variant in reversed(chain):
        engine = engine.model_copy(update=variant.engine.model_dump(exclude_none=True))
    return Arm(
        name=name,
        model=suite.model,
        engine=engine,
        prefill=attention.prefill,
        decode=attention.decode,
        page_size=page_size,
        layout=layout or "NHD",
        seed=suite.seed,
        kernels={op: name for variant in reversed(chain) for op, name in variant.kernels.items()},
        tolerance=suite.rule.tolerance,
        root=str(root.absolute()),  # whatever the working folder becomes under code of somebody else
        draft=next((variant.draft for variant in chain if variant.draft), None),
        policy=next((variant.policy for variant in chain if variant.policy), "reject"),
        fallback=next((variant.fallback for variant in chain if variant.fallback is not None), ()),
        registered={slot: to for variant in reversed(chain) for slot, to in variant.register_.items()},
        overridden={slot: to for variant in reversed(chain) for slot, to in variant.override.items()},
    )


def _needs_attention(suite: Suite) -> bool:
    """Steps and replays run whole layers; a suite of other kernels need not say who attends."""
    ops = suite.kernel.ops if suite.kernel else ()
    return bool(suite.step or suite.workload) or any(op in PAGED for op in ops)


def _unused_attention(suite: Suite) -> AttentionChoice | None:
    return None if _needs_attention(suite) else AttentionChoice(prefill="reference", decode="reference")


def _unused_page(suite: Suite) -> int | None:
    return None if _needs_attention(suite) else 16


def _chain(suite: Suite, name: str) -> list[Variant]:
    chain: list[Variant] = []
    seen: list[str] = []
    current: str | None = name
    while current is not None:
        if current in seen:
            raise UsageError(f"variants extend each other: {' → '.join([*seen, current])}", remedy="break the circle")
        if current not in suite.variants:
            known = ", ".join(suite.variants)
            raise UsageError(f"no variant {current!r}", remedy=f"one of {known}, or add [variants.{current}]")
        seen.append(current)
        chain.append(suite.variants[current])
        current = suite.variants[current].extends
    return chain


def problems(suite: Suite, root: Path) -> Iterator[Found]:
    yield from _claim(suite, root)
    yield from _variants(suite, root)
    yield from _levels(suite, root)
    yield from _step_points(suite, root)
    for index, regime in enumerate(suite.regime):
        yield from _regime(suite, regime, index)
    looks = suite.rule.looks
    if list(looks) != sorted(set(looks)) or looks[0] < 2:
        yield ("rule", "looks"), f"looks are {list(looks)}", "increasing numbers of sessions, from 2 on"
    elif looks[-1] > MOST_SESSIONS:
        yield ("rule", "looks"), f"a look at {looks[-1]} sessions", f"at most {MOST_SESSIONS}"
    yield from rule_problems(suite)


def warnings(suite: Suite) -> Iterator[Found]:
    """What is allowed and probably not meant."""
    if suite.workload:
        named = {name for regime in suite.regime for name in regime.trace_class}
        for name in suite.workload.traces:
            if name not in named:
                yield ("workload", "traces", name), f"no regime speaks about trace class {name!r}", "name it in one"
    yield from regime_warnings(suite)
    yield from rule_warnings(suite)
    if not suite.regime:
        yield ("regime",), "the suite has no regime, so there is nothing to decide", "add [[regime]]"


def _claim(suite: Suite, root: Path) -> Iterator[Found]:
    for role in ("baseline", "candidate"):
        name = getattr(suite.claim, role)
        if name not in suite.variants:
            yield ("claim", role), f"no variant {name!r}", f"one of {', '.join(suite.variants)}"
    if suite.claim.baseline == suite.claim.candidate:
        yield ("claim", "candidate"), "baseline and candidate are the same variant", "an A/A run is kbench calibrate"
    if (suite.model.preset is None) == (suite.model.checkpoint is None):
        yield ("model",), "needs exactly one of preset and checkpoint", 'e.g. preset = "tiny"'
    else:
        yield from _model(suite, root)


def _model(suite: Suite, root: Path) -> Iterator[Found]:
    """Whether the engine can host the model: its parts, and every tensor of a checkpoint by the files' headers."""
    try:
        shape = model_of(suite.model, root)
    except UsageError as error:
        for problem in error.problems:
            yield ("model", "checkpoint"), f"{problem.file}: {problem.what}", problem.remedy
        return
    if shape.foreign and (suite.step or suite.workload):
        what = f"the embedded engine does not run {shape.name}: it has {', '.join(shape.foreign)}"
        yield ("model", "preset"), what, "drop [step] and [workload], or name another model"
    if suite.model.checkpoint is not None and suite.model.layers not in (None, shape.layers):
        what = f"layers is {suite.model.layers}, the checkpoint has {shape.layers}"
        yield ("model", "layers"), what, "leave layers out"


def model_of(model: ModelSettings, root: Path) -> catalog.ModelShape:
    """Of a preset with the suite's number of layers, or of a checkpoint. UsageError where that cannot be loaded."""
    if model.preset is not None:
        return catalog.model_shape(model.preset).with_layers(model.layers)
    return check_checkpoint(root / str(model.checkpoint))


def _variants(suite: Suite, root: Path) -> Iterator[Found]:
    try:
        shape = model_of(suite.model, root)
    except UsageError:
        shape = None  # said once, of the model
    for name in suite.variants:
        path: KeyPath = ("variants", name)
        try:
            arm = arm_of(suite, name, root)
        except UsageError as error:
            yield path, error.problems[0].what, error.problems[0].remedy
            continue
        wrong = list(choice_problems(arm, path, root))
        yield from wrong
        if shape is not None and not wrong:
            yield from served_problems(arm, path, shape)
        if name in (suite.claim.baseline, suite.claim.candidate):
            for op in suite.kernel.ops if suite.kernel else ():
                if arm.implementation_of(op) is None:
                    yield (*path, "kernels"), f"nobody computes {op}", f'e.g. kernels = {{ "{op}" = "{_any(op)}" }}'
        if arm.engine.kv_tokens < arm.page_size * 2:
            yield (
                path,
                f"a pool of {arm.engine.kv_tokens} tokens holds no two pages of {arm.page_size}",
                "raise kv_tokens",
            )


def _step_points(suite: Suite, root: Path) -> Iterator[Found]:
    try:
        shape = model_of(suite.model, root)
    except UsageError:
        shape = None  # said of the model
    arms = []
    for name in (suite.claim.baseline, suite.claim.candidate):
        try:
            arm = arm_of(suite, name, root)
            if list(choice_problems(arm, (), root)):
                continue  # said of the variant
        except UsageError:
            continue
        arms.append(arm)
    yield from step_problems(suite, arms, shape, root)


def _any(op: str) -> str:
    return next((found.name for found in catalog.implementations(op)), "FILE.py:NAME")


def _levels(suite: Suite, root: Path) -> Iterator[Found]:
    if suite.kernel is not None and not suite.kernel.points:
        yield ("kernel", "points"), "no shape to measure at", 'e.g. points = ["32*1@4096"], or name a file of shapes'
    workload = suite.workload
    if workload is None:
        return
    for name, file in workload.traces.items():
        if not (root / file).is_file():
            yield ("workload", "traces", name), f"no trace {root / file}", "paths are relative to the suite; or --trace"
    for name, file in workload.costs.items():
        if name not in suite.variants:
            yield ("workload", "costs", name), f"no variant {name!r}", f"one of {', '.join(suite.variants)}"
        if not (root / file).is_file():
            yield (
                ("workload", "costs", name),
                f"no cost grid {root / file}",
                "paths are relative to the suite; or --costs",
            )
    if workload.rate is not None and workload.requests_per_s is not None:
        yield ("workload", "rate"), "rate and requests_per_s exclude each other", "keep one"
    for relative, absolute in (("ttft", "ttft_ms"), ("tpot", "tpot_ms")):
        if getattr(workload.slo, relative) is not None and getattr(workload.slo, absolute) is not None:
            yield ("workload", "slo", relative), f"{relative} and {absolute} exclude each other", "keep one"
    if all(getattr(workload.slo, key) is None for key in ("ttft", "tpot", "ttft_ms", "tpot_ms")):
        yield ("workload", "slo"), "no limit at all: every request would be good", 'e.g. slo = { ttft = "5x" }'


def _regime(suite: Suite, regime: Regime, index: int) -> Iterator[Found]:
    path: KeyPath = ("regime", index)
    if any(other.id == regime.id for other in suite.regime[:index]):
        yield (*path, "id"), f"a second regime named {regime.id!r}", "rename one"
    if regime.when is not None and suite.claim.changes_shared_state:
        yield (*path, "when"), "a change of shared state cannot be switched per step", "use trace_class"
    for key in ("context", "batch"):
        bounds = getattr(regime.when, key, None)
        if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
            yield (*path, "when", key), f"no {key} lies in {list(bounds)}", "write [lowest, highest]"
    yield from regime_problems(suite, regime, index)
    for name in regime.trace_class:
        if suite.workload is None or name not in suite.workload.traces:
            known = ", ".join(suite.workload.traces) if suite.workload else "none"
            yield (*path, "trace_class"), f"no trace class {name!r}", f"one of {known} ([workload] traces)"
    for position, clause in enumerate(regime.require):
        yield from _clause(suite, regime, clause, (*path, "require", position))


def _clause(suite: Suite, regime: Regime, clause: Clause, path: KeyPath) -> Iterator[Found]:
    if clause.metric not in METRICS_OF_LEVEL[clause.level]:
        allowed = ", ".join(METRICS_OF_LEVEL[clause.level])
        yield (*path, "metric"), f"level {clause.level} has no metric {clause.metric}", f"one of {allowed}"
    wanted, other = ("min_saving", "margin") if clause.test == "superiority" else ("margin", "min_saving")
    if getattr(clause, wanted) is None:
        yield path, f"{clause.test} needs {wanted}", f"e.g. {wanted} = 0.02"
    if getattr(clause, other) is not None:
        yield (*path, other), f"{clause.test} takes {wanted}, not {other}", f"remove {other}"
    if clause.mode is not None and clause.level != "workload":
        yield (*path, "mode"), f"level {clause.level} has no mode", "remove it"
    if getattr(suite, clause.level) is None:
        yield (*path, "level"), f"the suite has no [{clause.level}]", "add it, or drop the clause"
    if clause.level == "workload" and not regime.trace_class:
        yield path, "a workload clause needs trace classes", "add trace_class to the regime"
    if clause.level != "workload" and not regime.points:
        yield path, f"a {clause.level} clause needs points", "add points to the regime"
    if clause.metric == "output_divergence" and clause.mode != "exec":
        yield (*path, "mode"), "outputs exist only where tokens are really computed", 'mode = "exec"'
