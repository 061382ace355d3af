"""Before a run is announced: can everything that its arms name be had here, under their policies?

Owns the one question that is the user's to mend: a backend that is gone, a plug-in with a missing import or a wrong
signature is no evidence about a candidate, and must not cost a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kbench.env.gpu import capability
from kbench.errors import UsageError
from kbench.plan import Plan
from kbench.run.session import Host, open_pair
from kbench.run.workers import WorkerLost
from kbench.suite.checks import model_of
from kbench.suite.choices import brings_code
from kbench.suite.demands import demands, served
from kbench.suite.schema import Arm


def check_backends(plan: Plan, host: Host, levels: Sequence[str], only: str = "") -> None:
    """Raise UsageError, with every reason, for an arm that cannot be served; a plug-in that crashes or hangs is left
    to the measurement. `only`: cases whose id has this text."""
    cases = [case for case in plan.cases if only in str(case)]
    model = model_of(plan.loaded.suite.model, plan.loaded.root)
    loading = [arm for arm in plan.both if brings_code(arm)]
    for arm in plan.both:
        if arm not in loading:
            for demand in demands(arm, model, cases, levels, host.device, capability(host.device)):
                try:
                    served(arm, demand)
                except UsageError as error:
                    raise _named(arm, str(error)) from error
    if not loading:
        return
    timeout_s = plan.loaded.suite.measure.trial_timeout_s
    asked = {"name": "backends", "cases": [str(case) for case in cases], "levels": list(levels)}
    with TemporaryDirectory() as logs, suppress(WorkerLost), open_pair(plan, host, Path(logs), "backends") as pair:
        for arm in loading:
            outcome = pair.ask(arm.name, "job", asked, timeout_s)
            if outcome.facts.get("usage"):
                raise _named(arm, outcome.message)


def _named(arm: Arm, message: str) -> UsageError:
    return UsageError(f"variant {arm.name}: {message}")
