"""What was measured, as it is kept: samples, trials, sessions, and the folder of one run.

Owns the tidy record that all levels write, and its two forms on disk: an append-only journal while a run measures,
Parquet and one JSON header when it is closed. It knows nothing of rules; reading it imports neither torch nor pandas.
"""

from kbench.record.folder import Journal, RunFolder, RunRecord, SessionMark, Trial, list_runs, read_run
from kbench.record.sample import Sample, SampleTable

__all__ = [
    "Journal",
    "RunFolder",
    "RunRecord",
    "Sample",
    "SampleTable",
    "SessionMark",
    "Trial",
    "list_runs",
    "read_run",
]
