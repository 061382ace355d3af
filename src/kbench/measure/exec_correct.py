"""Whether a step is right: its logits and its first layer's attention, against the reference attention.

Owns the rule, which has two parts; in both the worst row decides.

1. *Attention of the first layer*, where all implementations see the same q, K and V: the relative L2 error per token
   and head against the reference computed in float32 is at most `max(ATTENTION_FLOOR[dtype], ATTENTION_FACTOR × the
   error of the reference in the dtype)`. One dropped page of hundreds shows here.
2. *Logits of the step*: the relative L2 distance to the reference step's logits is at most `max(LOGITS_FLOOR[dtype],
   LOGITS_FACTOR × sensitivity)`. The sensitivity is how far the reference step's own logits move (worst of DRAWS steps)
   when every attention output is changed at random by up to one unit of rounding of the dtype: what another order of
   sums may do, routing to other experts included. Two honest implementations differ by 1 to 2 sensitivities, with
   experts by up to 3.

A step whose attention returns zeros must fail, else the case cannot tell right from wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kbench.engine.runner import Runner
from kbench.kernels.base import Attention
from kbench.kernels.registry import load
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV

ATTENTION_FLOOR = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ATTENTION_FACTOR = 1.5
LOGITS_FLOOR = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 8e-3}
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
            what = (
                f"attention of the first layer is off by {self.attention_error:.2e}, bound {self.attention_bound:.2e}"
            )
        else:
            what = f"logits differ from the reference step by {self.error:.2e}, bound {self.bound:.2e}"
        return what


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


class _First(_Wrapped):
    """Keeps the output of the first layer; of the reference also what float32 makes of the same q, K and V."""

    def __init__(self, inner: Attention, *, exactly: bool = False) -> None:
        super().__init__(inner)
        self._exactly = exactly
        self._batch: tuple[AttentionBatch, AttentionSpec] | None = None
        self.output: Tensor | None = None
        self.exact: Tensor | None = None

    def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> object:
        self._batch = (batch, spec)
        return self._inner.plan(batch, spec, kv)

    def run(self, q: Tensor, kv: PagedKV, plan: object, out: Tensor) -> Tensor:
        result = self._inner.run(q, kv, plan, out)
        if self.output is None:
            self.output = result.clone()
            if self._exactly and self._batch is not None:
                wide = PagedKV(kv.k.float(), kv.v.float(), kv.page_size, kv.layout)
                planned = self._inner.plan(*self._batch, wide)
                self.exact = self._inner.run(q.float(), wide, planned, torch.empty_like(q, dtype=torch.float32)).clone()
        return result


class Judge:
    """The reference of one step, computed once, and the rule for any other way to compute it."""

    def __init__(self, runner: Runner, step: Callable[[], object]) -> None:
        """`step` runs the step from its starting state; logits are read from the runner."""
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

        decode, prefill = (_First(reference, exactly=True) for reference in references)
        self.reference = self._logits(decode, prefill)
        self._exact = (decode.exact, prefill.exact)
        own_error = _attention_error((decode, prefill), self._exact)
        sensitivity = max(changed(rounded) for _ in range(DRAWS))
        dtype = runner.decoder.dtype
        self._sensitivity = sensitivity
        self._null = changed(torch.zeros_like)
        self._bound = max(LOGITS_FLOOR[dtype], LOGITS_FACTOR * sensitivity)
        self._attention_bound = max(ATTENTION_FLOOR[dtype], ATTENTION_FACTOR * own_error)

    def _logits(self, decode: Attention, prefill: Attention) -> Tensor:
        own = self._runner.attention
        self._runner.use(decode, prefill)
        try:
            self._step()
        finally:
            self._runner.use(*own)
        return self._runner.last_logits.double()

    def judge(self, logits: Tensor) -> Judgement:
        """Judge logits of the step, and the runner's own attention in one more step."""
        decode, prefill = (_First(implementation) for implementation in self._runner.attention)
        self._logits(decode, prefill)
        return Judgement(
            error=worst_row(logits, self.reference),
            bound=self._bound,
            sensitivity=self._sensitivity,
            null_error=self._null,
            attention_error=_attention_error((decode, prefill), self._exact),
            attention_bound=self._attention_bound,
        )


def _attention_error(found: tuple[_First, _First], exact: tuple[Tensor | None, Tensor | None]) -> float:
    errors = []
    for part, right in zip(found, exact, strict=True):
        if right is not None:
            errors.append(worst_row(part.output, right) if part.output is not None else float("nan"))
    return max(errors, key=lambda error: float("inf") if error != error else error)


def worst_row(values: Tensor, reference: Tensor) -> float:
    """Largest relative L2 distance of a row (the last axis); NaN where any value is not finite."""
    if values.shape != reference.shape or not bool(torch.isfinite(values).all()):
        return float("nan")
    reference = reference.double()
    distance = (values.double() - reference).norm(dim=-1)
    return float((distance / reference.norm(dim=-1).clamp_min(1e-300)).max())
