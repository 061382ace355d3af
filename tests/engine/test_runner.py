"""The engine as a whole: the same greedy tokens whatever pages, chunks, cache and preemption do, and two at a time."""

from __future__ import annotations

import random

import pytest
import torch

from kbench.engine.core import EngineConfig, RequestStatus
from kbench.engine.phases import PHASES, PhaseClock
from kbench.engine.requests import Sampling, TokenContent
from kbench.engine.runner import Engine, Runner
from kbench.errors import UsageError
from kbench.ops.attention import AttentionBatch, AttentionSpec, PagedKV
from kbench.suite.schema import Arm, EngineSettings, ModelSettings

torch.set_num_threads(1)


def make_arm(**changes: object) -> Arm:
    keys = {
        "name": "arm",
        "model": ModelSettings(preset="tiny"),
        "engine": EngineSettings(kv_tokens=2_048, max_batched_tokens=256),
        "prefill": "reference",
        "decode": "reference",
        "page_size": 16,
        "layout": "NHD",
        "seed": 1,
        "root": ".",
    }
    return Arm.model_validate(keys | changes)


def prompts(count: int = 5, longest: int = 150, shared: int = 40) -> list[list[int]]:
    """Prompts of many lengths, none a multiple of a page; the later ones share a beginning."""
    draw = random.Random(4)
    head = [draw.randrange(512) for _ in range(shared)]
    lengths = [1, 7, 33, 101, longest][:count]
    made = [[draw.randrange(512) for _ in range(length)] for length in lengths]
    return [*made, *([*head, *tail] for tail in made[:3])]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """Each prompt alone in an engine without cache, chunks or pressure."""
    settings = EngineSettings(kv_tokens=2_048, max_batched_tokens=512, prefix_caching=False)
    return [Engine(make_arm(engine=settings), "cpu").generate([prompt], 20)[0] for prompt in prompts()]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("prefill", "decode"), [("reference", "reference"), ("sdpa", "sdpa-gather")])
def test_pages_layouts_and_backends_give_the_same_tokens(
    expected: list[tuple[int, ...]], page_size: int, layout: str, prefill: str, decode: str
) -> None:
    arm = make_arm(page_size=page_size, layout=layout, prefill=prefill, decode=decode)
    engine = Engine(arm, "cpu", poison=True)
    assert engine.generate(prompts(), 20) == expected


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_no_token(expected: list[tuple[int, ...]], page_size: int, caching: bool) -> None:
    settings = EngineSettings(kv_tokens=320, max_batched_tokens=256, prefix_caching=caching)
    engine = Engine(make_arm(page_size=page_size, engine=settings), "cpu", poison=True)
    assert engine.generate(prompts(), 20) == expected
    assert engine.scheduler.counters.preemptions > 0


@pytest.mark.parametrize("budget", [9, 64])
def test_chunked_prefill_changes_no_token(expected: list[tuple[int, ...]], budget: int) -> None:
    engine = Engine(make_arm(engine=EngineSettings(kv_tokens=2_048, max_batched_tokens=budget)), "cpu", poison=True)
    assert engine.generate(prompts(), 20) == expected


def test_the_prefix_cache_is_used_and_changes_no_token(expected: list[tuple[int, ...]]) -> None:
    engine = Engine(make_arm(), "cpu", poison=True)
    assert [engine.generate([prompt], 20)[0] for prompt in prompts()] == expected
    assert engine.scheduler.counters.hit_tokens == 2 * 32  # a shared head of 40 is two full pages of 16
    again = engine.add([*prompts()[4], *expected[4]], 5)
    while engine.has_work:
        engine.step()
    assert again.hit_tokens == 160  # 150 prompt tokens and the first generated ones, in full pages
    engine.reset()
    assert engine.generate([prompts()[4]], 20) == [expected[4]]
    assert engine.scheduler.counters.hit_tokens == 0


