"""The implementations that ship, by what they compute."""

from kbench.catalog.built_in import attention, dense, kv, rows, sampling

BUILT_IN = (*attention.ENTRIES, *dense.ENTRIES, *rows.ENTRIES, *sampling.ENTRIES, *kv.ENTRIES)

__all__ = ["BUILT_IN"]
