"""Whether a step is right: its logits and the attention of a layer of each kind, against the reference attention.

Owns the rule, which has two parts; in both the worst row decides.

1. *Attention of the first layer of each kind* (plain, or with this window): the relative L2 error per token and head
   against the reference computed in float32 from the same q, K and V is at most `max(ATTENTION_FLOORS[dtype],
   ATTENTION_FACTOR × the error of the reference in the dtype)`. One dropped page of hundreds shows here.
2. *Logits of the step*: the relative L2 distance to the reference step's logits is at most `max(LOGITS_FLOORS[dtype],
   LOGITS_FACTOR × sensitivity)`. The sensitivity is how far the reference step's own logits move (worst of DRAWS steps)
   when every attention output is changed at random by up to one unit of rounding of the dtype: what another order of
   sums may do, routing to other experts included. Two honest implementations differ by 1 to 2 sensitivities, with
   experts by up to 3.

What a rule declares stricter (`[rule.tolerance.DTYPE]`) lowers either bound.

A step whose attention returns zeros must fail, else the case cannot tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from kbench.catalog.tolerances import ATTENTION_FLOORS, LOGITS_FLOORS
from kbench.engine.runner import Runner
from kbench.kernels.base import Attention
from kbench.kernels.registry import load
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

ATTENTION_FACTOR = 1.5
LOGITS_FACTOR = 4.0
DRAWS = 4


@dataclass(frozen=True, slots=True)
class Judgement:
    """Relative L2 errors of the worst rows, and the bounds that they are held against."""

    error: float
    """Of the logits."""
    bound: float
    sensitivity: float
    null_error: float
    """Error of the logits of a step whose attention is zero."""
    attention_error: float
    attention_bound: float
    declared: Mapping[str, float] = field(default_factory=dict)
    """Bounds that the rule declares, by what they bound: `attention`, `logits`."""

    @property
    def correct(self) -> bool:
        return self.error <= self.bound and self.attention_error <= self.attention_bound  # False for NaN

    @property
    def discriminates(self) -> bool:
        return self.null_error > self.bound

    @property
    def problem(self) -> str:
        """What is wrong, in one line; only of use where something is."""
        if not self.attention_error <= self.attention_bound:
            what = f"attention of a layer is off by {self.attention_error:.2e}, bound {self.attention_bound:.2e}"
            declared = self.attention_bound == self.declared.get("attention")
        else:
            what = f"logits differ from the reference step by {self.error:.2e}, bound {self.bound:.2e}"
            declared = self.bound == self.declared.get("logits")
        return f"{what} (the bound is the rule's: rule.tolerance)" if declared else what


class _Wrapped:
    """An implementation whose calls something looks at; subclasses say what."""

    def __init__(self, inner: Attention) -> None:
        self._inner = inner
        self.name = inner.name

    def convert(self, kv: PagedKV) -> PagedKV:
        return self._inner.convert(kv)

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> object:
        return self._inner.plan(batch, spec, kv)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        return self._inner.run(q, kv, plan, out)


class _Changed(_Wrapped):
    """The reference with its outputs changed."""

    def __init__(self, inner: Attention, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inner)
        self._change = change

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        return self._change(self._inner.run(q, kv, plan, out))


class _Zeros(_Wrapped):
    """Attention that returns nothing but zeros."""

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        return out.zero_()


class _First(_Wrapped):
    """Keeps the output of the first layer of each kind, and what the reference makes in float32 of the same q, K, V.

    `known`: the latter where another step computed it, which is safe from what the implementation does to the cache.
    """

    def __init__(self, inner: Attention, reference: Attention, known: Mapping[AttentionSpec, Tensor]) -> None:
        super().__init__(inner)
        self._reference = reference
        self._known = known
        self._planned: list[tuple[object, AttentionBatch, AttentionSpec]] = []
        self._converted: tuple[PagedKV, PagedKV] | None = None
        self.outputs: dict[AttentionSpec, Tensor] = {}
        self.exact: dict[AttentionSpec, Tensor] = dict(known)

    def convert(self, kv: PagedKV) -> PagedKV:
        converted = self._inner.convert(kv)
        self._converted = (converted, kv)
        return converted

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> object:
        planned = self._inner.plan(batch, spec, kv)
        self._planned.append((planned, batch, spec))
        return planned

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        batch, spec = next((batch, spec) for planned, batch, spec in reversed(self._planned) if planned is plan)
        if spec in self.outputs:
            return self._inner.run(q, kv, plan, out)
        if spec not in self.exact:
            raw = self._converted[1] if self._converted is not None and self._converted[0] is kv else kv
            wide = PagedKV(raw.k.float(), raw.v.float(), raw.page_size, raw.layout)
            room = torch.empty_like(q, dtype=torch.float32)
            exact = self._reference.run(q.float(), wide, self._reference.plan(batch, spec, wide), room)
            self.exact[spec] = exact.clone()
        result = self._inner.run(q, kv, plan, out)
        self.outputs[spec] = result.clone()
        return result

    @property
    def error(self) -> float:
        """Of the worst row of all kinds; 0 where the step did not need this phase, NaN where a value is not finite."""
        nan = float("nan")
        return _worst(
            worst_row(self.outputs[spec], exact) if spec in self.outputs else nan for spec, exact in self.exact.items()
        )

    @property
    def independent(self) -> dict[AttentionSpec, Tensor]:
        """Exact answers of the very first layer: its q, K and V do not depend on who attends."""
        return dict(list(self.exact.items())[:1])


def _worst(errors: Iterable[float]) -> float:
    return max(errors, default=0.0, key=lambda error: float("inf") if error != error else error)


class Judge:
    """The reference of one step, computed once, and the rule for any other way to compute it."""

    def __init__(
        self,
        runner: Runner,
        step: Callable[[], object],
        draws: int = DRAWS,
        *,
        declared: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`step` runs the step from its starting state; logits are read from the runner.

        Fewer `draws` than usual make the bound no wider, and the check as much faster. `declared`: largest errors of
        `attention` and `logits` that a rule allows where they are below the bounds of this module.
        """
        self._runner = runner
        self._step = step
        references = (load("reference", "attention.decode"), load("reference", "attention.prefill"))
        generator = torch.Generator(runner.device).manual_seed(0)
        unit = torch.finfo(runner.decoder.dtype).eps / 2

        def rounded(out: Tensor) -> Tensor:
            noise = torch.rand(out.shape, generator=generator, device=out.device, dtype=torch.float32)
            return (out.float() * (1 + unit * (2 * noise - 1))).to(out.dtype)

        def changed(change: Callable[[Tensor], Tensor]) -> float:
            decode, prefill = (_Changed(reference, change) for reference in references)
            return worst_row(self._logits(decode, prefill), self.reference)

        self._references = references
        self._known: list[dict[AttentionSpec, Tensor]] = [{}, {}]
        self.reference, own_error = self._observed(references)
        sensitivity = max(changed(rounded) for _ in range(draws))
        dtype = str(runner.decoder.dtype).removeprefix("torch.")
        self._declared = declared
        self._sensitivity = sensitivity
        zeros = [_Zeros(reference) for reference in references]
        self._null = worst_row(self._logits(*zeros), self.reference)
        bound = max(LOGITS_FLOORS[dtype], LOGITS_FACTOR * sensitivity)
        attention_bound = max(ATTENTION_FLOORS[dtype], ATTENTION_FACTOR * own_error)
        self._bound = min(bound, declared.get("logits", bound))
        self._attention_bound = min(attention_bound, declared.get("attention", attention_bound))

    def _logits(self, decode: Attention, prefill: Attention) -> Tensor:
        own = self._runner.attention
        self._runner.use(decode, prefill)
        try:
            self._step()
        finally:
            self._runner.use(*own)
        return self._runner.last_logits.double()

    def _observed(self, phases: tuple[Attention, Attention]) -> tuple[Tensor, float]:
        """Logits of the step with these two, and the attention error of the worse one."""
        decode, prefill = map(_First, phases, self._references, self._known)
        logits = self._logits(decode, prefill)
        self._known = [decode.independent, prefill.independent]
        return logits, _worst((decode.error, prefill.error))

    def judge(self, logits: Tensor) -> Judgement:
        """Judge logits of the step, and the runner's own attention in one more step."""
        _, attention_error = self._observed(self._runner.attention)
        return Judgement(
            error=worst_row(logits, self.reference),
            bound=self._bound,
            sensitivity=self._sensitivity,
            null_error=self._null,
            attention_error=attention_error,
            attention_bound=self._attention_bound,
            declared=dict(self._declared),
        )


def worst_row(values: Tensor, reference: Tensor) -> float:
    """Largest relative L2 distance of a row (the last axis); NaN where any value is not finite."""
    if values.shape != reference.shape or not bool(torch.isfinite(values).all()):
        return float("nan")
    reference = reference.double()
    distance = (values.double() - reference).norm(dim=-1)
    return float((distance / reference.norm(dim=-1).clamp_min(1e-300)).max())
