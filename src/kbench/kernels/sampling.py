"""Sampling in plain torch: each step alone, the chain of all steps, the chain behind a first top-k, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kbench.kernels.base import PlainKernel
from kbench.ops.base import Outputs

MINUS_INFINITY = float("-inf")
NO_TOKEN = -1
RECOMPILE_LIMIT = 64
"""A correctness phase asks for more kinds of shapes than torch.compile allows by itself."""
SHORT_LIST = 1_024
"""Longest list of candidates that is worth a partial sort."""


class TorchPenalties(PlainKernel):
    """Counts by scatter, then element by element over the whole vocabulary, in float32."""

    name = "torch-penalties"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        values = penalise(state["logits"].float(), state)
        return out[0].copy_(values)


class TorchMask(PlainKernel):
    """Unpacks the bits to booleans, then masked_fill."""

    name = "torch-mask"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        return mask(state["logits"], state["bits"])


class TorchTopK(PlainKernel):
    """torch.topk for the largest k of any row, then everything below the row's own k-th."""

    name = "torch-top-k"

    def plan(self, state: dict[str, Any]) -> Any:
        return longest(state["k"], state["logits"].shape[1])

    def run(self, state: dict[str, Any], plan: Any, out: Outputs) -> Tensor:
        return top_k(state["logits"], state["k"], plan)


class TorchTopP(PlainKernel):
    """A whole sort, softmax and cumulative sum in float32, and the way back through the order."""

    name = "torch-top-p"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        return top_p(state["logits"], state["p"])


class TorchDraw(PlainKernel):
    """Cumulative sum of the softmax, then a binary search for the uniform."""

    name = "torch-draw"

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        return draw(state["logits"].float(), state["temperature"], state["uniform"])


class TorchDrawExponential(PlainKernel):
    """The race of exponentials: the largest of probability / noise, with noise from torch's own generator."""

    name = "torch-draw-exponential"
    own_generator = True

    def run(self, state: dict[str, Any], plan: None, out: Outputs) -> Tensor:
        values = scaled(state["logits"].float(), state["temperature"])
        noise = torch.empty_like(values).exponential_()
        token = (values.softmax(dim=-1).nan_to_num() / noise).argmax(dim=-1)
        return torch.where(torch.isinf(state["logits"]).all(dim=-1), NO_TOKEN, token)


class TorchChain(PlainKernel):
    """One step after the other over the whole vocabulary, in float32."""

    name = "torch-chain"

    def plan(self, state: dict[str, Any]) -> Any:
        return longest(state["k"], state["logits"].shape[1])

    def run(self, state: dict[str, Any], plan: Any, out: Outputs) -> Tensor:
        return chain(state, plan)


class CompiledChain(TorchChain):
    """The same, through torch.compile; one compilation a kind of shape, in the first call."""

    name = "compiled-chain"

    def __init__(self) -> None:
        import torch._dynamo  # only where it compiles

        self._compiled: Callable[..., Tensor] = torch.compile(chain, dynamic=True)

    def run(self, state: dict[str, Any], plan: Any, out: Outputs) -> Tensor:
        import torch._dynamo

        if not state["logits"].numel():
            return chain(state, plan)
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return self._compiled(state, plan)


class TorchShortChain(TorchChain):
    """A partial sort to the k largest first; top-p and the draw see those only. The whole chain where a row has no k or
    one beyond SHORT_LIST."""

    name = "torch-short-chain"

    def plan(self, state: dict[str, Any]) -> Any:
        vocab = state["logits"].shape[1]
        k = state["k"]
        short = bool(((k > 0) & (k <= SHORT_LIST)).all()) and len(k) > 0
        return longest(k, vocab), short and longest(k, vocab) <= SHORT_LIST

    def run(self, state: dict[str, Any], plan: Any, out: Outputs) -> Tensor:
        most, short = plan
        return short_chain(state, most) if short else chain(state, most)


