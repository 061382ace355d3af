"""One config.json as a set of keys that somebody must have understood.

Owns typed access, its one-line errors, and the rule that no key is silently ignored: what nobody read and is not known
to leave the logits alone is refused by name. A null is a key that was not set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kbench.errors import UsageError

_NEUTRAL = """
_attn_implementation _name_or_path architectures attention_dropout auto_map begin_suppress_tokens bos_token_id
chunk_size_feed_forward dtype embd_pdrop eos_token_id finetuning_task gradient_checkpointing id2label initializer_range
is_decoder is_llama_config label2id max_window_layers output_attentions output_hidden_states output_router_logits
pad_token_id prefix pretraining_tp problem_type resid_pdrop return_dict router_aux_loss_coef router_jitter_noise
sep_token_id task_specific_params tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed
unsloth_version use_cache
"""
NEUTRAL = frozenset(_NEUTRAL.split())
"""Keys that change no logit of an inference: training, tokens, bookkeeping, memory."""


class Keys:
    """The keys of one object in a config.json. `prefix` names the object where it is not the whole file."""

    def __init__(self, values: dict[str, Any], file: str, prefix: str = "") -> None:
        self.file = file
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    @classmethod
    def of(cls, folder: Path) -> Keys:
        file = folder / "config.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UsageError(
                "no config.json", where=str(folder), remedy="name a Hugging Face checkpoint folder"
            ) from error
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot be read: {error}", where=str(file), remedy="copy the checkpoint again") from error
        if not isinstance(values, dict):
            raise UsageError("is not an object", where=str(file), remedy="copy the checkpoint again")
        return cls(values, str(file))

    def error(self, key: str, what: str, remedy: str) -> UsageError:
        return UsageError(f"{self._prefix}{key} {what}", where=self.file, remedy=remedy)

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands; `default` where the key is absent or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key has a value other than null."""
        return self._values.get(key) is not None

    def states(self, key: str) -> bool:
        """Whether the key is there, if only as null."""
        return key in self._values

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.raw(key, default)
        if value is None:
            raise self.error(key, "is missing", f"a whole number of {least} or more")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"is {value!r}", f"a whole number of {least} or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key, default)
        if value is None:
            raise self.error(key, "is missing", "a positive number")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(key, f"is {value!r}", "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}", "true or false")
        return value

    def must_be(self, key: str, allowed: Iterable[Any], default: Any) -> None:
        """Refuse any value but those that the decoder computes."""
        known = list(allowed)
        value = self.raw(key, default)
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
            raise self.error(key, f"{value!r} is not supported", " or ".join(map(json.dumps, known)))

    def object(self, key: str) -> Keys:
        """The object under `key`; an empty one where it is absent."""
        value = self.raw(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r}", "an object")
        return Keys(value, self.file, f"{self._prefix}{key}.")

    def refuse_unread(self, neutral: frozenset[str] = frozenset()) -> None:
        """UsageError for the first key that nobody asked for and that may change the logits."""
        for key, value in self._values.items():
            if key not in self._read and key not in neutral and value is not None:
                raise self.error(
                    key,
                    f"{json.dumps(value)[:60]} is not understood",
                    "remove the key if the computation does not depend on it, or use another checkpoint",
                )
