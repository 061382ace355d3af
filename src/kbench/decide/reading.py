"""What few sessions say, read with the scatter that a noise card holds: the plug-in statistics. Pure.

    se² = (s² - w² + max(w², w_now²)) / k        t with n - 1 degrees of freedom

over k sessions, where the card's n sessions scatter by s², of which each explains w² by its own blocks, and today's
sessions explain w_now². What scatters between sessions (process offsets) is the card's; what scatters within them may
only widen the interval. Which cells there are, and what is concluded, is `decide.quick`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kbench.noise import Scatter
from kbench.stats import Interval, signed_rank_interval, t_cdf, t_quantile

SCATTER_ALPHA = 0.01
_ONE_SIGMA = 0.6827


@dataclass(frozen=True, slots=True)
class Reading:
    """What the sessions say about one metric of one cell: an estimate with its standard error, as Student has it."""

    centre: float
    error: float
    """Infinite where the sessions cannot tell."""
    df: float
    sessions: int
    noise: str = ""
    """Why the scatter is more than the card explains; empty where it is not."""

    @property
    def p(self) -> float:
        """Two-sided p value of no difference."""
        if math.isinf(self.error) or self.centre == 0.0:
            return 1.0
        return 2.0 * t_cdf(-abs(self.centre) / self.error, self.df) if self.error > 0.0 else 0.0

    def interval(self, alpha: float) -> Interval:
        half = math.inf if math.isinf(self.error) else t_quantile(1.0 - alpha / 2.0, self.df) * self.error
        return Interval(self.centre, self.centre - half, self.centre + half, self.sessions)


def estimate_variance(ratios: Sequence[float]) -> float:
    """The variance of the Hodges–Lehmann centre of independent blocks, as robust as the centre itself.

    Half the length of the signed-rank interval at one standard deviation, squared (Lehmann, Nonparametrics, 1975, §4.3:
    the interval's length estimates the centre's standard error). The variance over n would be that of the mean, which
    a single interrupted block multiplies. Two blocks have no such interval: there it is the variance over n.
    """
    found = signed_rank_interval(ratios, _ONE_SIGMA)
    if found.bounded:
        return (0.5 * (found.high - found.low)) ** 2
    return float(np.var(np.asarray(ratios), ddof=1)) / len(ratios) if len(ratios) > 1 else 0.0


def plug_in(estimates: Sequence[float], within: Sequence[float], card: Scatter) -> Reading:
    """Few sessions (one is enough) read with a card. Source and assumptions: the module, `stats.plug_in_interval`."""
    k, n = len(estimates), len(card.estimates)
    now = sum(within) / k if within else 0.0
    variance = (card.sd**2 - card.within_variance + max(card.within_variance, now)) / k
    return Reading(
        centre=sum(estimates) / k,
        error=math.sqrt(variance),
        df=n - 1,
        sessions=k,
        noise=_unexplained(now, k, card) if within else "",
    )


def alone(estimates: Sequence[float]) -> Reading:
    """Sessions that speak for themselves: t over two or more."""
    k = len(estimates)
    error = float(np.std(np.asarray(estimates), ddof=1)) / math.sqrt(k) if k > 1 else math.inf
    return Reading(centre=sum(estimates) / k, error=error, df=max(k - 1, 1), sessions=k)


def _unexplained(now: float, k: int, card: Scatter) -> str:
    """Whether today's blocks scatter more than the card's: F over both, in words.

    The degrees of freedom of a session's variance are those that the card's own variances scatter like (Satterthwaite,
    Biometrics Bulletin 2 (1946) 110–114): hosts are not equally quiet in every session.
    """
    from scipy.special import fdtrc

    if not card.within or now <= card.within_variance:
        return ""
    ratio = now / card.within_variance if card.within_variance > 0.0 else math.inf
    spread = float(np.var(np.asarray(card.within), ddof=1))
    each = 2.0 * card.within_variance**2 / spread if spread > 0.0 else 1e6
    p = 0.0 if math.isinf(ratio) else float(fdtrc(k * each, len(card.within) * each, ratio))
    if p >= SCATTER_ALPHA:
        return ""
    factor = f"{math.sqrt(ratio):.2g} times" if math.isfinite(ratio) else "unlike"
    return f"the windows scatter {factor} what the noise card explains (F test, p {p:.2g}): the host is noisier now"
