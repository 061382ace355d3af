"""What a variant says about who computes what: names that must exist, slots, fallbacks, and who could serve its model.

Owns these checks of a variant, before anything is loaded or measured. Where it will run is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kbench import catalog
from kbench.catalog import AUTO, ModelShape, Registry
from kbench.errors import UsageError
from kbench.suite.choices import PAGED, PHASES, attention_queries, choice_of, objections, with_slots
from kbench.suite.plugins import is_plugin, plugin_problems
from kbench.suite.schema import Arm

KeyPath = tuple[str | int, ...]
Found = tuple[KeyPath, str, str]


def choice_problems(arm: Arm, path: KeyPath, root: Path) -> Iterator[Found]:
    """Names that nobody has, slots that are taken, fallbacks that make no sense."""
    wrong = list(_slot_problems(arm, path, root))
    yield from wrong
    if wrong:
        return
    known = with_slots(catalog.registry(), arm.registered, arm.overridden)
    for phase in PHASES:
        op = f"attention.{phase}"
        yield from _reference(known, op, getattr(arm, phase), (*path, "attention", phase), root)
        if arm.draft is not None:
            yield from _reference(known, op, getattr(arm.draft, phase), (*path, "draft", phase), root)
    for op, reference in arm.kernels.items():
        here = (*path, "kernels", op)
        if op in PAGED:
            yield here, f"{op} is chosen under attention", "write attention = { prefill = …, decode = … }"
        else:
            yield from _reference(known, op, reference, here, root)
    yield from _fallbacks(arm, path, known, root)


def served_problems(arm: Arm, path: KeyPath, model: ModelShape) -> Iterator[Found]:
    """Every reason why nobody whom the variant allows could attend in this model, on whatever device."""
    roles = ("target", "draft") if arm.draft is not None else ("target",)
    for role in roles:
        table = "attention" if role == "target" else "draft"
        for phase in PHASES:
            queries = attention_queries(arm, model, phase, "", role=role)
            for name, reason in objections(arm, queries, role):
                what = f"{name} cannot serve this variant: {reason}"
                yield (*path, table, phase), what, "choose another implementation or setting"


def _slot_problems(arm: Arm, path: KeyPath, root: Path) -> Iterator[Found]:
    registered: dict[str, str] = {}
    for slot, reference in arm.registered.items():
        here = (*path, "register", slot)
        yield from _code(reference, here, root)
        try:
            with_slots(catalog.registry(), {**registered, slot: reference}, {})
        except UsageError as error:
            name = slot.partition("@")[0]
            remedy = "rename it" if name == AUTO else f'rename it, or say override = {{ "{slot}" = … }}'
            yield here, error.problems[0].what, remedy
        else:
            registered[slot] = reference
    for slot, reference in arm.overridden.items():
        here = (*path, "override", slot)
        yield from _code(reference, here, root)
        try:
            with_slots(catalog.registry(), registered, {slot: reference})
        except UsageError as error:
            yield here, error.problems[0].what, "a new name is registered, not overridden"


def _code(reference: str, path: KeyPath, root: Path) -> Iterator[Found]:
    if not is_plugin(reference):
        yield path, f"{reference!r} is no code of yours", "write FILE.py:NAME, relative to the suite"
        return
    for what, remedy in plugin_problems(reference, root):
        yield path, what, remedy


def _reference(known: Registry, op: str, reference: str, path: KeyPath, root: Path) -> Iterator[Found]:
    if is_plugin(reference):
        for what, remedy in plugin_problems(reference, root):
            yield path, what, remedy
        return
    if reference == AUTO:
        return
    try:
        known.get(reference, op)
    except UsageError as error:
        yield path, error.problems[0].what, error.problems[0].remedy


def _fallbacks(arm: Arm, path: KeyPath, known: Registry, root: Path) -> Iterator[Found]:
    here = (*path, "fallback")
    if arm.fallback and arm.policy != "fallback":
        yield here, f"fallbacks are declared, and policy is {arm.policy}", 'policy = "fallback", or drop them'
    if arm.policy == "fallback" and not arm.fallback:
        example = '[[variants.NAME.fallback]] op = "attention.decode" use = "NAME"'
        yield (*path, "policy"), "policy is fallback, and no fallback is declared", f"add {example}"
    seen = set()
    for index, entry in enumerate(arm.fallback):
        own = (*here, index)
        choice = choice_of(arm, entry.op)
        if choice is None:
            yield (*own, "op"), f"the variant names nobody for {entry.op}", "name who computes it first"
        elif entry.use in (choice.requested, AUTO):
            yield (*own, "use"), f"{entry.use} falls back to itself", "name another implementation"
        elif (entry.op, entry.use) in seen:
            yield (*own, "use"), f"{entry.use} is declared twice for {entry.op}", "remove one"
        seen.add((entry.op, entry.use))
        if entry.use != AUTO:
            yield from _reference(known, entry.op, entry.use, (*own, "use"), root)
