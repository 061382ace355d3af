"""Every statistical formula that a verdict rests on, each with its source and its assumptions in its docstring.

    sample        what a list of values must be, and what an interval is
    location      Hodges–Lehmann, exact signed-rank interval, autocorrelation
    student       t over sessions: intervals, one-sided bounds, power, smallest detectable effect
    resampling    studentised bootstrap of a mean
    skewed        critical values and family error of few skewed values
    proportion    Clopper–Pearson and Wilson
    multiplicity  Holm across hypotheses, O'Brien–Fleming-type spending across looks
    saving        log ratio, share of time, rate, Amdahl

It knows numbers only: no suite, sample record, clause or verdict. Input that is empty, NaN or infinite is a
`ValueError` that names the argument. scipy is imported inside the functions that need it.
"""

from kbench.stats.location import (
    autocorrelation,
    effective_sample_factor,
    hodges_lehmann,
    hodges_lehmann_rows,
    signed_rank_interval,
)
from kbench.stats.multiplicity import Holm, Look, holm, obf_spending
from kbench.stats.proportion import clopper_pearson, wilson
from kbench.stats.resampling import studentised_bootstrap
from kbench.stats.sample import Interval, Side
from kbench.stats.saving import (
    AmdahlSaving,
    FasterReadings,
    amdahl_saving_us,
    faster_readings,
    log_ratio,
    rate_from_saving,
    saving,
    saving_from_rate,
    saving_interval,
)
from kbench.stats.skewed import family_error, skewed_bounds, skewed_critical
from kbench.stats.student import (
    detection_power,
    lower_bound,
    minimum_detectable_effect,
    plug_in_interval,
    session_interval,
    sessions_needed,
    t_cdf,
    t_quantile,
    upper_bound,
)

__all__ = [
    "AmdahlSaving",
    "FasterReadings",
    "Holm",
    "Interval",
    "Look",
    "Side",
    "amdahl_saving_us",
    "autocorrelation",
    "clopper_pearson",
    "detection_power",
    "effective_sample_factor",
    "family_error",
    "faster_readings",
    "hodges_lehmann",
    "hodges_lehmann_rows",
    "holm",
    "log_ratio",
    "lower_bound",
    "minimum_detectable_effect",
    "obf_spending",
    "plug_in_interval",
    "rate_from_saving",
    "saving",
    "saving_from_rate",
    "saving_interval",
    "session_interval",
    "sessions_needed",
    "signed_rank_interval",
    "skewed_bounds",
    "skewed_critical",
    "studentised_bootstrap",
    "t_cdf",
    "t_quantile",
    "upper_bound",
    "wilson",
]
