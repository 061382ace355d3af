"""What of the process changes, and what is only unknown."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kbench.clock import surroundings
from kbench.clock.surroundings import Surroundings

CPU = torch.device("cpu")


def test_a_changed_precision_is_named_and_an_unreadable_limit_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Surroundings.of(CPU)
    assert before.persisting_l2_bytes is None
    assert before.changed(CPU) == []
    reserved = replace(before, persisting_l2_bytes=8 << 20)
    assert reserved.changed(CPU) == [], "what cannot be read now is unknown, not given back"
    monkeypatch.setattr(surroundings, "_persisting_l2_bytes", lambda device: 11 << 20)
    assert replace(before, persisting_l2_bytes=0).changed(torch.device("cuda")) == ["persisting_l2_bytes 0 → 11534336"]
    assert before.changed(torch.device("cuda")) == []


def test_threads_count() -> None:
    assert replace(Surroundings.of(CPU), threads=999).changed(CPU)[0].startswith("threads 999 →")
