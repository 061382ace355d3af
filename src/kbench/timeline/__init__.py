"""Level 0: where does the time of an engine step go? Reads Chrome traces; measures nothing, needs no torch.

events    the file: read, checked, split into host calls, device events and spans
classes   names → classes of work, by ordered, extendable tables
host      one thread's nested spans, flattened into exclusive segments
steps     where one engine step begins and ends
device    device time in a step: exclusive by class, gaps by cause
limits    compute, memory, host or collective
analysis  a trace → one account a step        account   accounts → shares, closure, the largest saving

`analyse` is the door. It knows neither suites nor verdicts.
"""

from kbench.timeline.analysis import analyse
from kbench.timeline.classes import CLASSES, GAPS

__all__ = ["CLASSES", "GAPS", "analyse"]
