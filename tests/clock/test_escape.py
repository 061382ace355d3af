from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from kbench.clock.escape import Escape, LateOutputs, escaped, late_output, same_bytes


class SideThread:
    """Returns at once; another thread fills the output when it may."""

    def __init__(self, out: Tensor) -> None:
        self.out = out
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._fill)

    def _fill(self) -> None:
        self._go.wait()
        self.out.fill_(1.0)

    def __call__(self) -> Tensor:
        self._thread.start()
        return self.out

    def come_to_rest(self) -> None:
        self._go.set()
        self._thread.join()


@pytest.mark.parametrize("poison", [float("nan"), -3.5])
def test_an_output_that_another_thread_fills_later_is_seen(poison: float) -> None:
    out = torch.empty(64)
    side = SideThread(out)
    assert late_output(side, lambda: out.fill_(poison), side.come_to_rest)


@pytest.mark.parametrize("answer", [lambda out: out, lambda out: (out, {"lse": out * 2}), lambda _: None])
def test_an_honest_call_is_not_accused(answer: object) -> None:
    out = torch.empty(64)

    def call() -> object:
        out.copy_(torch.full((64,), float("nan")))
        return answer(out)  # type: ignore[operator]

    assert not late_output(call, lambda: out.fill_(-3.5), lambda: None)


def test_each_late_output_is_named() -> None:
    outputs = [torch.zeros(4), torch.zeros(4), torch.zeros(4)]
    watch = LateOutputs()
    watch.take([outputs[0], outputs[1]])
    watch.take(outputs[2])
    assert watch.changed() == ()
    outputs[1][2] = 5.0
    outputs[2].resize_(0)
    assert watch.changed() == (1, 2)


def test_bytes_are_compared_not_values() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert same_bytes(strided, strided.clone())
    assert same_bytes(torch.zeros(0), torch.zeros(0)) and same_bytes(torch.tensor(1.0), torch.tensor(1.0))
    assert same_bytes(torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16))


def test_a_tail_must_exceed_the_hosts_own_reasons() -> None:
    assert not escaped(tail_us=25, idle_tail_us=6, stream_us=10)
    assert escaped(tail_us=40, idle_tail_us=6, stream_us=10)
    assert not escaped(tail_us=400, idle_tail_us=6, stream_us=10_000)
    assert Escape(20, 10, 100, 90, 5).flags == ("ASYNC_ESCAPE",)
    assert Escape(20, 1_000, 1_100, 12, 5).flags == ()
