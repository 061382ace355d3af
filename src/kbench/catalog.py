"""Torch-free facts: the case grammar, model presets, operations, and who computes them.

Owns the nouns that every level joins on: `Point` (a batch, in vLLM's grammar), `Case` (a point with level, operation
and attributes) and the lists behind `kbench list`. It knows names and capabilities, runs nothing, imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kbench.errors import UsageError

# --------------------------------------------------------------------------------------------- points

_GROUP = re.compile(r"(?:(?P<count>[0-9]{1,9})\*)?(?P<query>[0-9]{1,9})(?:@(?P<kv>[0-9]{1,9}))?")
MAX_SEQUENCES = 65_536
MAX_CONTEXT = 16_777_216


@dataclass(frozen=True, slots=True)
class Group:
    """`count` sequences that each run `query_tokens` and hold `kv_tokens` after the step."""

    count: int
    query_tokens: int
    kv_tokens: int

    def __str__(self) -> str:
        kv = "" if self.kv_tokens == self.query_tokens else f"@{self.kv_tokens}"
        return f"{self.count}*{self.query_tokens}{kv}"


@dataclass(frozen=True, slots=True)
class Point:
    """A batch: `32*1@4096` is 32 sequences of one query token and KV length 4,096 after the step; `+` joins groups."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return "+".join(str(group) for group in self.groups)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """`(query_tokens, kv_tokens)` of every sequence, in order."""
        return [(group.query_tokens, group.kv_tokens) for group in self.groups for _ in range(group.count)]

    @property
    def batch(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def context(self) -> int:
        """The longest KV length in the batch, after the step."""
        return max(group.kv_tokens for group in self.groups)

    @property
    def query_tokens(self) -> int:
        return sum(group.count * group.query_tokens for group in self.groups)

    @property
    def kv_tokens(self) -> int:
        return sum(group.count * group.kv_tokens for group in self.groups)

    @property
    def is_decode(self) -> bool:
        return all(group.query_tokens == 1 for group in self.groups)


def parse_point(text: str) -> Point:
    """Read `[N*]Q[@K]` groups joined by `+`. Raises UsageError with the offending group and the grammar."""
    groups = []
    for part in text.replace(" ", "").split("+"):
        match = _GROUP.fullmatch(part)
        if match is None:
            raise UsageError(
                f"point {text!r}: cannot read {part!r}",
                remedy="write [N*]Q[@K], joined by +, e.g. 32*1@4096 or 2*512+30*1@1024",
            )
        query = int(match["query"])
        group = Group(int(match["count"] or 1), query, int(match["kv"] or query))
        if not 1 <= group.count <= MAX_SEQUENCES or not 1 <= query <= group.kv_tokens <= MAX_CONTEXT:
            raise UsageError(
                f"point {text!r}: {part!r} is not a batch",
                remedy=f"1 to {MAX_SEQUENCES} sequences, 1 <= query <= KV length <= {MAX_CONTEXT}",
            )
        groups.append(group)
    return Point(tuple(groups))


# ---------------------------------------------------------------------------------------------- cases

LEVELS = ("timeline", "kernel", "step", "workload")


@dataclass(frozen=True, slots=True)
class Case:
    """What one measurement is of; `str(case)` is its id, the join key of all records.

    `level/op/model/point` with `;name=value` attributes, e.g. `kernel/attention.decode/tiny/32*1@4096`.
    Attributes that belong to a variant (page size, layout) are not part of the id: both arms share the case.
    """

    level: str
    op: str
    model: str
    point: str
    attributes: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        head = "/".join((self.level, self.op, self.model, self.point))
        return head + "".join(f";{name}={value}" for name, value in self.attributes)

    @property
    def parsed(self) -> Point:
        return parse_point(self.point)

    @classmethod
    def parse(cls, text: str) -> Case:
        head, *attributes = text.split(";")
        parts = head.split("/")
        if len(parts) != 4 or parts[0] not in LEVELS or not all("=" in item for item in attributes):
            raise UsageError(f"{text!r} is not a case", remedy="level/op/model/point[;name=value], see kbench plan")
        pairs = tuple((name, value) for name, _, value in (item.partition("=") for item in attributes))
        return cls(parts[0], parts[1], parts[2], parts[3], pairs)


# --------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of a decoder-only transformer (hidden sizes in elements, no weights)."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    norm_topk_prob: bool = True
    max_context: int = 131_072
    source: str = ""

    def with_layers(self, layers: int | None) -> ModelShape:
        return self if layers is None else replace(self, layers=layers)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """K and V of all layers for one token, in bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


