"""What the keys of `[rule]` must mean in this suite: codes that something can raise, a power that can be had.

Owns the checks of the rule itself. It reads the suite only; what a plan can see is `decide.power`.
"""

from __future__ import annotations

from collections.abc import Iterator

from kbench.catalog.tolerances import FLOORS_OF, ROUNDING
from kbench.suite.rule_schema import Clause
from kbench.suite.schema import Suite

ONCE_A_SESSION = ("conversion_time", "metadata_time")
KeyPath = tuple[str | int, ...]
Found = tuple[KeyPath, str, str]


def rule_problems(suite: Suite) -> Iterator[Found]:
    """Keys that could never have an effect, or contradict each other."""
    rule = suite.rule
    for place, code in enumerate(rule.void_codes):
        if code in rule.void_codes[:place]:
            yield ("rule", "void_codes", place), f"{code} is named twice", "name each code once"
        elif code == "throttle" and suite.kernel is None:
            yield (
                ("rule", "void_codes", place),
                "nothing can raise throttle: only kernel windows read the device's clock",
                "add [kernel], or leave the code out",
            )
    for path, clause in _weighted(suite):
        if clause.level == "workload":
            yield path, "a workload clause has no cells to weigh", "leave out across"
        elif clause.metric in ONCE_A_SESSION:
            yield path, f"{clause.metric} is taken once a session and cannot be weighed", 'across = "every-cell"'
    if rule.power is not None:
        savings = [clause.min_saving for regime in suite.regime for clause in regime.require if clause.min_saving]
        if any(rule.power.at_saving <= saving for saving in savings):
            yield (
                ("rule", "power", "at_saving"),
                f"a true saving of {rule.power.at_saving:g} is not above min_saving {max(savings):g}: "
                "no number of sessions can show that it is",
                "a larger at_saving, or a smaller min_saving",
            )

    yield from _loose_tolerances(suite)


def _loose_tolerances(suite: Suite) -> Iterator[Found]:
    """A tolerance may only forgive less than kbench does: what is right is no matter of the claim."""
    for dtype, given in suite.rule.tolerance.items():
        for check, floors in FLOORS_OF.items():
            value = getattr(given, check)
            if value is not None and value >= floors[dtype]:
                yield (
                    ("rule", "tolerance", dtype, check),
                    f"{value:g} is not stricter than the default {floors[dtype]:g} of {dtype}",
                    f"a value below {floors[dtype]:g}, or leave it out",
                )


def _weighted(suite: Suite) -> Iterator[tuple[KeyPath, Clause]]:
    for index, regime in enumerate(suite.regime):
        for place, clause in enumerate(regime.require):
            if clause.across == "weighted":
                yield ("regime", index, "require", place, "across"), clause


def rule_warnings(suite: Suite) -> Iterator[Found]:
    """What is allowed and probably not meant."""
    rule = suite.rule
    if "baseline_crash" not in rule.void_codes:
        yield (
            ("rule", "void_codes"),
            "a crash of the baseline is no void: one is enough for missing evidence",
            "add baseline_crash, or leave it like this on purpose",
        )
    for dtype, given in rule.tolerance.items():
        if dtype != suite.model.dtype and given.kernel is None:
            yield ("rule", "tolerance", dtype), f"the model is {suite.model.dtype}: no step is {dtype}", "leave it out"
        for check in FLOORS_OF:
            value = getattr(given, check)
            if value is not None and value < ROUNDING[dtype]:
                yield (
                    ("rule", "tolerance", dtype, check),
                    f"{value:g} is less than rounding to {dtype} costs ({ROUNDING[dtype]:g}): only exact answers pass",
                    "a larger value, or leave it like this on purpose",
                )
    for path, _ in _weighted(suite):
        if suite.workload is None:
            yield path, "no workload records shapes to weigh by", "add [workload]; as it is, it is missing-evidence"
    if rule.power is not None and all(clause.test != "superiority" for r in suite.regime for clause in r.require):
        yield ("rule", "power"), "no clause asks for a saving", "leave it out, or add a superiority clause"
