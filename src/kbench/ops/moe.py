"""The experts' work: one GEMM an expert over rows that are sorted by expert, and the whole layer around it.

The contract for what is empty: an expert without rows adds nothing, and its weights may hold NaN. No tokens answer no
rows. Rows from offsets[-1] on are nobody's (expert parallelism leaves such rows for experts that are elsewhere): what
is read there is NaN or nonsense, and no answer may be written there.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, Outputs, form_problem
from kbench.ops.gemm import COARSER, scaled, sharpen, without_last
from kbench.ops.guards import GUARD_ROWS, guard_problem, guarded, is_guarded
from kbench.ops.norm import draw
from kbench.ops.routing import ABSENT, by_expert, draw_ids, moe_edges, route, scores, sizes
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, judge_rows


class GroupedGemm(TensorOp):
    """x `[rows, k]`, weight `[experts, n, k]`, offsets `[experts + 1]` int32 → `[rows, n]`.

    Rows offsets[e] to offsets[e + 1] of x are multiplied by weight[e]ᵀ.
    """

    kinds = ("random", "needle")
    arguments: ClassVar[tuple[str, ...]] = ("x", "weight", "offsets")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        experts, _ = sizes(shape)
        n, k = shape.integer("n"), shape.integer("k")
        ids = draw_ids(shape, generator)
        if kind in ("absent", "all absent"):
            ids[ids % 2 == 1 if kind == "absent" else ids >= 0] = ABSENT
        if kind == "alternating":
            ids = ids // 2 * 2  # each odd expert is empty
        _, offsets = by_expert(ids, experts)
        used = int(offsets[-1])
        x = draw((ids.numel() + (GUARD_ROWS if kind == "guarded" else 0), k), settings, generator)
        weight = scaled(experts * n, k, settings, generator).view(experts, n, k)
        if kind == "needle":
            sharpen(x, weight)
        x[used:] *= 1e3  # rows that are nobody's: nonsense first, so that writing them shows, then NaN
        x[used + (x.shape[0] - used) // 2 :] = float("nan")
        if kind != "random":
            forget_unused(weight, offsets)
        roles: Mapping[str, Any] = {"x": "activation", "weight": "weight", "offsets": "metadata"}
        return TensorInputs(shape, {"x": x, "weight": weight, "offsets": offsets.int()}, roles, settings.dtype)

    def terms(self, inputs: TensorInputs) -> int:
        return int(inputs.arguments["x"].shape[-1])

    def exact(self, inputs: TensorInputs) -> Outputs:
        given = inputs.arguments
        return (grouped(given["x"], given["weight"], given["offsets"], torch.float64),)

    def plain(self, inputs: TensorInputs) -> Outputs:
        given = inputs.arguments
        return (grouped(given["x"], given["weight"], given["offsets"], given["x"].dtype),)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        x, weight, offsets = (own.inputs.arguments[name] for name in self.arguments)
        expected, ends = own.expected[0], offsets[1:].long()
        used = int(ends[-1])
        short = expected.clone()
        short[ends[ends > 0] - 1] = 0.0
        found = {
            **super().wrong(own),
            "last row of each expert dropped": (short,),
            "last column not computed": (without_last(expected),),
            "a neighbour's weights": (grouped(x, weight.roll(1, dims=0), offsets, torch.float64).nan_to_num(),),
        }
        last = grouped(x[:, -1:], weight[..., -1:], offsets, torch.float64)
        found["last of k dropped"] = (expected - last,)
        if used > 1:
            late = (offsets + (offsets > 0).int() * (offsets < used).int()).clamp(max=used)
            found["offsets one row late"] = (grouped(x, weight, late, torch.float64).nan_to_num(),)
        if own.inputs.dtype in COARSER:
            coarse = COARSER[own.inputs.dtype]
            found["coarser numbers inside"] = (grouped(x.to(coarse), weight.to(coarse), offsets, torch.float64),)
        return found

    def judge_output(self, place: int, have: object, form: Tensor, against: TensorStandard) -> Judgement:
        limit, name = against.limits[place], self.names[place]
        problem = form_problem(have, form)
        if problem or not isinstance(have, Tensor):
            return Judgement(float("inf"), limit, f"{name}: {problem}")
        used = int(against.inputs.arguments["offsets"][-1])
        judgement = judge_rows(have[:used], against.expected[place][:used], limit, name)
        problem = guard_problem(have) or ("rows that are nobody's were written" if _written(have, used) else "")
        return Judgement(float("inf"), limit, f"{name}: {problem}") if judgement.ok and problem else judgement

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        def at(tokens: int, n: int, k: int, routing: str = "balanced") -> Resolved:
            return shape.with_axes(tokens=tokens, experts=8, top_k=2, n=n, k=k, routing=routing)

        return (
            *moe_edges(shape, n=40, k=72),
            Edge("misaligned", at(33, 111, 511), "needle"),
            Edge("misaligned, long groups", at(300, 72, 500, "zipf"), "needle"),
            Edge("every other expert empty, its weights NaN", at(33, 48, 64), "alternating"),
            Edge("guard rows beside an empty expert", at(33, 48, 64, "empty"), "guarded"),
            Edge("one row an expert at most", at(2, 48, 64), "guarded"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        x, weight, offsets = (inputs.arguments[name] for name in self.arguments)
        _, n, k = weight.shape
        used = int(offsets[-1])
        read = self.streamed_bytes(inputs) + used * k * x.element_size() + offsets.numel() * offsets.element_size()
        return Cost(2 * used * n * k, read, used * n * x.element_size())

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        """The weights of experts that have rows; nobody needs to read the others'."""
        weight = inputs.arguments["weight"]
        busy = int((inputs.arguments["offsets"].diff() > 0).sum())
        return int(busy * weight[0].numel() * weight.element_size())

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x, weight = inputs.arguments["x"], inputs.arguments["weight"]
        return (guarded(x.shape[0], weight.shape[1], x.dtype, x.device),)


