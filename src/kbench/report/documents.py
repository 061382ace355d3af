"""What every JSON document needs: numbers that JSON has, trials in the order in which they were taken.

Owns nothing of any level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kbench.record import RunRecord, Trial

Document = dict[str, Any]


def finite(value: Any) -> Any:
    """`value` with every float that JSON does not have replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def trials_of(runs: Sequence[RunRecord], prefix: str) -> list[Trial]:
    """Trials whose case begins with `prefix`, in the order of the runs' names, then as recorded."""
    ordered = sorted(runs, key=lambda run: run.run_id)
    return [trial for run in ordered for trial in run.trials if trial.case.startswith(prefix)]
