"""Sampling, step by step: penalties and a grammar's mask; top-k and top-p are `ops.truncation`. Logits in, logits out.

What is taken away is `-inf`, what is kept is unchanged to the bit. Rows that are `-inf` throughout stay so: that
nothing is left is the draw's to answer. Several answers are right where tokens are tied with the last one that is
kept, or where float32 sums cannot tell whether the mass is reached (`ops.support`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops import logits as made
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, Outputs, form_problem
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, judge_rows, limit_of, rows_cost

AWKWARD_VOCABULARIES = (1, 111, 32_000)
MINUS_INFINITY = float("-inf")


class LogitsOp(TensorOp):
    """Logits `[rows, vocab]` → logits of the same form."""

    names: ClassVar[tuple[str, ...]] = ("logits",)

    def redraw(self, inputs: TensorInputs, generator: torch.Generator) -> None:
        made.redraw_logits(inputs.arguments["logits"], generator)

    def plain(self, inputs: TensorInputs) -> Outputs:
        return tuple(value.to(inputs.dtype) for value in self.exact(inputs))

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=6, vocab=111)
        return (
            *(Edge(f"vocabulary {size}", shape.with_axes(rows=3, vocab=size)) for size in AWKWARD_VOCABULARIES),
            Edge("one row", shape.with_axes(rows=1)),
            Edge("no row", shape.with_axes(rows=0)),
            Edge("all but one token -inf", small, "single"),
            Edge("rows that are -inf throughout", small, "dead"),
            Edge("tied logits", small, "tied"),
            Edge("logits of ±1e4", small, "extreme"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        values = inputs.arguments["logits"]
        return rows_cost(values.numel(), inputs.having("activation", "metadata"), (values,))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        return (torch.empty_like(inputs.arguments["logits"]),)

    def read_only(self, inputs: TensorInputs) -> tuple[Tensor, ...]:
        return inputs.having("activation", "metadata")


class Penalties(LogitsOp):
    """logits, history int64 `[rows, history]` padded with the number `vocab`, prompt int32 `[rows]` (its first tokens),
    repetition, presence, frequency float32 `[rows]` → logits. Repetition counts prompt and generated tokens, the other
    two generated tokens only. Only the tokens of the history are judged with a tolerance; all others are exact."""

    arguments = ("logits", "history", "prompt", "repetition", "presence", "frequency")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        values = made.logits(shape, settings, kind, generator)
        rows = len(values)
        tokens, prompt = made.history(rows, shape, settings, generator)
        if kind == "padding":
            tokens.fill_(shape.integer("vocab"))
        arguments = {
            "logits": values,
            "history": tokens,
            "prompt": prompt,
            "repetition": made.mixed(made.filled(rows, 1.3, torch.float32, settings), 1.0, 0.8),
            "presence": made.mixed(made.filled(rows, 0.5, torch.float32, settings), 0.25),
            "frequency": made.mixed(made.filled(rows, 0.75, torch.float32, settings), -0.5),
        }
        return TensorInputs(shape, arguments, roles(arguments), settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        return (made.penalised(**_penalty_arguments(inputs)),)

    def standard(self, inputs: TensorInputs) -> TensorStandard:
        expected = self.exact(inputs)
        touched = _touched(inputs)
        plain = self.plain(inputs)[0]
        return TensorStandard(inputs, expected, (limit_of(_only(plain, touched), _only(expected[0], touched)),))

    def judge_output(self, place: int, have: object, form: Tensor, against: TensorStandard) -> Judgement:
        limit = against.limits[place]
        problem = form_problem(have, form)
        if problem or not isinstance(have, Tensor):
            return Judgement(float("inf"), limit, problem)
        return self._judge_values(have, against)

    def _judge_values(self, have: Tensor, against: TensorStandard) -> Judgement:
        touched, limit = _touched(against.inputs), against.limits[0]
        given = against.inputs.arguments["logits"]
        changed = ~touched & (have != given)
        if bool(changed.any()):
            row, token = (int(index) for index in changed.nonzero()[0])
            return Judgement(float("inf"), limit, f"token {token} of row {row} did not occur and was changed")
        return judge_rows(_only(have, touched), _only(against.expected[0], touched), limit, "penalised logits")

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        return self._judge_values(answer[0], own).ok

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        given = _penalty_arguments(own.inputs)
        values, tokens = given["values"], given["tokens"]
        longer = tokens.where(tokens < values.shape[1], values.shape[1] - 1)
        once = {**given, "presence": given["presence"] + given["frequency"], "frequency": given["frequency"] * 0}
        swapped = {"values": -values, "presence": -given["presence"], "frequency": -given["frequency"]}
        return {
            **super().wrong(own),
            "no penalty": (values,),
            "divided where negative": (-made.penalised(**{**given, **swapped}),),
            "prompt counted as generated": (made.penalised(**{**given, "prompt": given["prompt"] * 0}),),
            "frequency counted once": (made.penalised(**once),),
            "padding counted": (made.penalised(**{**given, "tokens": longer}),),
        }

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=6, vocab=111)
        more = (Edge("no history", small.with_axes(history=0)), Edge("only padding", small, "padding"))
        return (*super().edges(shape, settings), *more)


def _penalty_arguments(inputs: TensorInputs) -> dict[str, Tensor]:
    given = {name: inputs.arguments[name] for name in Penalties.arguments}
    return {"values": given.pop("logits").double(), "tokens": given.pop("history"), **given}


def _touched(inputs: TensorInputs) -> Tensor:
    values, tokens = inputs.arguments["logits"], inputs.arguments["history"]
    wide = torch.zeros((len(values), values.shape[1] + 1), dtype=torch.bool, device=values.device)
    return wide.scatter_(1, tokens, True)[:, :-1]


def _only(values: Tensor, touched: Tensor) -> Tensor:
    return torch.where(touched, values, torch.zeros_like(values))


def roles(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Logits and uniforms change from step to step; what requests ask for does not."""
    return {name: "activation" if name in ("logits", "uniform") else "metadata" for name in arguments}


