"""What is computed: the operations, their axes, and how a model and a batch fill the axes in.

Owns the torch-free half of an operation. The other half (inputs, oracle, cost, edge cases) is the class that `entry`
names, in `kbench.ops`. An axis that neither the shape nor the model gives, and that has no default, makes the shape
none of this operation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from kbench.catalog.attributes import PLAIN
from kbench.catalog.models import ModelShape
from kbench.catalog.points import Point, Shape
from kbench.errors import UsageError

AxisValue = int | float | str
Axes = Mapping[str, AxisValue]
Batches = Literal["decode", "prefill", "any", "none"]
"""Which batches an operation can be measured at: every query one token, no query one token, any, or axes only."""
REQUIRED = -1
ROUTINGS = ("balanced", "zipf", "hot", "empty")
"""How tokens choose experts: evenly, by a Zipf law, all the same ones, or evenly among all but the last."""

MASKS = ("causal", "block-sparse", "custom")
"""Who may see whom in attention. Nothing built in computes any but the first: the others are rejected with reasons."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`axes`: name → default, `REQUIRED` where there is none; a default's type is the axis's type. `derive`: the axes
    that a model and a batch give. `choices`: the values that a text axis may have."""

    name: str
    summary: str
    entry: str
    axes: Axes
    batches: Batches = "none"
    derive: Callable[[ModelShape, Point], Axes] = lambda model, point: {}
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """`gemm` of `gemm.qkv`: an implementation of the family serves every member."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A shape with every axis of its operation filled in."""

    op: str
    point: Point | None
    axes: Axes

    def integer(self, name: str) -> int:
        return int(self.axes[name])

    def number(self, name: str) -> float:
        return float(self.axes[name])

    def text(self, name: str) -> str:
        return str(self.axes[name])

    def with_axes(self, **changed: AxisValue) -> Resolved:
        """The same operation on other axes, for edge cases."""
        return Resolved(self.op, self.point, {**self.axes, **changed})


def _gemm(name: str, sizes: Callable[[ModelShape], tuple[int, int]], summary: str) -> Operation:
    def derive(model: ModelShape, point: Point) -> Axes:
        n, k = sizes(model)
        return {"m": point.query_tokens, "n": n, "k": k}

    axes: Axes = {"m": REQUIRED, "n": REQUIRED, "k": REQUIRED, "layout": "nt"}
    choices = {"layout": ("nt", "nn", "tn")}
    return Operation(name, summary, "kbench.ops.gemm:Gemm", axes, "any", derive, choices)


def _attention(name: str, summary: str, batches: Batches) -> Operation:
    axes: Axes = {
        "q_heads": REQUIRED,
        "kv_heads": REQUIRED,
        "head_dim": REQUIRED,
        "window": 0,
        "softcap": 0.0,
        "sinks": 0,
        "lse": 0,
        "mask": "causal",
    }

    def derive(model: ModelShape, point: Point) -> Axes:
        return {"q_heads": model.q_heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}

    entry = "kbench.ops.attention_op:PagedAttention"
    return Operation(name, summary, entry, axes, batches, derive, {"mask": MASKS})


def _moe(name: str, entry: str, summary: str, own: Axes, derive: Callable[[ModelShape], Axes]) -> Operation:
    axes = {"tokens": REQUIRED, "experts": REQUIRED, "top_k": REQUIRED, **own, "routing": "balanced"}

    def all_axes(model: ModelShape, point: Point) -> Axes:
        if not model.experts:
            return {}  # a dense model has no experts: the shape must name them
        base = {"tokens": point.query_tokens, "experts": model.experts, "top_k": model.experts_per_token}
        return {**base, **derive(model)}

    return Operation(name, summary, f"kbench.ops.{entry}", axes, "any", all_axes, {"routing": ROUTINGS})


def _rows(name: str, entry: str, summary: str, width: str, of: Callable[[ModelShape], int], **more: float) -> Operation:
    axes = {"rows": REQUIRED, width: REQUIRED, **more}
    return Operation(
        name, summary, f"kbench.ops.{entry}", axes, "any", lambda m, p: {"rows": p.query_tokens, width: of(m)}
    )


def _sampling(name: str, kind: str, summary: str, **own: AxisValue) -> Operation:
    """Rows are sequences, not tokens: one row of logits a sequence."""
    axes: Axes = {"rows": REQUIRED, "vocab": REQUIRED, **own}
    entry = f"kbench.ops.{kind}"
    return Operation(name, summary, entry, axes, "any", lambda m, p: {"rows": p.batch, "vocab": m.vocab})