class FusedMoe(TensorOp):
    """x `[tokens, hidden]`, logits `[tokens, experts]`, gate_up `[local, 2 * intermediate, hidden]`, down `[local,
    hidden, intermediate]`, expert_map `[experts]` int32, top_k → `[tokens, hidden]`.

    Each token goes to its `top_k` most probable experts; the answer is the sum of down · (silu(gate) * up), weighed by
    probabilities divided by their sum. `expert_map` gives the place of an expert's weights, -1 where the expert is not
    here: then it adds nothing. Logits of one token never tie, or the answer would be a matter of taste.
    """

    arguments: ClassVar[tuple[str, ...]] = ("x", "logits", "gate_up", "down", "expert_map", "top_k")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        experts, top_k = sizes(shape)
        hidden, intermediate = shape.integer("hidden"), shape.integer("intermediate")
        x = draw((shape.integer("tokens"), hidden), settings, generator)
        logits = ranked(scores(shape, generator)).to(settings.dtype)
        place = torch.arange(experts, dtype=torch.int32, device=settings.device)
        local = experts
        if kind in ("absent", "all absent"):
            here = place % 2 == 0 if kind == "absent" else place < 0
            place = torch.where(here, place // 2, ABSENT).int()
            local = max(1, int(here.sum()))
        gate_up = scaled(local * 2 * intermediate, hidden, settings, generator).view(local, 2 * intermediate, hidden)
        down = scaled(local * hidden, intermediate, settings, generator).view(local, hidden, intermediate)
        if kind == "unused":
            _, ids = route(logits.double(), top_k)
            _, offsets = by_expert(place[ids], local)
            forget_unused(gate_up, offsets)
            forget_unused(down, offsets)
        arguments = dict(zip(self.arguments, (x, logits, gate_up, down, place, top_k), strict=True))
        roles: Mapping[str, Any] = {
            "x": "activation",
            "logits": "activation",
            "gate_up": "weight",
            "down": "weight",
            "expert_map": "metadata",
            "top_k": "scalar",
        }
        return TensorInputs(shape, arguments, roles, settings.dtype)

    def redraw(self, inputs: TensorInputs, generator: torch.Generator) -> None:
        inputs.arguments["x"].normal_(generator=generator)
        logits = inputs.arguments["logits"]
        logits.copy_(ranked(scores(inputs.shape, generator)))

    def terms(self, inputs: TensorInputs) -> int:
        """Of both products, one after the other."""
        return int(inputs.arguments["x"].shape[-1] + inputs.arguments["down"].shape[-1])

    def exact(self, inputs: TensorInputs) -> Outputs:
        return (self._answer(inputs, torch.float64),)

    def plain(self, inputs: TensorInputs) -> Outputs:
        return (self._answer(inputs, inputs.dtype),)

    def _answer(self, inputs: TensorInputs, dtype: torch.dtype, wrong: str = "") -> Tensor:
        """The definition, expert by expert, every intermediate in `dtype`; or one of the wrong ideas about it."""
        x, logits, gate_up, down, place, top_k = (inputs.arguments[name] for name in self.arguments)
        weights, ids = route(logits.double(), top_k)
        if wrong == "experts weighed alike":
            weights = torch.full_like(weights, 1 / top_k)
        if wrong == "weights not normalised":
            weights = torch.softmax(logits.double(), dim=-1).gather(1, ids)
        if wrong == "the last expert of each token left out":
            weights[:, -1] = 0.0
        local = gate_up.shape[0]
        source, offsets = by_expert(place[ids], local)
        tokens, share = source // top_k, weights.reshape(-1)[source]
        answer = torch.zeros(x.shape, dtype=dtype, device=x.device)
        ends = offsets.tolist()
        for expert in range(local):
            rows = slice(ends[expert], ends[expert + 1])
            if rows.start == rows.stop:
                continue
            own = (expert + 1) % local if wrong == "a neighbour's weights" else expert
            gate, up = (x[tokens[rows]].to(dtype) @ gate_up[own].to(dtype).t()).chunk(2, dim=-1)
            if wrong == "gate and up swapped":
                gate, up = up, gate
            part = (torch.nn.functional.silu(gate) * up) @ down[own].to(dtype).t()
            answer.index_add_(0, tokens[rows], part * share[rows, None].to(dtype))
        return answer

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        experts, top_k = sizes(own.inputs.shape)
        ideas = ["gate and up swapped"]
        ideas += ["a neighbour's weights"] if experts > 1 else []
        ideas += ["weights not normalised"] if experts > top_k else []
        ideas += ["experts weighed alike", "the last expert of each token left out"] if top_k > 1 else []
        found = {idea: (self._answer(own.inputs, torch.float64, idea).nan_to_num(),) for idea in ideas}
        return {**super().wrong(own), **found}

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = moe_edges(shape, hidden=72, intermediate=40)
        odd = shape.with_axes(tokens=33, experts=8, top_k=2, hidden=500, intermediate=111, routing="balanced")
        alone = odd.with_axes(tokens=3, experts=16, hidden=64, intermediate=48)
        return (
            *small,
            Edge("misaligned", odd),
            Edge("unused experts' weights are NaN", alone, "unused"),
            Edge("six of seventy-two", odd.with_axes(tokens=3, experts=72, top_k=6, hidden=64, intermediate=32)),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        x, logits, gate_up, down = (inputs.arguments[name] for name in self.arguments[:4])
        rows = int(self._loads(inputs).sum())
        flops = 2 * rows * (gate_up[0].numel() + down[0].numel())
        size = x.numel() * x.element_size()
        return Cost(flops, self.streamed_bytes(inputs) + size + logits.numel() * logits.element_size(), size)

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        """The weights of experts that have rows."""
        gate_up, down = inputs.arguments["gate_up"], inputs.arguments["down"]
        busy = int((self._loads(inputs) > 0).sum())
        return int(busy * (gate_up[0].numel() + down[0].numel()) * gate_up.element_size())

    def _loads(self, inputs: TensorInputs) -> Tensor:
        logits, gate_up, place, top_k = (
            inputs.arguments[name] for name in ("logits", "gate_up", "expert_map", "top_k")
        )
        return by_expert(place[route(logits.double(), top_k)[1]], gate_up.shape[0])[1].diff()

    def outputs(self, inputs: TensorInputs) -> Outputs:
        x = inputs.arguments["x"]
        return (torch.empty(x.shape, dtype=x.dtype, device=x.device),)


def grouped(x: Tensor, weight: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """The definition in `dtype`, expert by expert; rows that are nobody's answer 0."""
    answer = torch.zeros((x.shape[0], weight.shape[1]), dtype=dtype, device=x.device)
    ends = offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(ends)):
        if stop > start:
            answer[start:stop] = x[start:stop].to(dtype) @ weight[expert].to(dtype).t()
    return answer


def forget_unused(weight: Tensor, offsets: Tensor) -> None:
    """The weights of experts without rows become NaN."""
    weight[offsets.diff() == 0] = float("nan")


def ranked(values: Tensor) -> Tensor:
    """Logits in the order of `values`, far enough apart to be told apart in half precision: no token has a tie."""
    experts = values.shape[-1]
    levels = torch.arange(experts, device=values.device, dtype=torch.float32)
    spread: Tensor = 1.5 * torch.special.ndtri((levels + 0.5) / experts)
    return spread[values.argsort(dim=-1).argsort(dim=-1)]


def _written(have: Tensor, used: int) -> bool:
    """Whether rows from `used` on of the memory that was given hold more than the one value that they held before."""
    rest = have[used:]
    if not is_guarded(have) or not rest.numel():
        return False
    first = rest.reshape(-1)[0]
    return not bool(((rest == first) | (rest.isnan() & first.isnan())).all())
