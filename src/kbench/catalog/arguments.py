"""What a function that computes an operation is given, by name and in order.

Owns the torch-free copy that people and `kbench list ops` read; each operation's class declares the same, and a test
holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_ATTENTION = "q kv batch spec"
_MOVED = "k_from v_from table_from lengths k_to v_to table_to page_size_from page_size_to layout_from layout_to"
_PENALTIES = "logits history prompt repetition presence frequency"
_NAMES = {
    "attention.decode": _ATTENTION,
    "attention.prefill": _ATTENTION,
    "attention.mla_decode": "q_latent q_rope cache block_table seq_lens scale",
    "attention.cascade_merge": "outputs lse",
    **dict.fromkeys(("gemm", "gemm.qkv", "gemm.o", "gemm.gate_up", "gemm.down", "gemm.lm_head"), "x weight"),
    "moe.router": "logits top_k",
    "moe.permute": "x ids experts",
    "moe.grouped_gemm": "x weight offsets",
    "moe.fused": "x logits gate_up down expert_map top_k",
    "norm.rmsnorm": "x weight eps",
    "norm.add_rmsnorm": "x residual weight eps",
    "rope": "q k positions cos sin interleaved",
    "activation.silu_mul": "x",
    "sampling.penalties": _PENALTIES,
    "sampling.mask": "logits bits",
    "sampling.top_k": "logits k",
    "sampling.top_p": "logits p",
    "sampling.draw": "logits temperature uniform",
    "sampling.chain": f"{_PENALTIES} bits temperature k p uniform",
    "kv.append": "k v k_to v_to slots page_size layout_to",
    "kv.copy_pages": "k_to v_to sources targets layout_to",
    "kv.convert_pages": _MOVED,
    "kv.convert_layout": _MOVED,
    "quant.per_token_fp8": "x",
}
ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType({op: tuple(names.split()) for op, names in _NAMES.items()})
