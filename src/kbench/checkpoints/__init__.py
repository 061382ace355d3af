"""Hugging Face checkpoint folders, read without torch: what config.json says, which tensors there must be and are.

Owns what can be refused before anything is loaded: a model_type, key or value that the decoder does not understand, a
tensor that is missing, has another shape or dtype, a truncated file. `engine.checkpoint` turns the tensors into
weights. It never downloads.
"""

from kbench.checkpoints.config import FAMILIES, read_shape
from kbench.checkpoints.files import Stored, stored_tensors
from kbench.checkpoints.layout import Part, decoder_parts, layer_parts
from kbench.checkpoints.validation import check_checkpoint

__all__ = [
    "FAMILIES",
    "Part",
    "Stored",
    "check_checkpoint",
    "decoder_parts",
    "layer_parts",
    "read_shape",
    "stored_tensors",
]