def penalise(values: Tensor, state: dict[str, Any]) -> Tensor:
    """Touches the logits of the history alone; the padding falls into a column that is cut off."""
    tokens, vocab = state["history"], values.shape[1]
    if not tokens.shape[1]:
        return values
    generated = torch.arange(tokens.shape[1], device=tokens.device) >= state["prompt"][:, None]
    times = torch.zeros((len(values), vocab + 1), dtype=values.dtype, device=values.device)
    times = times.scatter_add(1, tokens, generated.to(values.dtype)).gather(1, tokens)
    old = torch.nn.functional.pad(values, (0, 1)).gather(1, tokens)
    repetition = state["repetition"][:, None]
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = new - state["frequency"][:, None] * times - state["presence"][:, None] * (times > 0)
    return torch.nn.functional.pad(values, (0, 1)).scatter(1, tokens, new)[:, :vocab]


def mask(values: Tensor, bits: Tensor) -> Tensor:
    spread = (bits[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1
    banned = spread.reshape(len(bits), bits.shape[1] * 32)[:, : values.shape[1]] == 0
    return values.masked_fill(banned, MINUS_INFINITY)


def longest(k: Tensor, vocab: int) -> int:
    """The largest k that is on, 0 where none is. It reads the device, so it belongs into a plan."""
    on = torch.where(k >= vocab, 0, k)
    return int(on.max()) if len(on) else 0


def top_k(values: Tensor, k: Tensor, most: int) -> Tensor:
    if not most:
        return values.clone()
    largest = values.topk(most, dim=-1).values
    kth = largest.gather(1, (k.long() - 1).clamp(0, most - 1)[:, None])
    off = (k <= 0) | (k >= values.shape[1])
    return values.masked_fill((values < kth) & ~off[:, None], MINUS_INFINITY)


def top_p(values: Tensor, p: Tensor) -> Tensor:
    ordered, order = values.sort(dim=-1, descending=True)
    probability = ordered.float().softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    drop = (before >= p[:, None]) & (p < 1)[:, None]
    drop[:, :1] = False
    return values.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), MINUS_INFINITY)


def scaled(values: Tensor, temperature: Tensor) -> Tensor:
    """Logits over temperature; at 0 the largest is left alone."""
    greedy = (temperature == 0)[:, None]
    only = torch.where(values == values.amax(dim=-1, keepdim=True), 0.0, MINUS_INFINITY)
    divided = values / torch.where(greedy, torch.ones_like(values[:, :1]), temperature[:, None])
    return torch.where(greedy & torch.isfinite(values), only, divided)


def draw(values: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    divided = scaled(values, temperature)
    top = divided.amax(dim=-1, keepdim=True)
    mass = torch.where(torch.isfinite(divided), (divided - top).exp(), 0.0)
    total = mass.cumsum(dim=-1)
    token = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)
    last = mass.shape[1] - 1 - (mass > 0).flip(-1).int().argmax(dim=-1, keepdim=True)
    return torch.where(torch.isfinite(top), torch.minimum(token, last), NO_TOKEN)[:, 0]


def chain(state: dict[str, Any], most: int) -> Tensor:
    """The definition, step by step. Temperature 0 makes top-k and top-p idle, as its one token is in both."""
    values = mask(penalise(state["logits"].float(), state), state["bits"])
    values = scaled(values, state["temperature"])
    values = top_p(top_k(values, state["k"], most), state["p"])
    return draw(values, torch.ones_like(state["temperature"]), state["uniform"])


def short_chain(state: dict[str, Any], most: int) -> Tensor:
    """Over the `most` largest of each row, which are brought back into the order of token ids for the draw."""
    values = mask(penalise(state["logits"].float(), state), state["bits"])
    width = most or values.shape[1]
    ordered, order = values.topk(width, dim=-1)
    place = torch.arange(width, device=values.device)
    ordered = ordered.masked_fill(place >= state["k"].clamp_max(width)[:, None], MINUS_INFINITY)
    ordered = scaled(ordered, state["temperature"])
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    drop = (before >= state["p"][:, None]) & (state["p"] < 1)[:, None] & (place > 0)
    ordered = ordered.masked_fill(drop, MINUS_INFINITY)
    tokens, back = order.sort(dim=-1)
    chosen = draw(ordered.gather(1, back), torch.ones_like(state["temperature"]), state["uniform"])
    found = tokens.gather(1, chosen.clamp_min(0)[:, None])[:, 0]
    return torch.where(chosen < 0, NO_TOKEN, found)
