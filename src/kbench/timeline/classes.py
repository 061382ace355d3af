"""From names to classes of work.

Owns the ordered tables: the first pattern that matches a name decides. A caller's own patterns come before them. An
operator's phase, where the engine annotated one, is better evidence than a kernel's name and is asked first.
It knows names only, no times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from kbench.errors import UsageError

CLASSES = (
    "attention",
    "gemm",
    "moe",
    "norm_rope_activation",
    "sampling",
    "kv_write",
    "conversion",
    "metadata",
    "copy",
    "collective",
    "other",
)
"""What a step's time is spent on. `other` is what no table knows: it is shown, and never counted into the closure."""
GAPS = ("host_wait", "in_graph", "stream_dependency", "collective_wait", "unknown")
"""Why nothing ran. `unknown` is shown, and never counted into the closure."""

PHASE_CLASS: Mapping[str, str] = {
    "attention": "attention",
    "kv_write": "kv_write",
    "convert": "conversion",
    "sample": "sampling",
    "schedule": "metadata",
    "prepare": "metadata",
    "metadata": "metadata",
    "bookkeeping": "metadata",
    "h2d": "copy",
    "logits_copy": "copy",
}
"""Phases of the embedded engine that are one class; `forward` holds several and is read by operator."""
OPERATION_PHASES = frozenset({"attention", "kv_write", "convert", "sample"})
"""On a CPU the interpreter's time in these belongs to the operation: level 1 times them with it, too."""

HOST = "host"
"""Operators that only make a view or reserve memory: they compute nothing, so their time is the host's."""

_COLLECTIVE = r"nccl|rccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device|multimem|deep_?ep"
_KV_WRITE = (
    r"reshape_and_cache|store_(kv_?)?cache|concat_and_cache|append_paged_kv|set_kv_buffer|write_kv|kv_write|"
    r"kv_cache_update"
)
_METADATA = r"prepare_varlen|scheduler_metadata|slot_mapping|get_mla_metadata|kv_indices|_metadata|prepare_(pos|inputs)"
_CONVERSION = r"relayout|repack|layout_?convert|convert_(layout|kv|cache)|cp_gather|gather_(cache|kv|pages)|transpose"
_ATTENTION = (
    r"flash(?!infer)|fmha|mha_|_mha|paged|(batch|single)_?(decode|prefill)|unified_attention|attention|attn|sdpa|\bmla|_mla|"
    r"split_?kv|merge_(attn_)?states?|_fwd_(grouped_)?kernel_stage|softmax_warp"
)
_MOE = r"moe|expert|grouped_?(gemm|mm|topk)|topk_?(softmax|gating|sigmoid)|(un)?permute_(rows|tokens|copy)|align_block"
_GEMM = (
    r"gemm|gemv|gemmk1|cutlass|cublas|wgmma|nvjet|marlin|machete|split_?k|matmul|xmma|\bmm\b|_mm_|deep_?gemm|"
    r"mkldnn|onednn|\bmkl"
)
_SAMPLING = r"argmax|sampl|multinomial|exponential|gumbel|penalt|cunn_softmax|topk|top_[kp]|radix_?sort|bitonic"

