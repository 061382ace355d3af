"""Level 0: where does the time of an engine step go? Reads Chrome traces; measures nothing, needs no torch.

events    the file: read, checked, split into host calls, device events and spans
classes   names → classes of work, by ordered, extendable tables
host      one thread's nested spans, flattened into exclusive segments
steps     where one engine step begins and ends
device    device time in a step: exclusive by class, gaps by cause
limits    compute, memory, host or collective
analysis  a trace → one account a step        account   accounts → shares, closure, the largest saving
patterns  a caller's own classes, from a file
export    the trace with kbench's steps, phases, classes and gaps in it

`analyse` is the door; `study`, `describe` and `export` where the trace is written out, too. It knows neither suites nor
verdicts.
"""

from kbench.timeline.analysis import analyse, describe, study
from kbench.timeline.classes import CLASSES, GAPS
from kbench.timeline.export import export
from kbench.timeline.patterns import read_patterns

__all__ = ["CLASSES", "GAPS", "analyse", "describe", "export", "read_patterns", "study"]
