"""What a trial says when nobody may serve its case: unsupported, with every reason of everybody who was asked."""

from __future__ import annotations

from typing import Any

from kbench.protocol import Outcome, Status
from kbench.selection import SelectionRefused


def refused(error: SelectionRefused, **facts: Any) -> Outcome:
    selection = {"op": error.op, "requested": error.requested, "resolved": "", "observed": ""}
    told = {"usage": True, "refused": True, "reasons": error.reasons, "selection": selection}
    return Outcome(Status.UNSUPPORTED, str(error), facts={**told, **facts})
