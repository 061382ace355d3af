"""What stands behind attention in a layer: a dense SwiGLU, or a router and its experts.

Owns the layers' weights, the router's choice and three ways to run experts that agree with each other. Which experts a
token visits may be declared instead of computed (`engine.routing_control`). It does not know attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kbench.catalog import ModelShape
from kbench.engine.fused import silu_mul

Reroute = Callable[[Tensor], Tensor]
"""From the experts that the router chose, int64 `[tokens, experts_per_token]`, to those that are visited."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A SwiGLU layer."""

    gate_up: Tensor
    """`[2 * intermediate, hidden]`, gate first."""
    down: Tensor
    """`[hidden, intermediate]`."""
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed SwiGLU experts, and those that every token visits."""

    router: Tensor
    """`[experts, hidden]`."""
    gate_up: Tensor
    """`[experts, 2 * intermediate, hidden]`, gate first."""
    down: Tensor
    """`[experts, hidden, intermediate]`."""
    router_bias: Tensor | None = None
    """`[experts]`."""
    gate_up_bias: Tensor | None = None
    """`[experts, 2 * intermediate]`."""
    down_bias: Tensor | None = None
    """`[experts, hidden]`."""
    shared: Dense | None = None
    shared_gate: Tensor | None = None
    """`[1, hidden]`: the sigmoid of its product with a token weighs the shared experts."""


def mlp(layer: Dense | Experts, shape: ModelShape, x: Tensor, reroute: Reroute | None = None) -> Tensor:
    """`x` `[tokens, hidden]` through the layer. `reroute` overrules the router's choice; weights stay the router's."""
    if isinstance(layer, Dense):
        return _dense(layer, shape, x)
    weight, chosen = route(layer, shape, x, reroute)
    out = _run(layer, shape, x, weight, chosen)
    if layer.shared is None:
        return out
    shared = _dense(layer.shared, shape, x)
    if layer.shared_gate is not None:
        shared = shared * functional.linear(x, layer.shared_gate).sigmoid()
    return out + shared


def route(layer: Experts, shape: ModelShape, x: Tensor, reroute: Reroute | None = None) -> tuple[Tensor, Tensor]:
    """Weights, of the dtype of `x`, and experts of each token, `[tokens, experts_per_token]` both.

    The router is computed as ever where its choice is overruled, so that a declared load costs what a chosen one does.
    """
    logits = functional.linear(x, layer.router, layer.router_bias).float()
    scores = logits.softmax(dim=-1)
    weight, chosen = scores.topk(shape.experts_per_token, dim=-1)
    if reroute is not None:
        chosen = reroute(chosen)
        # Of the logits, since an expert that the router would never choose may have no score left to divide by.
        weight = logits.gather(1, chosen).softmax(dim=-1) if shape.norm_topk_prob else scores.gather(1, chosen)
    elif shape.norm_topk_prob:
        weight = weight / weight.sum(dim=-1, keepdim=True)
    return weight.to(x.dtype), chosen


def _run(layer: Experts, shape: ModelShape, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return experts_loop(layer, shape, x, weight, chosen)
    if groupable(layer, x):
        return experts_grouped(layer, shape, x, weight, chosen)
    return experts_dense(layer, shape, x, weight, chosen)


def _dense(layer: Dense, shape: ModelShape, x: Tensor) -> Tensor:
    gate_up = functional.linear(x, layer.gate_up, layer.gate_up_bias)
    return functional.linear(swiglu(gate_up, shape), layer.down, layer.down_bias)


def swiglu(gate_up: Tensor, shape: ModelShape) -> Tensor:
    """Gate and up of the last axis, gate first, to what goes into the projection down."""
    if not shape.swiglu_limit:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=shape.swiglu_limit)
    up = up.clamp(min=-shape.swiglu_limit, max=shape.swiglu_limit)
    return gate * (gate * shape.swiglu_alpha).sigmoid() * (up + 1)


def experts_loop(layer: Experts, shape: ModelShape, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Each expert computes its own tokens only. Reads the routing on the host, which is free on the CPU."""
    out = torch.zeros_like(x)
    for expert in range(layer.router.shape[0]):
        token, slot = torch.where(chosen == expert)
        if not token.numel():
            continue
        gate_up = functional.linear(x[token], layer.gate_up[expert], _of(layer.gate_up_bias, expert))
        done = functional.linear(swiglu(gate_up, shape), layer.down[expert], _of(layer.down_bias, expert))
        out.index_add_(0, token, done * weight[token, slot].unsqueeze(-1))
    return out


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


def groupable(layer: Experts, x: Tensor) -> bool:
    """Whether `torch.nn.functional.grouped_mm` takes these operands: bfloat16, rows of whole 16 bytes."""
    widths = (*layer.gate_up.shape[1:], *layer.down.shape[1:])
    aligned = all(width % 8 == 0 for width in widths)
    return x.dtype == torch.bfloat16 and aligned and hasattr(functional, "grouped_mm")


def experts_grouped(layer: Experts, shape: ModelShape, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Rows in the order of their experts, one grouped product a projection. Reads no routing on the host.

    An expert without tokens is an empty group.
    """
    tokens, slots = chosen.shape
    if not tokens:
        return torch.zeros_like(x)
    expert, source = chosen.reshape(-1).sort(stable=True)
    bounds = torch.arange(1, layer.router.shape[0] + 1, device=x.device)
    ends = torch.searchsorted(expert, bounds, out_int32=True)
    rows = x.index_select(0, source // slots)
    gate_up = functional.grouped_mm(rows, layer.gate_up.transpose(1, 2), offs=ends)
    if layer.gate_up_bias is not None:
        gate_up = gate_up + layer.gate_up_bias.index_select(0, expert)
    done = functional.grouped_mm(swiglu(gate_up, shape), layer.down.transpose(1, 2), offs=ends)
    if layer.down_bias is not None:
        done = done + layer.down_bias.index_select(0, expert)
    # Back to the order of the tokens: every row has one place, so nothing is added up in an order that varies.
    placed = torch.empty_like(done).index_copy_(0, source, done)
    return (placed.view(tokens, slots, x.shape[1]) * weight.unsqueeze(-1)).sum(dim=1)


def experts_dense(layer: Experts, shape: ModelShape, x: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """All experts compute all tokens and the unchosen count zero: more work, but no read of the routing on the host."""
    gates = torch.zeros(x.shape[0], layer.router.shape[0], dtype=x.dtype, device=x.device).scatter_(1, chosen, weight)
    gate_up = torch.matmul(x, layer.gate_up.transpose(1, 2))
    if layer.gate_up_bias is not None:
        gate_up = gate_up + layer.gate_up_bias.unsqueeze(1)
    done = torch.matmul(swiglu(gate_up, shape), layer.down.transpose(1, 2))
    if layer.down_bias is not None:
        done = done + layer.down_bias.unsqueeze(1)
    return (done * gates.t().unsqueeze(-1)).sum(dim=0)
