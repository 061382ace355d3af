"""The claim: one TOML file, read, checked and resolved. Knows nothing of how it is measured."""

from kbench.suite.load import LoadedSuite, load_suite
from kbench.suite.schema import Arm, Suite

__all__ = ["Arm", "LoadedSuite", "Suite", "load_suite"]
