"""Which implementation serves which query, every reason why not, and the record of what was chosen.

query    what a layer asks for, and every objection of a catalogue entry
record   what was asked for, resolved, observed; who was rejected why; what changed afterwards
policy   from a choice to a record: reject, fallback, auto
"""

from kbench.selection.policy import POLICIES, Choice, Look, Policy, SelectionRefused, listed, resolve
from kbench.selection.query import Query, Reason, absent, check, check_all
from kbench.selection.record import Candidate, Mutation, SelectionRecord, selections_of

__all__ = [
    "POLICIES",
    "Candidate",
    "Choice",
    "Look",
    "Mutation",
    "Policy",
    "Query",
    "Reason",
    "SelectionRecord",
    "SelectionRefused",
    "absent",
    "check",
    "check_all",
    "listed",
    "resolve",
    "selections_of",
]
