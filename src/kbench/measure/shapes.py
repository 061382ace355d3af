"""Which batches the steps of a replay had: the histogram is `traces.shapes`, which reading a recording shares."""

from kbench.traces.shapes import histogram

__all__ = ["histogram"]