def test_two_engines_live_in_one_process(expected: list[tuple[int, ...]]) -> None:
    first = Engine(make_arm(), "cpu")
    second = Engine(make_arm(page_size=64, layout="HND", seed=2), "cpu")
    mine = [first.add(prompt, 20) for prompt in prompts()]
    for prompt in prompts():
        second.add(prompt, 20)
    while first.has_work or second.has_work:
        if first.has_work:
            first.step()
        if second.has_work:
            second.step()
    assert [request.content.output for request in mine] == expected  # type: ignore[attr-defined]


def test_draws_survive_preemption_and_batching() -> None:
    how = [Sampling(temperature=0.9, top_p=0.95, seed=index, repetition_penalty=1.1) for index in range(8)]
    roomy = Engine(make_arm(), "cpu").generate(prompts(), 20, how)
    settings = EngineSettings(kv_tokens=320, max_batched_tokens=64)
    tight = Engine(make_arm(engine=settings), "cpu")
    assert tight.generate(prompts(), 20, how) == roomy
    assert tight.scheduler.counters.preemptions > 0
    assert roomy != Engine(make_arm(), "cpu").generate(prompts(), 20)


def test_unused_slots_and_the_null_page_stay_poisoned() -> None:
    engine = Engine(make_arm(prefill="sdpa", decode="sdpa-gather"), "cpu", poison=True)
    for prompt in prompts():
        engine.add(prompt, 12)
    while engine.has_work:
        engine.step()
        assert torch.isfinite(engine.runner.last_logits).all()
    for layer in engine.runner.pool.layers:
        assert torch.isnan(layer.k[0]).all()
        assert torch.isnan(layer.v).any(dim=(1, 2, 3)).any()


