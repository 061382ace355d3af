"""The account of a step, and the document that level 0 prints.

Owns `Account`: every microsecond of a step's wall time is a class of work or a gap with a cause, found by looking and
not by subtraction; `other` and `unknown` are shown beside it and never counted into `closure`. It knows no trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kbench.timeline.classes import GAPS
from kbench.timeline.limits import Limits, limits_of
from kbench.timeline.steps import Segmentation

SCHEMA = "kbench.timeline/1"
CLOSURE_TOLERANCE = 0.02
NAMED_LEAST = 0.95
_TOP_NAMES = 12


@dataclass(frozen=True, slots=True)
class Saving:
    """The share of `work_class`'s time that a change is expected to save; None: nothing was claimed."""

    expected: float | None
    work_class: str


@dataclass(slots=True)
class Account:
    """Where the time of one step, or of several added up, went (µs)."""

    wall_us: float = 0.0
    steps: int = 0
    classes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gaps: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    names: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: Account) -> None:
        self.wall_us += other.wall_us
        self.steps += other.steps
        for name in ("classes", "gaps", "phases", "names"):
            mine = getattr(self, name)
            for key, value in getattr(other, name).items():
                mine[key] += value

    @property
    def busy_us(self) -> float:
        return sum(self.classes.values())

    @property
    def closure(self) -> float:
        """What is known by name, over the wall time."""
        known = self.busy_us - self.classes.get("other", 0.0) + sum(self.gaps.values()) - self.gaps.get("unknown", 0.0)
        return known / self.wall_us

    @property
    def named_share(self) -> float:
        """The share of the work's time, gaps left out, whose class is known."""
        return 1.0 - self.classes.get("other", 0.0) / self.busy_us if self.busy_us else 1.0


def document(
    *, source: str, kind: str, steps: Segmentation, accounts: list[Account], names: Sequence[str], saving: Saving
) -> dict[str, Any]:
    """All steps together, each point, and each step (`per_step`); times are µs a step, `centre` says of which."""
    left_out = 1 if not steps.repeats and _first_only_waited(accounts) else 0
    by_label: dict[str, list[Account]] = {}
    for window, account in list(zip(steps.windows, accounts, strict=True))[left_out:]:
        by_label.setdefault(window.label, []).append(account)
    joined = {label: _joined(group, steps.repeats) for label, group in by_label.items()}
    total = Account()
    for account in joined.values():
        total.add(account)
    labels = [window.label for window in steps.windows]
    limits = limits_of(kind, list(joined.items()))
    points = []
    for label, account in joined.items():
        own = limits_of(kind, [(label, account)])
        points.append({"point": label, **_account(account, names, own, saving)})
    return {
        "schema": SCHEMA,
        "source": Path(source).name,
        "device": kind,
        "segmentation": steps.how,
        "centre": "the median step of each point" if steps.repeats else "the mean of the steps",
        **_account(total, names, limits, saving),
        "expected_saving": saving.expected,
        "saved_class": saving.work_class,
        "points": points,
        "per_step": [
            {"point": label, "wall_us": _r(account.wall_us), "busy_us": _r(account.busy_us), "closure": account.closure}
            for label, account in zip(labels, accounts, strict=True)
        ],
        "top": _top(total),
        "warnings": _warnings(steps, accounts, total, left_out),
    }


def _first_only_waited(accounts: Sequence[Account]) -> bool:
    """Whether the first step is an artefact: 5 times as long as the others' median, with no more work in it.

    Recording the first launches of a process takes a profiler milliseconds. A long step that works (a prefill among
    decodes) is none, and neither is any later step.
    """
    first, others = accounts[0], accounts[1:]
    if len(others) < 2:
        return False
    middle = len(others) // 2
    wall_us = sorted(account.wall_us for account in others)[middle]
    busy_us = sorted(account.busy_us for account in others)[middle]
    return first.wall_us > 5 * wall_us and first.busy_us < 2 * busy_us


def _joined(group: Sequence[Account], repeats: bool) -> Account:
    """Repeats of one point: the median step stands for each, so that one which lost the processor moves nothing."""
    found = Account()
    middle = sorted(group, key=lambda account: account.wall_us)[(len(group) - 1) // 2]
    for account in group:
        found.add(middle if repeats else account)
    return found


def _account(account: Account, names: Sequence[str], limits: Limits, saving: Saving) -> dict[str, Any]:
    n, step_us = account.steps, account.wall_us / account.steps
    share = account.classes.get(saving.work_class, 0.0) / account.wall_us
    saving_us = None if saving.expected is None else _r(share * saving.expected * step_us)
    # "x faster" said of a rate saves the share 1 - 1/(1 + x) of the time.
    as_rate_us = None if saving.expected is None else _r(share * (1 - 1 / (1 + saving.expected)) * step_us)
    return {
        "steps": n,
        "step_us": _r(step_us),
        "busy_us": _r(account.busy_us / n),
        "classes": {
            name: {
                "us": _r(account.classes.get(name, 0.0) / n),
                "share": account.classes.get(name, 0.0) / account.wall_us,
            }
            for name in names
        },
        "gaps": {cause: _r(account.gaps.get(cause, 0.0) / n) for cause in GAPS},
        "phases": {name: _r(value / n) for name, value in account.phases.items()},
        "closure": account.closure,
        "named_share": account.named_share,
        "limit": limits.name,
        "limits": {name: _r(value / n) for name, value in limits.us.items()},
        "limit_basis": limits.basis,
        "largest_saving_us": saving_us,
        "largest_saving_as_rate_us": as_rate_us,
    }


def _r(value: float) -> float:
    """A nanosecond is finer than any trace's clock."""
    return round(value, 4)


def _top(total: Account) -> list[dict[str, Any]]:
    ranked = sorted(total.names.items(), key=lambda item: -item[1])[:_TOP_NAMES]
    return [
        {"name": name, "class": found, "us": _r(us / total.steps), "share": us / total.wall_us}
        for (name, found), us in ranked
    ]


def _warnings(steps: Segmentation, accounts: list[Account], total: Account, left_out: int) -> list[str]:
    found = []
    if left_out:
        found.append("the first step waited while the profiler started: it is in no share, only in per_step")
    if steps.idle:
        found.append(f"{steps.idle} long waits between steps are in no step: the engine had nothing to do")
    if total.named_share < NAMED_LEAST:
        found.append(
            f"{total.named_share:.1%} of the work's time has a class, less than {NAMED_LEAST:.0%}: "
            "add patterns for the names under top (--classes)"
        )
    if abs(total.closure - 1.0) > CLOSURE_TOLERANCE:
        found.append(
            f"{total.closure:.1%} of the step is known by name, outside 98 to 102 %: "
            f"other {total.classes.get('other', 0.0) / total.wall_us:.1%}, "
            f"unknown gaps {total.gaps.get('unknown', 0.0) / total.wall_us:.1%}; add patterns for the names under top"
        )
    if steps.how.startswith("a guess"):
        found.append("no step span in the trace: where a step begins is a guess")
    by_label: dict[str, list[float]] = defaultdict(list)
    for window, account in list(zip(steps.windows, accounts, strict=True))[left_out:]:
        by_label[window.label].append(account.wall_us)
    for label, walls in by_label.items():
        middle = sorted(walls)[len(walls) // 2]
        if max(walls) > 2 * middle:
            name = f" of {label}" if label else ""
            found.append(f"the longest step{name} took {max(walls) / middle:.1f} times the median: warm up first")
    return found
