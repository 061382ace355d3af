"""Drawing the next token: from logits at a temperature, and the whole chain in front of it.

A draw gets its uniforms as an argument, so an answer can be checked: it is the first token, in the order of ids, whose
cumulative mass exceeds the uniform's share of the total. An implementation that has a generator of its own says
`own_generator = True`; it ignores the uniforms and is held to the support (hard) and to a chi-square test on many rows
of the same logits (soft, `ops.support.ALPHA`). Temperature 0 answers a largest token, any of those that are tied. A row
in which every token is masked answers `NO_TOKEN` (-1): the caller must end that sequence. Logits hold no NaN and no
+inf. Top-p is of the mass that top-k left, at the temperature.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops import logits as made
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, Outputs, Steps, form_problem, tensors_of
from kbench.ops.filters import AWKWARD_VOCABULARIES, MINUS_INFINITY, Penalties, roles
from kbench.ops.support import Support, draw_problem, inverse_cdf, support
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard, rows_cost

OWN_GENERATOR = "own generator"
"""What follows the tokens in an answer whose uniforms nobody knows."""
ROUNDED = 2e-6
"""Penalised logits are tied where float32 cannot tell, as a share of the row's largest magnitude."""


@dataclass(frozen=True, slots=True)
class DrawStandard(TensorStandard):
    own: Support


class Draw(TensorOp):
    """logits, temperature float32 `[rows]`, uniform float32 `[rows]` → tokens int64 `[rows]`."""

    arguments: ClassVar[tuple[str, ...]] = ("logits", "temperature", "uniform")
    names = ("tokens",)
    kinds = ("random", "peaked", "same")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        values = made.logits(shape, settings, kind, generator)
        rows = len(values)
        temperature = made.filled(rows, shape.number("temperature"), torch.float32, settings)
        if kind == "mixed":
            temperature = made.mixed(temperature, 0.0, 0.3, 2.0)
        arguments = {
            "logits": values,
            "temperature": temperature,
            "uniform": _extremes(made.uniforms(rows, settings, generator), kind),
        }
        return TensorInputs(shape, arguments, roles(arguments), settings.dtype)

    def redraw(self, inputs: TensorInputs, generator: torch.Generator) -> None:
        made.redraw_logits(inputs.arguments["logits"], generator)
        inputs.arguments["uniform"].uniform_(generator=generator)

    def values(self, inputs: TensorInputs, **changed: Any) -> Tensor:
        """float64 logits after everything in front of top-k."""
        values: Tensor = inputs.arguments["logits"]
        return values.double()

    def support(self, inputs: TensorInputs, **changed: Any) -> Support:
        """Which tokens can be drawn; `changed` arguments make wrong models."""
        values = self.values(inputs, **changed)
        temperature = {**inputs.arguments, **changed}["temperature"]
        ones = torch.ones_like(temperature)
        return support(values, ones.to(torch.int32) * 0, ones, temperature)

    def exact(self, inputs: TensorInputs) -> Outputs:
        return (inverse_cdf(self.support(inputs), inputs.arguments["uniform"]),)

    def plain(self, inputs: TensorInputs) -> Outputs:
        return self.exact(inputs)

    def standard(self, inputs: TensorInputs) -> TensorStandard:
        own = self.support(inputs)
        return DrawStandard(inputs, (inverse_cdf(own, inputs.arguments["uniform"]),), (0.0,), own)

    def bind(self, implementation: Any, inputs: TensorInputs) -> Steps:
        steps = super().bind(implementation, inputs)
        if not getattr(implementation, "own_generator", False):
            return steps

        def run(state: Any, plan: Any, out: Outputs) -> Any:
            return (next(tensors_of(steps.run(state, plan, out)), None), OWN_GENERATOR)

        return Steps(steps.convert, steps.plan, run)

    def repeats(self, answer: object) -> bool:
        return not _own_generator(answer)

    def judge(self, answer: object, against: TensorStandard) -> Judgement:
        own_generator = _own_generator(answer)
        first = answer[0] if own_generator and isinstance(answer, tuple) else answer
        if isinstance(first, tuple | list) and len(first) == 1:
            first = first[0]
        problem = form_problem(first, self.forms(against.inputs)[0])
        if not problem and isinstance(first, Tensor):
            problem = self._problem(first, against, own_generator)
        return Judgement(float("inf") if problem else 0.0, 0.0, problem)

    def _problem(self, tokens: Tensor, against: TensorStandard, own_generator: bool = False) -> str:
        assert isinstance(against, DrawStandard)
        return draw_problem(tokens, against.own, None if own_generator else against.inputs.arguments["uniform"])

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        return not self._problem(answer[0], own)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        assert isinstance(own, DrawStandard)
        inputs, uniform = own.inputs, own.inputs.arguments["uniform"]
        one = torch.ones_like(uniform)
        tokens = own.expected[0]
        # Without a temperature there is one end: any of the largest is right.
        other_end = inverse_cdf(own.own, (1.0 - uniform).clamp_max(1 - 1e-7))
        other_end = torch.where(inputs.arguments["temperature"] == 0, tokens, other_end)
        models = {
            **super().wrong(own),
            "always the largest": (inverse_cdf(self.support(inputs, temperature=one * 0), uniform),),
            "temperature left out": (inverse_cdf(self.support(inputs, temperature=one), uniform),),
            "from the other end": (other_end,),
            "one token on": (torch.where(tokens < 0, tokens, (tokens + 1) % own.own.mass.shape[1]),),
        }
        return models

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=6, vocab=111)
        return (
            *(Edge(f"vocabulary {size}", shape.with_axes(rows=3, vocab=size)) for size in AWKWARD_VOCABULARIES),
            Edge("one row", shape.with_axes(rows=1)),
            Edge("no row", shape.with_axes(rows=0)),
            Edge("all but one token -inf", small, "single"),
            Edge("rows that are -inf throughout", small, "dead"),
            Edge("tied logits", small, "tied"),
            Edge("tied logits, greedy", small.with_axes(temperature=0.0), "tied"),
            Edge("logits of ±1e4", small, "extreme"),
            Edge("greedy", small.with_axes(temperature=0.0)),
            Edge("rows of different temperature", small, "mixed"),
            Edge("uniforms 0 and almost 1", small, "ends"),
        )

    def cost(self, inputs: TensorInputs) -> Cost:
        values = inputs.arguments["logits"]
        read = tuple(value for value in inputs.arguments.values() if isinstance(value, Tensor))
        return rows_cost(3 * values.numel(), read, self.outputs(inputs))

    def outputs(self, inputs: TensorInputs) -> Outputs:
        values = inputs.arguments["logits"]
        return (torch.empty((len(values),), dtype=torch.int64, device=values.device),)


