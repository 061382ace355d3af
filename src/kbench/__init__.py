"""kbench: decide whether a GPU kernel goes into production."""

__version__ = "0.1.0"