_KERNELS = (
    ("collective", _COLLECTIVE),
    ("kv_write", _KV_WRITE),
    ("metadata", _METADATA),
    ("moe", _MOE),
    ("attention", _ATTENTION),
    ("sampling", _SAMPLING),
    ("gemm", _GEMM),
    ("norm_rope_activation", r"rms_?norm|layer_?norm|_norm|rope|rotary|silu|gelu|swiglu|act_and_mul|quant"),
    ("conversion", _CONVERSION),
)
"""Kernel names that say what they do by themselves."""
_GENERIC_KERNELS = (
    ("copy", r"copy|memcpy|memset|catarray|index|gather|scatter|embedding|fill|arange"),
    ("norm_rope_activation", r"elementwise|pointwise|reduce|softmax|triton_(poi|red|per)_|norm"),
)
"""Kernel names that any operator may launch: the operator that launched them is asked before these."""
_OPS = (
    ("collective", _COLLECTIVE),
    ("kv_write", _KV_WRITE),
    ("moe", _MOE),
    ("attention", r"attention|attn|flash|\bmla|_?softmax$"),
    ("sampling", r"argmax|sampl|multinomial|exponential|topk|::sort$|penalt"),
    ("gemm", r"::_?(\w*_)?(mm|addmm|bmm|baddbmm|addmv|mv|dot|linear|matmul|einsum)$|gemm|mkldnn_linear|onednn"),
    (
        "norm_rope_activation",
        r"norm|rotary|rope|silu|gelu|relu|sigmoid|tanh|swiglu|act_and_mul|"
        r"::(add|sub|mul|div|pow|rsqrt|sqrt|mean|sum|neg|cos|sin|exp|log|square|reciprocal|where|maximum|minimum|amax|"
        r"max|clamp|lerp|addcmul)_?$",
    ),
    (
        "copy",
        r"copy_?$|::(to|contiguous|clone|cat|stack|embedding|gather|scatter|zeros|ones|full|arange|item|repeat|roll|"
        r"index\w*|_index\w*|masked_\w+|fill_|zero_|scalar_tensor|tensor|_local_scalar_dense|repeat_interleave|tril|"
        r"cumsum|le|lt|ge|gt|eq|ne|bitwise_\w+|logical_\w+|floor_divide|remainder|nonzero|pad|constant_pad_nd)$",
    ),
    (
        HOST,
        r"::(_?(unsafe_)?view|_reshape_alias|reshape|as_strided|transpose|t|unsqueeze|squeeze|expand|select|slice|"
        r"split|split_with_sizes|chunk|narrow|permute|empty|empty_like|empty_strided|new_empty|resize_|detach|detach_|"
        r"alias|resolve_conj|resolve_neg|unbind|flatten|unflatten|unfold|lift_fresh|set_|movedim|swapaxes|numpy_t|"
        r"expand_as|view_as|new_zeros|new_full|zeros_like|ones_like|result_type|is_nonzero|pin_memory|record_stream|"
        r"broadcast_tensors|_to_cpu|size|stride)$",
    ),
)


@dataclass(frozen=True, slots=True)
class Classifier:
    """Names → class, with a caller's own `(class, pattern)` pairs first."""

    own: tuple[tuple[str, re.Pattern[str]], ...] = ()

    @classmethod
    def of(cls, patterns: Mapping[str, str] | Iterable[tuple[str, str]] | None) -> Classifier:
        """`patterns` maps a class (known or new) to a regular expression; UsageError for one that does not compile."""
        pairs = () if patterns is None else patterns.items() if isinstance(patterns, Mapping) else patterns
        own = []
        for name, pattern in pairs:
            try:
                own.append((name, re.compile(pattern, re.IGNORECASE)))
            except re.error as error:
                raise UsageError(
                    f"class {name!r}: {pattern!r} is no regular expression: {error}", remedy="mend or drop the pattern"
                ) from error
        return cls(tuple(own))

    def names(self) -> tuple[str, ...]:
        extra = tuple(dict.fromkeys(name for name, _ in self.own if name not in CLASSES))
        return (*CLASSES[:-1], *extra, CLASSES[-1])

    def op(self, name: str) -> str | None:
        """The class of an operator, HOST for one that computes nothing, None for one that no table knows."""
        return self._own(name) or _first("op", name)

    def kernel(self, name: str, phase: str, op_class: str | None) -> str:
        """The class of a kernel launched in `phase` by an operator of class `op_class`."""
        if found := self._own(name):
            return found
        if phase in PHASE_CLASS:
            return PHASE_CLASS[phase]
        if found := _first("kernel", name):
            return found
        if op_class is not None and op_class != HOST:
            return op_class
        return _first("generic", name) or "other"

    def _own(self, name: str) -> str | None:
        return next((found for found, pattern in self.own if pattern.search(name)), None)


_TABLES = {
    kind: tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in table)
    for kind, table in (("kernel", _KERNELS), ("generic", _GENERIC_KERNELS), ("op", _OPS))
}


@lru_cache(maxsize=8192)
def _first(kind: str, name: str) -> str | None:
    return next((found for found, pattern in _TABLES[kind] if pattern.search(name)), None)
