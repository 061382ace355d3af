"""How much error each regime may spend, and at which look.

Owns alpha per regime and the looks. It knows no samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from kbench.errors import UsageError
from kbench.stats import family_error, obf_spending
from kbench.suite.rule_schema import Rule

FAIL_ALPHA = 0.025
"""One-sided error of a bound that says `fail` rather than `inconclusive`."""
WORKLOAD_ALPHA = 0.025
"""Largest one-sided error of a workload bound."""
EQUIVALENCE_ALPHA = 0.05
"""Largest one-sided error of either side of an output equivalence."""


@dataclass(frozen=True, slots=True)
class Looked:
    """The look that counts: the first `sessions` sessions, judged at `alpha`."""

    sessions: int
    alpha: float
    number: int
    of: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The error of one regime, spent over looks with O'Brien–Fleming-type spending."""

    regime_alpha: float
    looks: tuple[int, ...]
    nominal: tuple[float, ...]
    regimes: int
    """Regimes that share the error: one each, or under Holm those that are not enabled yet."""
    family_alpha: float

    @classmethod
    def of(cls, rule: Rule, regimes: int, aborted: int) -> Budget:
        """alpha / R / (1 + aborted).

        Bonferroni over the `regimes`; where there is a single look, `decision.decide` steps down from there as Holm
        does. (Spending and stepping down do not combine: a regime that is enabled at a later look cannot hand its error
        to an earlier one.) A run that was started and never ended may have been ended by somebody who saw
        where it was going: with k of them there were up to k + 1 chances to stop at a favourable moment, and the union
        bound shares the error among them.
        """
        looks = tuple(rule.looks)
        if looks[0] < 2 or any(later <= earlier for earlier, later in pairwise(looks)):
            raise UsageError(
                f"rule.looks is {list(looks)}", remedy="increasing numbers of sessions, the first at least 2"
            )
        family = rule.alpha / (1 + aborted)
        alpha = family / max(regimes, 1)
        return cls(alpha, looks, _nominal(alpha, looks), max(regimes, 1), family)

    def spent(self, sessions: int) -> float:
        """Error of one regime that the looks so far have spent."""
        reached = sum(1 for look in self.looks if look <= sessions)
        return obf_spending(self.regime_alpha, self.looks)[reached - 1].spent if reached else 0.0

    def at(self, sessions: int) -> Looked | None:
        """The latest look that `sessions` reach, or None before the first."""
        reached = sum(1 for look in self.looks if look <= sessions)
        if reached == 0:
            return None
        return Looked(self.looks[reached - 1], self.nominal[reached - 1], reached, len(self.looks))

    @property
    def steps_down(self) -> bool:
        """Whether an enabled regime hands its error on to the others (Holm)."""
        return len(self.looks) == 1

    def workload_family_error(self, segments: int) -> float:
        """The chance that any regime at its margin passes with so many segments, as simulated."""
        return family_error(self.regimes, segments, self.family_alpha, largest=WORKLOAD_ALPHA)

    @property
    def workload_alpha(self) -> float:
        return min(WORKLOAD_ALPHA, self.regime_alpha)

    @property
    def equivalence_alpha(self) -> float:
        return min(EQUIVALENCE_ALPHA, self.regime_alpha)


@lru_cache(maxsize=256)
def _nominal(alpha: float, looks: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(look.nominal_alpha for look in obf_spending(alpha, looks))
