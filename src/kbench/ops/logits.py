"""Logits and what a request says about sampling: the inputs that all sampling operations are made of.

Owns how they are drawn, kind by kind, and how they are drawn afresh. Kinds of logits: `random` (a normal distribution,
all 128 k tokens in play), `peaked` (a geometric distribution over a few dozen tokens), `same` (peaked, many rows of the
same logits), `tied` (four different values), `single` (all but one token masked with -inf), `dead` (every other row all
-inf), `extreme` (±1e4). It knows no operation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kbench.catalog import Resolved
from kbench.ops.base import InputSettings

SCALE = 2.5
"""Standard deviation of random logits."""
PEAKED, SAME = 0.7, 0.9
"""Ratio of a token's probability to the next larger one's."""
LOWEST = -1e4
SAME_ELEMENTS = {"cuda": 1 << 25, "cpu": 1 << 18}
SAME_ROWS = (64, 1_024)
"""Rows of `same`: as many as so many logits make, within bounds."""
WORD = 32
"""Tokens a word of a bit mask."""


def rows_of(shape: Resolved, kind: str, device: torch.device) -> int:
    if kind != "same":
        return shape.integer("rows")
    least, most = SAME_ROWS
    return max(least, min(most, SAME_ELEMENTS.get(device.type, SAME_ELEMENTS["cpu"]) // shape.integer("vocab")))


def logits(shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator) -> Tensor:
    """`[rows, vocab]` in the case's dtype."""
    device, vocab = settings.device, shape.integer("vocab")
    rows = rows_of(shape, kind, device)
    if kind in ("peaked", "same"):
        heads = 1 if kind == "same" else rows
        ratio = SAME if kind == "same" else PEAKED
        places = torch.rand((heads, vocab), generator=generator, device=device).argsort(dim=-1)
        values = (places * math.log(ratio)).clamp_min(LOWEST).expand(rows, vocab)
    elif kind == "tied":
        values = torch.randint(0, 4, (rows, vocab), generator=generator, device=device).float()
    else:
        values = torch.randn((rows, vocab), generator=generator, device=device) * SCALE
    if kind == "extreme":
        values = values.sign() * 1e4
    values = values.to(settings.dtype).contiguous()
    if kind == "single":
        chosen = torch.randint(0, vocab, (rows, 1), generator=generator, device=device)
        kept = values.gather(1, chosen)
        values.fill_(float("-inf")).scatter_(1, chosen, kept)
    if kind == "dead":
        values[::2] = float("-inf")
    return values


def redraw_logits(values: Tensor, generator: torch.Generator) -> None:
    values.normal_(std=SCALE, generator=generator)


def uniforms(rows: int, settings: InputSettings, generator: torch.Generator) -> Tensor:
    """float32 `[rows]` in [0, 1)."""
    return torch.rand((rows,), generator=generator, device=settings.device)


def filled(rows: int, value: float, dtype: torch.dtype, settings: InputSettings) -> Tensor:
    """A parameter that every row's request has alike."""
    return torch.full((rows,), value, dtype=dtype, device=settings.device)


def mixed_k(k: Tensor, vocab: int) -> Tensor:
    """Rows that ask for different k: as given, off, one, more than there are tokens, all but one."""
    choice = torch.tensor([int(k[0]) if len(k) else 1, 0, 1, vocab + 3, max(1, vocab - 1)], device=k.device)
    return choice[torch.arange(len(k), device=k.device) % len(choice)].to(k.dtype)


def mixed(values: Tensor, *others: float) -> Tensor:
    """Rows that ask for different values of a parameter: the given one, then each of the others."""
    choice = torch.tensor([0.0, *others], dtype=values.dtype, device=values.device)
    place = torch.arange(len(values), device=values.device) % len(choice)
    return torch.where(place == 0, values, choice[place])


REPEATED = 4
"""Tokens that half of a history repeats."""


