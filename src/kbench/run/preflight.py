"""Before a run is announced: do the plug-ins of its arms load and keep the contract?

Owns the one question that only torch can answer and that is the user's to mend: a plug-in with a missing import or a
wrong signature is no evidence about a candidate, and must not cost a run.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from kbench.errors import UsageError
from kbench.plan import Plan
from kbench.run.session import Host, open_pair
from kbench.run.workers import WorkerLost
from kbench.suite.plugins import is_plugin


def check_plugins(plan: Plan, host: Host) -> None:
    """Raise UsageError for a plug-in that does not load. One that crashes or hangs is left to the measurement."""
    arms = [arm for arm in plan.both if is_plugin(arm.prefill) or is_plugin(arm.decode)]
    if not arms:
        return
    timeout_s = plan.loaded.suite.measure.trial_timeout_s
    with TemporaryDirectory() as logs, suppress(WorkerLost), open_pair(plan, host, Path(logs), "plugins") as pair:
        for arm in arms:
            outcome = pair.ask(arm.name, "job", {"name": "plugins"}, timeout_s)
            if outcome.facts.get("usage"):
                raise UsageError(f"variant {arm.name}: {outcome.message}")