class Chain(Draw):
    """Penalties, mask, temperature, top-k, top-p, draw: the arguments of each, in float32 or better between them."""

    arguments = (*Penalties.arguments, "bits", "temperature", "k", "p", "uniform")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        base = super().make(shape, settings, kind, generator).arguments
        values = base["logits"]
        rows, vocab, different = len(values), values.shape[1], kind == "mixed"
        likely = values if kind in ("peaked", "same") else None
        tokens, prompt = made.history(rows, shape, settings, generator, same=kind == "same", likely=likely)
        k = made.filled(rows, shape.integer("k"), torch.int32, settings)
        p = made.filled(rows, shape.number("p"), torch.float32, settings)
        arguments = {
            "logits": values,
            "history": tokens,
            "prompt": prompt,
            "repetition": made.filled(rows, 1.3, torch.float32, settings),
            "presence": made.filled(rows, 0.5, torch.float32, settings),
            "frequency": made.filled(rows, 0.25, torch.float32, settings),
            "bits": made.random_mask(rows, shape, settings, generator, kind),
            "temperature": base["temperature"],
            "k": made.mixed_k(k, vocab) if different else k,
            "p": made.mixed(p, 1.0, 0.1) if different else p,
            "uniform": base["uniform"],
        }
        return TensorInputs(shape, arguments, roles(arguments), settings.dtype)

    def values(self, inputs: TensorInputs, **changed: Any) -> Tensor:
        given = {**inputs.arguments, **changed}
        names = [name for name in Penalties.arguments if name != "logits"]
        values = made.penalised(given["logits"].double(), *(given[name] for name in names))
        return values.masked_fill(~made.allowed_tokens(given["bits"], values.shape[1]), MINUS_INFINITY)

    def support(self, inputs: TensorInputs, **changed: Any) -> Support:
        given = {**inputs.arguments, **changed}
        return support(self.values(inputs, **changed), given["k"], given["p"], given["temperature"], slack=ROUNDED)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        given = own.inputs.arguments
        changes = {
            "penalties left out": {"history": torch.full_like(given["history"], given["logits"].shape[1])},
            "mask left out": {"bits": torch.full_like(given["bits"], -1)},
            "top-k left out": {"k": torch.zeros_like(given["k"])},
            "top-p left out": {"p": torch.ones_like(given["p"])},
        }
        models = {
            name: (inverse_cdf(self.support(own.inputs, **change), given["uniform"]),)
            for name, change in changes.items()
        }
        return {**super().wrong(own), **models}

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        small = shape.with_axes(rows=6, vocab=111)
        more = (
            Edge("k beyond the vocabulary", small.with_axes(k=112)),
            Edge("k of 1", small.with_axes(k=1)),
            Edge("k and p off", small.with_axes(k=0, p=1.0)),
            Edge("k off", small.with_axes(k=0)),
            Edge("k off, tied", small.with_axes(k=0), "tied"),
            Edge("k off, peaked", small.with_axes(k=0, vocab=3_000), "peaked"),
            Edge("k off, p of 0", small.with_axes(k=0, p=0.0)),
            Edge("no history", small.with_axes(history=0)),
            Edge("only the last token allowed", small, "last"),
        )
        return (*super().edges(shape, settings), *more)


def _extremes(uniform: Tensor, kind: str) -> Tensor:
    if kind == "ends":
        uniform[::2], uniform[1::2] = 0.0, 1.0 - 2.0**-24
    return uniform


def _own_generator(answer: object) -> bool:
    return isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], str) and answer[1] == OWN_GENERATOR
