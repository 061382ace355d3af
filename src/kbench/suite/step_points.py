"""What the points of `[step]` mean for a suite's arms, and which of them cannot be measured.

Owns the attributes' effect on an arm and the checks of every point before anything is measured, both arms alike. What
an attribute makes of a batch's pages and requests is `measure.exec_batch`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kbench import catalog
from kbench.catalog import ModelShape, Point, Shape, StepAttributes, declared_visits, parse_shape, parse_step
from kbench.catalog.lengths import UNIT, shared_tokens, tailed
from kbench.errors import UsageError
from kbench.suite.choices import attention_queries, objections
from kbench.suite.schema import Arm, Suite

KeyPath = tuple[str | int, ...]
Found = tuple[KeyPath, str, str]
Said = tuple[str, str]


def attributed(arm: Arm, attributes: StepAttributes) -> Arm:
    """The arm as a step case asks for it: its page size and its launches replaced where attributes name them."""
    changes: dict[str, object] = {}
    if attributes.page:
        changes["page_size"] = attributes.page
    if attributes.graph != "auto":
        mode = "graph" if attributes.graph == "on" else "eager"
        changes["engine"] = arm.engine.model_copy(update={"graph": mode})
    return arm.model_copy(update=changes) if changes else arm


def step_problems(suite: Suite, arms: Sequence[Arm], model: ModelShape | None, root: Path) -> Iterator[Found]:
    """Points that cannot be measured. `arms`: baseline and candidate, as far as they resolve; `model`: if known."""
    for index, text in enumerate(suite.kernel.points if suite.kernel else ()):
        shape = parse_shape(text)
        bare = shape.point is None or shape.point == shape.point.bare
        if shape.attributes != catalog.PLAIN or not bare:
            what = f"{text}: attributes, chunks and drafts are a step's; a kernel computes on lengths"
            yield ("kernel", "points", index), what, "write the batch alone, and the rest under [step]"
    for index, text in enumerate(suite.step.points if suite.step else ()):
        shape = parse_step(text)
        assert shape.point is not None
        for what, remedy in _said(shape, shape.point, arms, model, root):
            yield ("step", "points", index), f"{text}: {what}", remedy


def _said(shape: Shape, point: Point, arms: Sequence[Arm], model: ModelShape | None, root: Path) -> Iterator[Said]:
    yield from _sequences(point, arms)
    yield from _pages(shape.attributes, arms)
    yield from _lengths(shape.attributes, point, arms)
    if model is None:
        return
    if point.context > model.max_context:
        yield f"a context of {point.context:,} tokens", f"{model.name} takes up to {model.max_context:,}"
    yield from _experts(shape.attributes, model, root)
    for arm in arms:
        yield from _served(shape, point, arm, model)


def _sequences(point: Point, arms: Sequence[Arm]) -> Iterator[Said]:
    if any(group.drafts for group in point.groups):
        yield "the embedded engine verifies no drafted tokens", "leave :D out; Q counts the query tokens"
    chunks = point.chunks
    if not any(chunks):
        return
    if sum(chunks) > 1 or not chunks[-1]:
        yield "a token budget cuts one prompt a step, the last", "one chunk, as the last sequence: 8*1@1024+512@2048c"
    elif len(chunks) == 1:
        yield "a step that samples nothing cannot be checked", "add a sequence that samples: 1*1@1024+512@2048c"
    for arm in arms:
        if not arm.engine.chunked_prefill:
            yield f"{arm.name} computes prompts whole (engine.chunked_prefill)", "leave the c out"


def _pages(attributes: StepAttributes, arms: Sequence[Arm]) -> Iterator[Said]:
    sizes = {arm.page_size for arm in arms}
    if attributes.page and len(sizes) > 1:
        named = " and ".join(str(size) for size in sorted(sizes))
        yield f"page={attributes.page} for both arms, whose claim is pages of {named}", "leave page= out"


def _lengths(attributes: StepAttributes, point: Point, arms: Sequence[Arm]) -> Iterator[Said]:
    """Both arms must compute the same lengths, and what was asked for must come out."""
    own = [attributed(arm, attributes) for arm in arms]
    found = [tailed(point, attributes.tail, arm.page_size) for arm in own]
    if len(set(found)) > 1:
        lengths = " and ".join(str(one) for one in found)
        yield f"tail={attributes.tail} makes {lengths} of it", "write the KV lengths themselves"
        return
    for arm, one in zip(own, found, strict=True):
        if attributes.tail == "partial" and any(group.kv_tokens % arm.page_size == 0 for group in one.groups):
            yield f"no tail of {one} is partial in pages of {arm.page_size}", "other KV lengths, or no tail="
            return
    if attributes.prefix_share and own:
        shared = {shared_tokens(found[0], attributes.prefix_share, arm.page_size) for arm in own}
        if len(shared) > 1:
            yield "the arms' pages share different lengths", f"pages of up to {UNIT} tokens, or no prefix_share="
        elif shared == {0}:
            yield "no whole page of history is shared", f"histories of {UNIT} tokens and more, or a larger share"
        elif point.batch == 1:
            yield "one sequence shares its prefix with nobody", "two sequences or more"


def _experts(attributes: StepAttributes, model: ModelShape, root: Path) -> Iterator[Said]:
    control = attributes.moe
    if control is None:
        return
    if not any(model.has_experts(layer) for layer in range(model.layers)):
        yield f"{model.name} has no experts", "leave moe= out, or name another model"
    elif control.kind == "recorded":
        if not (root / control.recorded).is_file():
            yield f"no file of loads {root / control.recorded}", "paths are relative to the suite"
    else:
        try:
            declared_visits(control, model.experts, model.experts_per_token)
        except UsageError as error:
            yield error.problems[0].what, error.problems[0].remedy


def _served(shape: Shape, point: Point, arm: Arm, model: ModelShape) -> Iterator[Said]:
    """Whether the arm's attention serves what the attributes make of it; the arm as it is has been checked already."""
    changed = attributed(arm, shape.attributes)
    if changed is arm:
        return
    single = {group.query_tokens == 1 for group in point.groups}
    for phase, used in (("decode", True in single), ("prefill", False in single)):
        if not used:
            continue
        for name, reason in objections(changed, attention_queries(changed, model, phase, "")):
            yield f"{name} cannot serve {arm.name} so: {reason}", "another value, or another implementation"