class Mask(LogitsOp):
    """logits, bits int32 `[rows, ceil(vocab / 32)]` → logits, `-inf` where bit `t % 32` of word `t // 32` is 0."""

    arguments = ("logits", "bits")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        values = made.logits(shape, settings, kind, generator)
        bits = made.random_mask(len(values), shape, settings, generator, kind)
        arguments = {"logits": values, "bits": bits}
        return TensorInputs(shape, arguments, roles(arguments), settings.dtype)

    def exact(self, inputs: TensorInputs) -> Outputs:
        values = inputs.arguments["logits"].double()
        return (values.masked_fill(~made.allowed_tokens(inputs.arguments["bits"], values.shape[1]), MINUS_INFINITY),)

    def standard(self, inputs: TensorInputs) -> TensorStandard:
        return TensorStandard(inputs, self.exact(inputs), (0.0,))

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        values, bits = own.inputs.arguments["logits"].double(), own.inputs.arguments["bits"]
        allowed = made.allowed_tokens(bits, values.shape[1])
        backwards = made.allowed_tokens(bits, bits.shape[1] * made.WORD)
        backwards = backwards.reshape(len(bits), -1, made.WORD).flip(-1).reshape(len(bits), -1)[:, : values.shape[1]]
        short = allowed.clone()
        short[:, values.shape[1] // made.WORD * made.WORD :] = True
        models = {
            "mask inverted": ~allowed,
            "bits backwards": backwards,
            "one token late": allowed.roll(1, -1),
            "last word left out": short,
        }
        filled = {name: (values.masked_fill(~model, MINUS_INFINITY),) for name, model in models.items()}
        return {**super().wrong(own), "no mask": (values,), **filled}

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=6, vocab=111)
        return (*super().edges(shape, settings), Edge("only the last token allowed", small, "last"))