def _heads(model: ModelShape) -> Axes:
    return {"q_heads": model.q_heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}


def _kv(name: str, kind: str, summary: str, **own: AxisValue) -> Operation:
    axes: Axes = {"kv_heads": REQUIRED, "head_dim": REQUIRED, **own}
    entry = f"kbench.ops.{kind}"
    return Operation(name, summary, entry, axes, "any", lambda m, p: {"kv_heads": m.kv_heads, "head_dim": m.head_dim})


_OPERATIONS = (
    _attention("attention.decode", "one query token a sequence against a paged KV cache", "decode"),
    _attention(
        "attention.prefill", "several query tokens a sequence, causal, ragged, against a paged KV cache", "prefill"
    ),
    Operation(
        "attention.mla_decode",
        "absorbed multi-head latent attention, one query token a sequence against a paged latent cache",
        "kbench.ops.mla:MlaDecode",
        {"heads": 128, "latent": 512, "rope": 64},
        "decode",
    ),
    Operation(
        "attention.cascade_merge",
        "merge partial attention outputs by their log-sum-exp",
        "kbench.ops.merge:CascadeMerge",
        {"rows": REQUIRED, "heads": REQUIRED, "head_dim": REQUIRED, "parts": 2},
        "any",
        lambda m, p: {"rows": p.query_tokens, "heads": m.q_heads, "head_dim": m.head_dim},
    ),
    Operation(
        "gemm",
        "dense matrix product; layout nt: weight stored [n, k]",
        "kbench.ops.gemm:Gemm",
        {"m": REQUIRED, "n": REQUIRED, "k": REQUIRED, "layout": "nt"},
        choices={"layout": ("nt", "nn", "tn")},
    ),
    _gemm("gemm.qkv", lambda m: ((m.q_heads + 2 * m.kv_heads) * m.head_dim, m.hidden), "fused QKV projection"),
    _gemm("gemm.o", lambda m: (m.hidden, m.q_heads * m.head_dim), "attention output projection"),
    _gemm("gemm.gate_up", lambda m: (2 * m.intermediate, m.hidden), "fused gate and up projection"),
    _gemm("gemm.down", lambda m: (m.hidden, m.intermediate), "down projection"),
    _gemm("gemm.lm_head", lambda m: (m.vocab, m.hidden), "projection to the vocabulary"),
    _moe(
        "moe.router",
        "routing:Router",
        "softmax of router logits, the top k experts and their weights",
        {},
        lambda m: {},
    ),
    _moe(
        "moe.permute",
        "routing:Permute",
        "rows of tokens in the order of their experts",
        {"hidden": REQUIRED},
        lambda m: {"hidden": m.hidden},
    ),
    _moe(
        "moe.grouped_gemm",
        "moe:GroupedGemm",
        "one GEMM an expert over rows sorted by expert",
        {"n": REQUIRED, "k": REQUIRED},
        lambda m: {"n": 2 * m.expert_intermediate, "k": m.hidden},
    ),
    _moe(
        "moe.fused",
        "moe:FusedMoe",
        "route, permute, gate-up, SiLU-mul, down, weighted sum",
        {"hidden": REQUIRED, "intermediate": REQUIRED},
        lambda m: {"hidden": m.hidden, "intermediate": m.expert_intermediate},
    ),
    _rows("norm.rmsnorm", "norm:RmsNorm", "x / rms(x) * weight", "hidden", lambda m: m.hidden, eps=1e-5),
    _rows(
        "norm.add_rmsnorm",
        "norm:AddRmsNorm",
        "residual + x, and its RMSNorm",
        "hidden",
        lambda m: m.hidden,
        eps=1e-5,
    ),
    Operation(
        "rope",
        "rotary position embedding of queries and keys",
        "kbench.ops.rope:Rope",
        {"tokens": REQUIRED, "q_heads": REQUIRED, "kv_heads": REQUIRED, "head_dim": REQUIRED}
        | {"theta": 10_000.0, "rotary": 0, "interleaved": 0, "offset": 0},
        "any",
        lambda m, p: {"tokens": p.query_tokens, **_heads(m), "theta": m.rope_theta},
    ),
    _rows(
        "activation.silu_mul",
        "activation:SiluMul",
        "silu(gate) * up of a fused projection",
        "intermediate",
        lambda m: m.intermediate,
    ),
    _sampling("sampling.penalties", "filters:Penalties", "repetition, presence and frequency penalties", history=64),
    _sampling("sampling.mask", "filters:Mask", "a grammar's bit mask over the vocabulary", allowed=0.5),
    _sampling("sampling.top_k", "truncation:TopK", "logits outside the k largest become -inf", k=50),
    _sampling("sampling.top_p", "truncation:TopP", "logits outside the smallest set of mass p become -inf", p=0.9),
    _sampling("sampling.draw", "sampling:Draw", "one token a row from logits at a temperature", temperature=1.0),
    _sampling(
        "sampling.chain",
        "sampling:Chain",
        "penalties, mask, temperature, top-k, top-p and the draw",
        history=64,
        allowed=0.5,
        temperature=0.8,
        k=50,
        p=0.9,
    ),
    _kv("kv.append", "kv:Append", "write new keys and values into their pages"),
    _kv("kv.copy_pages", "kv:CopyPages", "copy whole pages to other places in the pool"),
    _kv("kv.convert_pages", "kv_convert:ConvertPages", "the same cache at another page size", page_to=64),
    _kv("kv.convert_layout", "kv_convert:ConvertLayout", "the same cache in the other order, NHD or HND"),
    _rows("quant.per_token_fp8", "quant:PerTokenFp8", "rows to fp8 with a scale each", "hidden", lambda m: m.hidden),
)
OPS: Mapping[str, Operation] = MappingProxyType({op.name: op for op in _OPERATIONS})


