"""The content of real requests: token ids, chained page keys over them, and how to sample.

Owns what the prefix cache asks of a request with known tokens, and the sampling parameters. It does not know pages,
models or the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from kbench.errors import UsageError

_ROOT = b"kbench.tokens/1"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's next token is chosen. The defaults are greedy."""

    temperature: float = 0.0
    """0: greedy; penalties and the mask apply to greedy choices too."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probability reaches this."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens seen in prompt or output are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from every token of the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    allowed: frozenset[int] = frozenset()
    """Only these tokens may be chosen; empty: all may."""
    banned: frozenset[int] = frozenset()
    """These tokens may not be chosen."""
    seed: int = 0
    """With the token's position it fixes the draw: preemption and batching do not change it."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or self.repetition_penalty <= 0:
            raise UsageError(
                f"sampling: temperature {self.temperature}, top_k {self.top_k}, top_p {self.top_p}, "
                f"repetition_penalty {self.repetition_penalty}",
                remedy="temperature and top_k from 0, 0 < top_p <= 1, repetition_penalty above 0",
            )

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def masked(self) -> bool:
        return bool(self.allowed or self.banned)

    @property
    def plain(self) -> bool:
        """Greedy without penalties or mask: one argmax."""
        return self.temperature == 0.0 and not self.penalised and not self.masked


GREEDY = Sampling()


class TokenContent:
    """Token ids of one request, prompt and output so far, and the page keys over them."""

    __slots__ = ("_keys", "page_size", "prompt_tokens", "sampling", "tokens")

    def __init__(self, prompt: Sequence[int], page_size: int, sampling: Sampling = GREEDY) -> None:
        self.tokens: list[int] = [int(token) for token in prompt]
        self.prompt_tokens = len(self.tokens)
        self.page_size = page_size
        self.sampling = sampling
        self._keys: list[bytes] = []

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.prompt_tokens :])

    def append(self, token: int) -> None:
        """Add one generated token."""
        self.tokens.append(token)

    def truncate(self, tokens: int, pages: int) -> None:
        """Keep the first `tokens` tokens and the keys of the first `pages` pages: the way back to an earlier state."""
        del self.tokens[tokens:]
        del self._keys[pages:]

    def page_key(self, index: int) -> bytes:
        """Chained digest of pages 0 to `index`: equal keys mean equal prefixes, up to a collision."""
        while len(self._keys) <= index:
            page = len(self._keys)
            digest = blake2b(self._keys[-1] if page else _ROOT, digest_size=16)
            digest.update(array("q", self.page_proof(page)).tobytes())
            self._keys.append(digest.digest())
        return self._keys[index]

    def page_keys(self, start: int, stop: int) -> list[Hashable]:
        if stop > start:
            self.page_key(stop - 1)
        return list(self._keys[start:stop])

    def page_proof(self, index: int) -> tuple[int, ...]:
        """The page's own tokens; the prefix before it was proven page by page."""
        return tuple(self.tokens[index * self.page_size : (index + 1) * self.page_size])
