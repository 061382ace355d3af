"""How tokens find their experts: the router's choice, and rows put in the order of experts.

Owns the distributions of `catalog.ROUTINGS` and the two operations before the experts' work. `balanced` draws experts
evenly, so loads vary as chance has it; `zipf` by 1 / rank; `hot` sends all tokens to the same `top_k` experts, which
leaves every other one empty; `empty` draws evenly among all but the last expert, which is empty by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.errors import UsageError
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, Outputs, form_problem
from kbench.ops.norm import draw
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, judge_rows, rows_cost

FAR = 30.0
"""A preference that chance does not overcome."""
ABSENT = -1
"""An expert that is not here: expert parallelism has put it on another device."""


class Router(TensorOp):
    """logits `[tokens, experts]` → (weights `[tokens, top_k]` float32, ids `[tokens, top_k]` int64 or int32).

    Softmax in float32 or better, the `top_k` most probable experts in any order, their weights divided by their sum.
    Where probabilities tie, any choice is right: what is judged is the set of probabilities chosen. No expert twice. An
    expert at -inf has weight 0; a row has at least one finite logit. No tokens answer nothing.
    """

    kinds = ("random", "even")
    arguments: ClassVar[tuple[str, ...]] = ("logits", "top_k")
    names = ("weights", "ids")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        experts, top_k = sizes(shape)
        logits = draw((shape.integer("tokens"), experts), settings, generator)
        if kind != "even":  # where few experts have all the mass, weights look normalised that are not
            logits += preference(shape, logits.device).clamp(min=-FAR).to(logits.dtype)
        if kind == "ties":
            logits = (logits * 2).round()
        if kind == "equal":
            logits.zero_()
        if kind == "extreme":
            logits *= 1e4 if settings.dtype != torch.float16 else 1e3
        if kind == "masked":
            logits[:, experts // 2 :] = float("-inf")
        roles: Mapping[str, Any] = {"logits": "activation", "top_k": "scalar"}
        return TensorInputs(shape, {"logits": logits, "top_k": top_k}, roles, settings.dtype)

    def redraw(self, inputs: TensorInputs, generator: torch.Generator) -> None:
        logits = inputs.arguments["logits"]
        logits.normal_(generator=generator)
        logits += preference(inputs.shape, logits.device).clamp(min=-FAR).to(logits.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        return route(inputs.arguments["logits"].double(), inputs.arguments["top_k"])

    def plain(self, inputs: TensorInputs) -> Outputs:
        return route(inputs.arguments["logits"].float(), inputs.arguments["top_k"])

    def judge(self, answer: object, against: TensorStandard) -> Judgement:
        limit = against.limits[0]
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            return Judgement(float("inf"), limit, "did not return two outputs: weights and ids")
        weights, ids = answer
        problem = form_problem(weights, against.expected[0].float())
        if problem:
            return Judgement(float("inf"), limit, f"weights: {problem}")
        narrow = isinstance(ids, Tensor) and ids.dtype == torch.int32
        problem = form_problem(ids, against.expected[1].int() if narrow else against.expected[1])
        if problem:
            return Judgement(float("inf"), limit, f"ids: {problem}")
        return self._judge_choice(weights, ids.long(), against)

    def _judge_choice(self, weights: Tensor, ids: Tensor, against: TensorStandard) -> Judgement:
        """Rows by falling probability of what they chose, beside the most probable ones."""
        limit, shares = against.limits[0], torch.softmax(against.inputs.arguments["logits"].double(), dim=-1)
        if bool(((ids < 0) | (ids >= shares.shape[1])).any()):
            return Judgement(float("inf"), limit, "ids: not an expert")
        ordered = ids.sort(dim=-1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            return Judgement(float("inf"), limit, "ids: an expert was chosen twice")
        chosen, order = shares.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        wanted = shares.gather(1, against.expected[1])
        missed = chosen < wanted * (1 - 1e-6) - 1e-37
        if bool(missed.any()):
            row = int(missed.any(dim=-1).nonzero()[0])
            text = f"ids: a less probable expert was chosen in row {row}; {int(missed.any(dim=-1).sum())} rows fail"
            return Judgement(float("inf"), limit, text)
        return judge_rows(weights.gather(1, order), against.expected[0], limit, "weights")

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        return self._judge_choice(answer[0], answer[1], own).ok

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        logits, top_k = own.inputs.arguments["logits"].double(), own.inputs.arguments["top_k"]
        weights, ids = own.expected
        shares = torch.softmax(logits, dim=-1)
        found: dict[str, Outputs] = {"zeros": (torch.zeros_like(weights), ids)}
        if top_k < logits.shape[1]:
            found["weights not normalised"] = (shares.gather(1, ids), ids)
            below = shares.topk(top_k + 1, dim=-1)
            last = below.values[:, 1:] / below.values[:, 1:].sum(dim=-1, keepdim=True)
            found["the most probable left out"] = (last, below.indices[:, 1:])
        if top_k > 1:
            found["weights of another order"] = (weights.flip(-1), ids)
        return found

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        def at(tokens: int, experts: int, top_k: int) -> Resolved:
            return shape.with_axes(tokens=tokens, experts=experts, top_k=top_k, routing="balanced")

        return (
            *(Edge(f"{e} experts, {k} of them", at(7, e, k)) for e, k in ((8, 2), (72, 6), (128, 8), (384, 8), (9, 9))),
            Edge("one expert", at(3, 1, 1)),
            Edge("one of many", at(3, 64, 1)),
            Edge("no tokens", at(0, 8, 2)),
            Edge("ties", at(33, 16, 4), "ties"),
            Edge("all equal", at(5, 16, 4), "equal"),
            Edge("extreme logits", at(33, 16, 4), "extreme"),
            Edge("half of the experts at -inf", at(5, 16, 4), "masked"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        logits = inputs.arguments["logits"]
        return rows_cost(5 * logits.numel(), (logits,), self.outputs(inputs))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        logits, top_k = inputs.arguments["logits"], inputs.arguments["top_k"]
        form = (logits.shape[0], top_k)
        return (
            torch.empty(form, dtype=torch.float32, device=logits.device),
            torch.empty(form, dtype=torch.int64, device=logits.device),
        )


class Permute(TensorOp):
    """x `[tokens, hidden]`, ids `[tokens, top_k]` int32 → (rows `[tokens * top_k, hidden]`, offsets `[experts + 1]`
    int32, source `[tokens * top_k]` int32).

    Rows offsets[e] to offsets[e + 1] belong to expert e, in any order among themselves; source[r] = token * top_k +
    slot of row r. An id of -1 is an expert that is not here: such rows are nobody's, offsets do not reach them, and
    what rows and source hold from offsets[-1] on is undefined. An expert without tokens has an empty range, and without
    any tokens every offset is 0.
    """

    arguments: ClassVar[tuple[str, ...]] = ("x", "ids", "experts")
    names = ("rows", "offsets", "source")
    stale = False

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        experts, _ = sizes(shape)
        x = draw((shape.integer("tokens"), shape.integer("hidden")), settings, generator)
        ids = draw_ids(shape, generator).int()
        if kind == "absent":
            ids[ids % 2 == 1] = ABSENT
        if kind == "all absent":
            ids.fill_(ABSENT)
        roles: Mapping[str, Any] = {"x": "activation", "ids": "metadata", "experts": "scalar"}
        return TensorInputs(shape, {"x": x, "ids": ids, "experts": experts}, roles, settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        rows, offsets, source = self.plain(inputs)
        return rows.double(), offsets.long(), source.long()

    def plain(self, inputs: TensorInputs) -> Outputs:
        x, ids, experts = (inputs.arguments[name] for name in self.arguments)
        source, offsets = by_expert(ids, experts)
        return x[source // max(1, ids.shape[1])], offsets.int(), source.int()

    def judge(self, answer: object, against: TensorStandard) -> Judgement:
        if not isinstance(answer, tuple | list) or len(answer) != 3:
            return Judgement(float("inf"), 0.0, "did not return three outputs: rows, offsets and source")
        for name, have, want in zip(self.names, answer, self.outputs(against.inputs), strict=True):
            problem = form_problem(have, want)
            if problem:
                return Judgement(float("inf"), 0.0, f"{name}: {problem}")
        problem = self._disorder((answer[0], answer[1], answer[2]), against)
        return Judgement(float("inf") if problem else 0.0, 0.0, problem)

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        return not self._disorder(answer, own)

    def _disorder(self, answer: Outputs, against: TensorStandard) -> str:
        rows, offsets, source = answer
        x, ids = against.inputs.arguments["x"], against.inputs.arguments["ids"]
        if not torch.equal(offsets.long(), against.expected[1]):
            return "offsets: not where the experts' rows begin"
        used = int(offsets[-1])
        source, flat = source[:used].long(), ids.reshape(-1)
        if bool(((source < 0) | (source >= flat.numel())).any()) or torch.unique(source).numel() != used:
            return "source: a row is named twice, or one that does not exist"
        sizes_of = against.expected[1].diff()
        wanted = torch.arange(sizes_of.numel(), device=ids.device).repeat_interleave(sizes_of)
        if not torch.equal(flat[source].long(), wanted):
            return "source: a row lies in another expert's range"
        same = rows[:used].to(torch.float64) == x[source // max(1, ids.shape[1])].double()
        return "" if bool(same.all()) else f"rows: {int((~same.all(dim=-1)).sum())} rows are not their token's"

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        rows, offsets, source = own.expected
        tokens = own.inputs.arguments["x"].double()
        unsorted = tokens.repeat_interleave(own.inputs.arguments["ids"].shape[1], dim=0)
        return {
            "zeros": (torch.zeros_like(rows), torch.zeros_like(offsets), torch.zeros_like(source)),
            "rows not moved": (unsorted, offsets, source),
            "source not written": (rows, offsets, torch.zeros_like(source)),
            "offsets without the end": (rows, offsets.roll(1), source),
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        return moe_edges(shape, hidden=40)

    def cost(self, inputs: TensorInputs) -> Cost:
        x, ids = inputs.arguments["x"], inputs.arguments["ids"]
        return rows_cost(0, (x, ids), self.outputs(inputs))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x, ids, experts = (inputs.arguments[name] for name in self.arguments)
        return (
            torch.empty((ids.numel(), x.shape[1]), dtype=x.dtype, device=x.device),
            torch.empty(experts + 1, dtype=torch.int32, device=x.device),
            torch.empty(ids.numel(), dtype=torch.int32, device=x.device),
        )


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The definition, in the dtype of the logits: weights and ids, the most probable first."""
    chosen = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return chosen.values / chosen.values.sum(dim=-1, keepdim=True), chosen.indices


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(source, offsets) of ids `[tokens, top_k]`; rows of absent experts come last. Nothing waits for the device."""
    flat = ids.reshape(-1).long()
    keys, source = torch.where(flat < 0, experts, flat).sort(stable=True)
    return source, torch.searchsorted(keys, torch.arange(experts + 1, device=ids.device))


def sizes(shape: Resolved) -> tuple[int, int]:
    """(experts, top_k). Raises UsageError where a token cannot have that many."""
    experts, top_k = shape.integer("experts"), shape.integer("top_k")
    reachable = experts - (shape.text("routing") == "empty")
    if not 1 <= top_k <= reachable:
        raise UsageError(
            f"{shape.op}: top_k={top_k} of {experts} experts with routing={shape.text('routing')}",
            remedy=f"top_k from 1 to {reachable}" if reachable else "name more experts",
        )
    return experts, top_k


def preference(shape: Resolved, device: torch.device) -> Tensor:
    """What is added to every token's scores of the experts: float32 `[experts]`, -inf where none may go."""
    experts, top_k = sizes(shape)
    rank = torch.arange(experts, device=device, dtype=torch.float32)
    routing = shape.text("routing")
    if routing == "zipf":
        return -torch.log1p(rank)
    if routing == "hot":
        return torch.where(rank < top_k, FAR, 0.0)
    return torch.where((rank == experts - 1) & (routing == "empty"), float("-inf"), 0.0)