def history(
    rows: int,
    shape: Resolved,
    settings: InputSettings,
    generator: torch.Generator,
    *,
    same: bool = False,
    likely: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens so far, int64 `[rows, history]`, and how many of them were the prompt, int32 `[rows]`.

    Half of each row repeats a few tokens; the last eighth is padding, which is the number `vocab`. `likely`, logits
    `[rows, vocab]`: what is repeated are their largest, as in a text that goes in circles; without, penalties would
    fall on tokens that nobody draws from a large vocabulary, and leaving them out would change no answer.
    """
    vocab, length = shape.integer("vocab"), shape.integer("history")
    heads = 1 if same and rows else rows
    tokens = torch.randint(0, vocab, (heads, length), generator=generator, device=settings.device)
    often = torch.randint(0, vocab, (heads, REPEATED), generator=generator, device=settings.device)
    if likely is not None and vocab >= REPEATED:
        often = likely[:heads].topk(REPEATED, dim=-1).indices
    repeats = torch.randint(0, REPEATED, (heads, length), generator=generator, device=settings.device)
    tokens[:, ::2] = often.gather(1, repeats)[:, ::2]
    if length >= 8:
        tokens[:, length - length // 8 :] = vocab
    prompt = torch.full((rows,), length // 3, dtype=torch.int32, device=settings.device)
    return tokens.expand(rows, length).contiguous(), prompt


def bit_mask(allowed: Tensor) -> Tensor:
    """int32 `[rows, ceil(vocab / 32)]`: bit `t % 32` of word `t // 32` says whether token `t` is allowed."""
    rows, vocab = allowed.shape
    padded = torch.nn.functional.pad(allowed, (0, -vocab % WORD)).reshape(rows, -(-vocab // WORD), WORD).long()
    words = (padded << torch.arange(WORD, device=allowed.device)).sum(dim=-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def allowed_tokens(bits: Tensor, vocab: int) -> Tensor:
    """bool `[rows, vocab]` of a bit mask."""
    spread = (bits[:, :, None] >> torch.arange(WORD, dtype=torch.int32, device=bits.device)) & 1
    return spread.reshape(len(bits), bits.shape[1] * WORD)[:, :vocab].bool()


def random_mask(rows: int, shape: Resolved, settings: InputSettings, generator: torch.Generator, kind: str) -> Tensor:
    """A grammar's mask: each token allowed with the probability `allowed`, at least one; none in every other row of
    `dead`; only the last token in `last`; the same in all rows of `same`."""
    vocab, heads = shape.integer("vocab"), 1 if kind == "same" else rows
    allowed = torch.rand((heads, vocab), generator=generator, device=settings.device) < shape.number("allowed")
    sure = torch.randint(0, vocab, (heads, 1), generator=generator, device=settings.device)
    allowed.scatter_(1, sure, True)
    if kind == "last":
        allowed[:, :-1], allowed[:, -1] = False, True
    allowed = allowed.expand(rows, vocab).clone()
    if kind == "dead":
        allowed[1::2] = False
    return bit_mask(allowed)


def penalised(
    values: Tensor, tokens: Tensor, prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The definition of penalties, in the dtype of `values`: a token that occurred has its logit divided by the
    repetition penalty where it is positive and multiplied where it is not; one that was generated loses the presence
    penalty once and the frequency penalty for every time."""
    vocab = values.shape[1]
    generated = torch.arange(tokens.shape[1], device=tokens.device) >= prompt[:, None]
    counts = torch.zeros((len(values), vocab + 1), dtype=torch.int64, device=values.device)
    seen = counts.scatter_add(1, tokens, torch.ones_like(tokens))[:, :vocab]
    times = counts.scatter_add(1, tokens, generated.long())[:, :vocab]
    factor, once, each = (own[:, None].to(values.dtype) for own in (repetition, presence, frequency))
    repeated = torch.where(values > 0, values / factor, values * factor)
    result = torch.where(seen > 0, repeated, values)
    return result - each * times.to(values.dtype) - once * (times > 0).to(values.dtype)