_MODELS = (
    ModelShape(
        "tiny", 2, 128, 8, 2, 32, 256, 512,
        source="kbench: small enough for a laptop, GQA 4, head size 32",
    ),
    ModelShape(
        "nano", 2, 128, 4, 1, 32, 256, 512,
        source="kbench: tiny with half of its heads; what a 2-core machine can decide a claim on in three minutes",
    ),
    ModelShape(
        "small", 4, 512, 8, 4, 64, 1_408, 8_192,
        source="kbench: a CPU model whose GEMMs are not negligible",
    ),
    ModelShape(
        "tiny-moe", 2, 128, 8, 2, 32, 256, 512, experts=8, experts_per_token=2, expert_intermediate=128,
        source="kbench: tiny with eight experts",
    ),
    ModelShape(
        "llama-3.2-1b", 16, 2_048, 32, 8, 64, 8_192, 128_256, rope_theta=500_000.0, tied_embeddings=True,
        source="meta-llama/Llama-3.2-1B config.json",
    ),
    ModelShape(
        "llama-3-8b", 32, 4_096, 32, 8, 128, 14_336, 128_256, rope_theta=500_000.0,
        source="meta-llama/Meta-Llama-3-8B config.json",
    ),
    ModelShape(
        "llama-3-70b", 80, 8_192, 64, 8, 128, 28_672, 128_256, rope_theta=500_000.0,
        source="meta-llama/Meta-Llama-3-70B config.json",
    ),
    ModelShape(
        "qwen3-8b", 36, 4_096, 32, 8, 128, 12_288, 151_936, rope_theta=1_000_000.0, norm_eps=1e-6, qk_norm=True,
        source="Qwen/Qwen3-8B config.json",
    ),
    ModelShape(
        "mixtral-8x7b", 32, 4_096, 32, 8, 128, 14_336, 32_000, rope_theta=1_000_000.0,
        experts=8, experts_per_token=2, expert_intermediate=14_336,
        source="mistralai/Mixtral-8x7B-v0.1 config.json",
    ),
)  # fmt: skip
MODELS: Mapping[str, ModelShape] = MappingProxyType({model.name: model for model in _MODELS})


def model_shape(name: str) -> ModelShape:
    if name not in MODELS:
        raise UsageError(f"no model preset {name!r}", remedy=f"one of {', '.join(MODELS)}; see kbench list models")
    return MODELS[name]


# ------------------------------------------------------------------------------------ implementations

OPS: Mapping[str, str] = MappingProxyType(
    {
        "attention.decode": "one query token a sequence against a paged KV cache",
        "attention.prefill": "several query tokens a sequence, causal, ragged, against a paged KV cache",
    }
)
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True, slots=True)
class Implementation:
    """Who computes an operation, and what it can be asked for. `entry` is `module:attribute`, imported when used."""

    name: str
    ops: tuple[str, ...]
    entry: str
    summary: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[str, ...] = DTYPES
    page_multiple_of: int = 1
    page_sizes: tuple[int, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    head_dims: tuple[int, ...] = ()
    power_of_two_head_dim: bool = False
    graph: bool = False
    expects_kernel: str = ""


_IMPLEMENTATIONS: dict[str, Implementation] = {}


def register(implementation: Implementation, *, override: bool = False) -> None:
    """Make an implementation known, built-in or plug-in; a second one of a name needs `override`."""
    if implementation.name in _IMPLEMENTATIONS and not override:
        raise UsageError(f"an implementation named {implementation.name!r} is registered already", remedy="rename it")
    unknown = [op for op in implementation.ops if op not in OPS]
    if unknown or not implementation.ops:
        raise UsageError(f"{implementation.name}: unknown op {unknown}", remedy=f"one of {', '.join(OPS)}")
    _IMPLEMENTATIONS[implementation.name] = implementation


def implementations(op: str | None = None) -> list[Implementation]:
    return [impl for impl in _IMPLEMENTATIONS.values() if op is None or op in impl.ops]


def implementation(name: str, op: str | None = None) -> Implementation:
    found = _IMPLEMENTATIONS.get(name)
    if found is None or (op is not None and op not in found.ops):
        names = ", ".join(impl.name for impl in implementations(op)) or "none"
        raise UsageError(
            f"no implementation {name!r}" + (f" of {op}" if op else ""),
            remedy=f"one of {names}; see kbench list kernels",
        )
    return found


for _built_in in (
    Implementation(
        "reference",
        ("attention.decode", "attention.prefill"),
        "kbench.kernels.reference:ReferenceAttention",
        "plain softmax(QK)V, one sequence at a time, scores materialised",
    ),
    Implementation(
        "sdpa",
        ("attention.prefill",),
        "kbench.kernels.sdpa:SdpaPrefill",
        "gathers each sequence's pages, then torch scaled_dot_product_attention",
    ),
    Implementation(
        "sdpa-gather",
        ("attention.decode",),
        "kbench.kernels.sdpa:SdpaGatherDecode",
        "gathers the whole batch's pages into one padded tensor, then scaled_dot_product_attention",
    ),
    Implementation(
        "blocked",
        ("attention.decode",),
        "kbench.kernels.blocked:BlockedDecode",
        "streams tiles of pages with a running softmax; never builds the gathered tensor",
        page_multiple_of=16,
    ),
    Implementation(
        "triton-paged",
        ("attention.decode",),
        "kbench.kernels.triton_paged:TritonPagedDecode",
        "split-KV paged decode in Triton",
        devices=("cuda",),
        power_of_two_head_dim=True,
        page_multiple_of=16,
        graph=True,
        expects_kernel="_paged_decode",
    ),
):
    register(_built_in)


def op_applies(op: str, point: Point) -> bool:
    """Whether an operation can be measured at a point: decode where every query is one token, prefill where none is."""
    single = [group.query_tokens == 1 for group in point.groups]
    return all(single) if op.endswith(".decode") else not any(single)