def scores(shape: Resolved, generator: torch.Generator) -> Tensor:
    """Gumbel scores `[tokens, experts]`: their top k are drawn without replacement, as `preference` weighs them."""
    experts, _ = sizes(shape)
    uniform = torch.rand((shape.integer("tokens"), experts), generator=generator, device=generator.device)
    return preference(shape, generator.device) - torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))


def draw_ids(shape: Resolved, generator: torch.Generator) -> Tensor:
    """int64 `[tokens, top_k]`, no expert twice in a row."""
    return scores(shape, generator).topk(sizes(shape)[1], dim=-1).indices


def moe_edges(shape: Resolved, **widths: int) -> tuple[Edge, ...]:
    """What breaks kernels that work by expert; `widths` keep the cases small."""

    def at(tokens: int, experts: int, top_k: int, routing: str = "balanced") -> Resolved:
        return shape.with_axes(tokens=tokens, experts=experts, top_k=top_k, routing=routing, **widths)

    return (
        Edge("no tokens", at(0, 8, 2)),
        Edge("one token", at(1, 8, 2)),
        Edge("one expert", at(5, 1, 1)),
        Edge("all tokens to the same experts", at(33, 8, 2, "hot")),
        Edge("the last expert empty", at(33, 8, 2, "empty")),
        Edge("more experts than rows", at(3, 24, 1)),
        Edge("every expert for every token", at(17, 4, 4)),
        Edge("skewed", at(65, 16, 4, "zipf")),
        Edge("every other expert not here", at(33, 8, 2), "absent"),
        Edge("no expert here", at(5, 8, 2), "all absent"),
    )
