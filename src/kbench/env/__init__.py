"""The machine that a measurement ran on: what is there, what would disturb it, which class of host it is.

    host     system, processor, memory, load, Python and package versions, the checkout
    gpu      NVIDIA devices, by NVML
    advice   `warnings` and `host_key`, from a snapshot alone

Reads only; changes nothing. It imports no torch, runs on a machine without a GPU, and takes a missing file for an
unknown fact: `None` in the snapshot, never a guess.
"""

from kbench.env.advice import host_key, warnings
from kbench.env.gpu import gpus
from kbench.env.host import SCHEMA, snapshot

__all__ = ["SCHEMA", "gpus", "host_key", "snapshot", "warnings"]