def operation(name: str) -> Operation:
    if name not in OPS:
        raise UsageError(f"no operation {name!r}", remedy=f"one of {', '.join(OPS)}")
    return OPS[name]


def op_applies(op: str, shape: Shape | Point) -> bool:
    """Whether an operation can be measured at a shape of any model: the batch is of its kind, the axes are its own."""
    known = operation(op)
    point, given = (shape, ()) if isinstance(shape, Point) else (shape.point, shape.axes)
    if isinstance(shape, Shape) and shape.attributes != PLAIN:
        return False  # of a step
    names = {name for name, _ in given}
    if not names <= set(known.axes):
        return False
    if point is None:
        # A projection takes its sizes from a model; one whose sizes are all given is plain `gemm`.
        needs_batch = known.batches in ("decode", "prefill") or known.family == "kv" or op.startswith("gemm.")
        return not needs_batch and all(name in names or value != REQUIRED for name, value in known.axes.items())
    single = [group.query_tokens == 1 for group in point.groups]
    return {"decode": all(single), "prefill": not any(single), "any": True, "none": False}[known.batches]


def resolve_shape(op: str, shape: Shape, model: ModelShape | None) -> Resolved:
    """Every axis: what the shape says, else what model and batch give, else the default.

    Raises UsageError where the operation cannot be measured at this shape, an axis is missing or a value is none.
    """
    known = operation(op)
    if not op_applies(op, shape):
        raise UsageError(f"{op} cannot be measured at {str(shape)!r}", remedy=_usage(known))
    derived = known.derive(model, shape.point) if model is not None and shape.point is not None else {}
    axes: dict[str, AxisValue] = {**known.axes, **derived}
    for name, text in shape.axes:
        axes[name] = _value(known, name, text)
    missing = [name for name, value in axes.items() if value == REQUIRED]
    if missing:
        raise UsageError(
            f"{op} at {str(shape)!r} lacks {', '.join(missing)}", remedy=f"write e.g. {shape},{missing[0]}=8"
        )
    return Resolved(op, shape.point, axes)


def _value(known: Operation, name: str, text: str) -> AxisValue:
    default = known.axes[name]
    if isinstance(default, str):
        choices = known.choices.get(name, ())
        if choices and text not in choices:
            raise UsageError(f"{known.name}: {name}={text}", remedy=f"one of {', '.join(choices)}")
        return text
    try:
        value = float(text) if isinstance(default, float) else int(text)
    except ValueError as error:
        raise UsageError(f"{known.name}: {name}={text} is no number", remedy="write a number") from error
    if value < 0 or (isinstance(value, float) and not value < float("inf")):
        raise UsageError(f"{known.name}: {name}={text} is negative", remedy="write a number from 0 on")
    return value


def _usage(known: Operation) -> str:
    """The axes of an operation, as a user writes them."""
    wanted = {"decode": "a batch of one-token queries", "prefill": "a batch of longer queries"}.get(known.batches, "")
    axes = ",".join(f"{name}={'N' if value == REQUIRED else value}" for name, value in known.axes.items())
    batch = {"any": "a batch, or "}.get(known.batches, "")
    return f"give {wanted + ' and optionally ' if wanted else batch}axes {axes}"