def test_a_read_beyond_the_sequence_shows_in_the_logits() -> None:
    class ReadsOnePastTheEnd:
        name = "overread"

        def convert(self, kv: PagedKV) -> PagedKV:
            return kv

        def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> AttentionBatch:
            return batch

        def run(self, q: torch.Tensor, kv: PagedKV, plan: object, out: torch.Tensor) -> torch.Tensor:
            assert isinstance(plan, AttentionBatch)
            page = plan.block_table[0, plan.kv_lens[0] // kv.page_size]
            return q + kv.k[page, plan.kv_lens[0] % kv.page_size].mean()

    engine = Engine(make_arm(), "cpu", poison=True)
    engine.runner.use(ReadsOnePastTheEnd(), ReadsOnePastTheEnd())
    engine.add([1, 2, 3], 2)
    engine.step()
    assert torch.isnan(engine.runner.last_logits).all()


def test_an_implementation_that_converts_sees_the_new_tokens() -> None:
    from kbench.kernels.registry import load

    class Relayout:
        """Reads an HND copy of an NHD cache."""

        name = "relayout"

        def __init__(self) -> None:
            self.inner = load("reference", "attention.decode")

        def convert(self, kv: PagedKV) -> PagedKV:
            return PagedKV(kv.k.transpose(1, 2).contiguous(), kv.v.transpose(1, 2).contiguous(), kv.page_size, "HND")

        def plan(self, batch: AttentionBatch, spec: AttentionSpec, kv: PagedKV) -> object:
            assert kv.layout == "HND"
            return self.inner.plan(batch, spec, kv)

        def run(self, q: torch.Tensor, kv: PagedKV, plan: object, out: torch.Tensor) -> torch.Tensor:
            assert kv.layout == "HND"
            return self.inner.run(q, kv, plan, out)

    plain = Engine(make_arm(), "cpu").generate(prompts(3), 10)
    engine = Engine(make_arm(), "cpu", poison=True)
    engine.runner.use(Relayout(), Relayout())
    clock = PhaseClock()
    requests = [engine.add(prompt, 10) for prompt in prompts(3)]
    engine.step(clock)
    assert clock.take()["convert"] > 0
    while engine.has_work:
        engine.step()
    assert [request.content.output for request in requests] == plain  # type: ignore[attr-defined]


def test_a_phased_step_enters_every_phase_but_conversion_and_changes_no_token(expected: list[tuple[int, ...]]) -> None:
    engine = Engine(make_arm(), "cpu")
    clock = PhaseClock()
    request = engine.add(prompts()[3], 20)
    done = engine.step(clock)
    assert set(clock.take()) == set(PHASES) - {"convert"}
    assert len(done.tokens) == 1
    while engine.has_work:
        engine.step(clock)
    assert request.content.output == expected[3]  # type: ignore[attr-defined]


def test_abort_frees_the_pages_and_leaves_the_others_alone(expected: list[tuple[int, ...]]) -> None:
    engine = Engine(make_arm(), "cpu")
    kept, dropped = engine.add(prompts()[3], 20), engine.add(prompts()[4], 20)
    engine.step()
    engine.abort(dropped)
    while engine.has_work:
        engine.step()
    assert dropped.status is RequestStatus.ABORTED
    assert kept.content.output == expected[3]  # type: ignore[attr-defined]
    assert engine.scheduler.pool.in_use == 0


def test_what_cannot_run_is_a_usage_error() -> None:
    engine = Engine(make_arm(), "cpu")
    with pytest.raises(UsageError, match="token ids"):
        engine.add([512], 1)
    with pytest.raises(UsageError, match="token ids"):
        engine.add([], 1)
    with pytest.raises(UsageError, match="limit is"):
        engine.add([1], 200_000)
    with pytest.raises(UsageError, match="triton-paged cannot serve"):
        Engine(make_arm(decode="triton-paged"), "cpu")
    with pytest.raises(UsageError, match="eager"):
        Engine(make_arm(engine=EngineSettings(graph="graph"), prefill="reference", decode="reference"), "cpu")
    with pytest.raises(UsageError, match="no device"):
        Engine(make_arm(), "tpu")


def test_selection_and_configuration_are_the_arms() -> None:
    runner = Runner(make_arm(decode="blocked", prefill="sdpa"), "cpu", EngineConfig.from_arm(make_arm()))
    assert {phase: record.resolved for phase, record in runner.selection.items()} == {
        "decode": "blocked",
        "prefill": "sdpa",
    }
    assert runner.pool.pages == 2_048 // 16


def test_page_keys_chain_and_proofs_are_the_tokens() -> None:
    first = TokenContent(range(40), 16)
    same, other = TokenContent(range(40), 16), TokenContent([99, *range(1, 40)], 16)
    assert first.page_keys(0, 2) == same.page_keys(0, 2) == [first.page_key(0), first.page_key(1)]
    assert first.page_key(1) != other.page_key(1)  # the page is equal, its prefix is not
    assert first.page_proof(1) == other.page_proof(1) == tuple(range(16, 32))
    first.append(7)
    assert first.output == (7,)
    assert first.page_key(0) == same.page_key(0)
    longer = TokenContent(range(40), 16)
    for token in range(8):
        longer.append(token)
    assert longer.page_proof(2) == (*range(32, 40), *range(8))


class Noted:
    """A phase that notes those around it; it may be entered again and again."""

    def __init__(self, name: str, stack: list[str], seen: set[tuple[str, ...]]) -> None:
        self._name, self._stack, self._seen = name, stack, seen

    def __enter__(self) -> None:
        self._stack.append(self._name)
        self._seen.add(tuple(self._stack))

    def __exit__(self, *how: object) -> None:
        self._stack.pop()


@pytest.mark.parametrize(("how", "copied"), [(Sampling(), False), (Sampling(temperature=0.7), True)])
def test_the_copy_that_a_chain_works_on_is_a_phase_of_its_own(how: Sampling, copied: bool) -> None:
    stack: list[str] = []
    seen: set[tuple[str, ...]] = set()
    engine = Engine(make_arm(), "cpu")
    engine.add(prompts()[2], 2, how)
    engine.step(lambda name: Noted(name, stack, seen))
    assert (("sample", "logits_copy") in seen) == copied
    assert ("logits_copy",) in seen  # the tokens' way to the host
