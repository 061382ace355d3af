"""Moving keys and values: what all such operations share, append, and page copies.

Data are moved, never computed, so answers are compared bit by bit. Every operation writes into a pool that it is given
(inout) and answers with it: what an implementation returns besides is not looked at. Everything that must not be read
is NaN in the source; everything of the target that is not the call's to write must keep its bits, except the slots
behind a sequence's end in its own last page, which nobody reads. Page 0 is the null page, never read nor written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kbench.catalog import Point, Resolved, parse_point
from kbench.errors import UsageError
from kbench.ops.base import Cost, Edge, InputSettings, Judgement, Outputs, Steps, form_problem
from kbench.ops.pools import Pages, empty_pool, scatter
from kbench.ops.tensors import TensorInputs, TensorOp, TensorStandard

MODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class MoveStandard(TensorStandard):
    """`expected` are bits as integers; `free` bool `[pages, page_size]` marks slots whose content is nobody's."""

    free: Tensor


class Move(TensorOp):
    """Keys and values from one place to another; the pools `k_to`, `v_to` are written and are the answer."""

    names: ClassVar[tuple[str, ...]] = ("k_to", "v_to")

    @abstractmethod
    def moved(self, inputs: TensorInputs, **wrong: Any) -> Outputs:
        """The pools after a call, made from `initial`, token by token."""

    @abstractmethod
    def free(self, inputs: TensorInputs) -> Tensor:
        """Slots of the target pool that may hold anything."""

    def exact(self, inputs: TensorInputs) -> Outputs:
        return tuple(bits(pool) for pool in self.moved(inputs))

    def plain(self, inputs: TensorInputs) -> Outputs:
        return self.moved(inputs)

    def standard(self, inputs: TensorInputs) -> TensorStandard:
        free = self.free(inputs)
        expected = tuple(self._cleared(value, free, inputs) for value in self.exact(inputs))
        return MoveStandard(inputs, expected, (0.0, 0.0), free)

    def bind(self, implementation: Any, inputs: TensorInputs) -> Steps:
        steps = super().bind(implementation, inputs)

        def run(state: Any, plan: Any, out: Outputs) -> Outputs:
            steps.run(state, plan, out)
            return inputs.having("inout")

        return Steps(steps.convert, steps.plan, run)

    def judge_output(self, place: int, have: object, form: Tensor, against: TensorStandard) -> Judgement:
        assert isinstance(against, MoveStandard)
        problem = form_problem(have, form)
        if not problem and isinstance(have, Tensor):
            value = self._cleared(bits(have), against.free, against.inputs)
            problem = self._difference(value, against.expected[place], against.inputs)
        return Judgement(float("inf") if problem else 0.0, 0.0, f"{self.names[place]}: {problem}" if problem else "")

    def _passes(self, answer: Outputs, own: TensorStandard) -> bool:
        assert isinstance(own, MoveStandard)
        cleared = (self._cleared(value, own.free, own.inputs) for value in answer)
        return all(torch.equal(have, want) for have, want in zip(cleared, own.expected, strict=True))

    def _difference(self, have: Tensor, want: Tensor, inputs: TensorInputs) -> str:
        wrong = have != want
        if not bool(wrong.any()):
            return ""
        page = int(wrong.flatten(1).any(dim=1).nonzero()[0, 0])
        where = "page" if page in _targets(inputs) else "page that is not the call's to write,"
        return f"{int(wrong.sum())} elements differ, the first in {where} {page} ({inputs.arguments['layout_to']})"

    def _cleared(self, value: Tensor, free: Tensor, inputs: TensorInputs) -> Tensor:
        if not bool(free.any()):
            return value
        mask = free[:, :, None, None] if inputs.arguments["layout_to"] == "NHD" else free[:, None, :, None]
        return value.masked_fill(mask, 0)

    def wrong(self, own: TensorStandard) -> Mapping[str, Outputs]:
        k, v = own.expected
        inputs = own.inputs
        untouched = tuple(bits(inputs.initial[name]) for name in ("k_to", "v_to"))
        models = {name: tuple(bits(pool) for pool in self.moved(inputs, **{name: True})) for name in self.mistakes}
        assert isinstance(own, MoveStandard)
        all_models = {"nothing written": untouched, "keys and values swapped": (v, k), **models}
        return {
            name: tuple(self._cleared(value, own.free, inputs) for value in pools) for name, pools in all_models.items()
        }

    mistakes: ClassVar[tuple[str, ...]] = ()
    """Wrong models that `moved` can make."""

    def cost(self, inputs: TensorInputs) -> Cost:
        """Each token's key and value is read once and written once; the indices are read."""
        moved = self.tokens(inputs) * token_bytes(inputs)
        indices = sum(tensor.numel() * tensor.element_size() for tensor in inputs.having("metadata"))
        return Cost(0, moved + indices, moved)

    @abstractmethod
    def tokens(self, inputs: TensorInputs) -> int:
        """How many tokens a call moves."""

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        """What is moved, not the pools that it lies in."""
        return 2 * self.tokens(inputs) * token_bytes(inputs)

    def outputs(self, inputs: TensorInputs) -> Outputs:
        return ()

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        page = settings.page_size
        around = [length for length in (1, page - 1, page, page + 1, 3 * page + 5) if length > 0]
        points = {
            "one token": "1*1@1",
            "lengths around a page": "+".join(f"1*1@{length}" for length in around),
            "all pages full": f"2*1@{2 * page}",
            "a length around 64": "1*1@63+1*1@64+1*1@65",
        }
        small = {name: at(shape, parse_point(text)) for name, text in points.items()}
        odd = Edge("odd heads", at(shape, parse_point(f"2*1@{page + 3}"), kv_heads=3, head_dim=80))
        return (*(Edge(name, own) for name, own in small.items()), odd)


class Append(Move):
    """k, v `[tokens, kv_heads, head_dim]` into the slots int64 `[tokens]` of k_to, v_to: slot = page * page_size +
    offset; a negative slot is a token that is not stored (padding of a captured batch). The pool holds the pages that
    the new tokens lie in and some that are not theirs, not the whole context."""

    arguments: ClassVar[tuple[str, ...]] = ("k", "v", "k_to", "v_to", "slots", "page_size", "layout_to")
    mistakes = ("one slot on", "last token left out", "heads swapped")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        point, size = batch_of(shape), settings.page_size
        first = [(kv - query) // size * size for query, kv in point.sequences]
        kept = [kv - start for (_, kv), start in zip(point.sequences, first, strict=True)]
        pages = Pages.scattered(kept, size, generator)
        new = [(query, kv - start) for (query, kv), start in zip(point.sequences, first, strict=True)]
        positions = [torch.arange(length - query, length) for query, length in new]
        slots = torch.cat([pages.slots(index, own) for index, own in enumerate(positions)])
        if kind == "padding":
            slots[1::2] = -1
        form = (len(slots), shape.integer("kv_heads"), shape.integer("head_dim"))
        k, v = (draw_rows(form, settings, generator) for _ in range(2))
        pools = {name: empty_pool(pages.count, size, form[1:], settings.layout, settings) for name in ("k_to", "v_to")}
        old = [torch.arange(length - query) for query, length in new]
        before = torch.cat([pages.slots(index, own) for index, own in enumerate(old)])
        for pool in pools.values():  # the tokens that are there already
            scatter(pool, before, draw_rows((len(before), *form[1:]), settings, generator), size, settings.layout)
        arguments = {"k": k, "v": v, **pools, "slots": slots.to(settings.device), "page_size": size}
        roles: dict[str, Any] = {"k": "activation", "v": "activation", "k_to": "inout", "v_to": "inout"}
        roles |= {"slots": "metadata", "page_size": "scalar", "layout_to": "scalar"}
        initial = {name: pool.clone() for name, pool in pools.items()}
        return TensorInputs(shape, arguments | {"layout_to": settings.layout}, roles, settings.dtype, initial)

    def moved(self, inputs: TensorInputs, **wrong: Any) -> Outputs:
        given = inputs.arguments
        slots, size = given["slots"], given["page_size"]
        keep = slots >= 0
        if "last token left out" in wrong:
            keep = keep & (torch.arange(len(slots), device=slots.device) < len(slots) - 1)
        shift = 1 if "one slot on" in wrong else 0
        pools = []
        for name, target in (("k", "k_to"), ("v", "v_to")):
            pool, rows = inputs.initial[target].clone(), given[name]
            rows = rows.flip(1) if "heads swapped" in wrong else rows
            places = (slots[keep] + shift) % (len(pool) * size)  # behind the last slot of the pool comes the first
            scatter(pool, places, rows[keep], size, given["layout_to"])
            pools.append(pool)
        return tuple(pools)

    def free(self, inputs: TensorInputs) -> Tensor:
        given = inputs.arguments
        return torch.zeros((len(given["k_to"]), given["page_size"]), dtype=torch.bool, device=given["k_to"].device)

    def tokens(self, inputs: TensorInputs) -> int:
        return int((inputs.arguments["slots"] >= 0).sum())

    def streamed_bytes(self, inputs: TensorInputs) -> int:
        """Only the slots are cold: new keys and values come from the projection just before."""
        return self.tokens(inputs) * token_bytes(inputs)

    def edges(self, shape: Resolved, settings: InputSettings) -> tuple[Edge, ...]:
        page = settings.page_size
        chunk = at(shape, parse_point(f"1*{page + 3}@{2 * page + 5}+3*1@{page + 1}"))
        more = (Edge("a chunk and decodes", chunk), Edge("tokens that are not stored", chunk, "padding"))
        return (*super().edges(shape, settings), *more)


class CopyPages(Move):
    """k_to, v_to: pages `sources` int64 `[n]` of the pool to pages `targets` int64 `[n]` of the same pool. No page is
    both. Pages are copied whole, unused slots too."""

    arguments = ("k_to", "v_to", "sources", "targets", "layout_to")
    mistakes = ("last page left out", "other way round")

    def make(
        self, shape: Resolved, settings: InputSettings, kind: str, generator: torch.Generator, **options: Any
    ) -> TensorInputs:
        lengths, size = [kv for _, kv in batch_of(shape).sequences], settings.page_size
        pages = Pages.scattered([*lengths, *lengths], size, generator)
        sources = torch.cat([pages.of(index) for index in range(len(lengths))])
        targets = torch.cat([pages.of(len(lengths) + index) for index in range(len(lengths))])
        form = (shape.integer("kv_heads"), shape.integer("head_dim"))
        pools = {name: empty_pool(pages.count, size, form, settings.layout, settings) for name in ("k_to", "v_to")}
        for pool in pools.values():
            for index, length in enumerate(lengths):
                rows = draw_rows((length, *form), settings, generator)
                scatter(pool, pages.slots(index, torch.arange(length)), rows, size, settings.layout)
        arguments = {**pools, "sources": sources.to(settings.device), "targets": targets.to(settings.device)}
        roles: dict[str, Any] = {"k_to": "inout", "v_to": "inout", "sources": "metadata", "targets": "metadata"}
        initial = {name: pool.clone() for name, pool in pools.items()}
        own = arguments | {"layout_to": settings.layout}
        return TensorInputs(shape, own, roles | {"layout_to": "scalar"}, settings.dtype, initial)

    def moved(self, inputs: TensorInputs, **wrong: Any) -> Outputs:
        sources, targets = inputs.arguments["sources"], inputs.arguments["targets"]
        if "last page left out" in wrong:
            sources, targets = sources[:-1], targets[:-1]
        if "other way round" in wrong:
            sources, targets = targets, sources
        pools = []
        for name in ("k_to", "v_to"):
            pool = inputs.initial[name].clone()
            pool[targets] = pool[sources]
            pools.append(pool)
        return tuple(pools)

    def free(self, inputs: TensorInputs) -> Tensor:
        pool = inputs.arguments["k_to"]
        size = pool.shape[1 if inputs.arguments["layout_to"] == "NHD" else 2]
        return torch.zeros((len(pool), size), dtype=torch.bool, device=pool.device)

    def tokens(self, inputs: TensorInputs) -> int:
        pool, sources = inputs.arguments["k_to"], inputs.arguments["sources"]
        return len(sources) * int(pool.shape[1 if inputs.arguments["layout_to"] == "NHD" else 2])


def bits(pool: Tensor) -> Tensor:
    """Elements as integers of the same width: NaN equals itself."""
    return pool.view(MODES[pool.element_size()])


def at(shape: Resolved, point: Point, **axes: int) -> Resolved:
    """The same operation on another batch."""
    return replace(shape.with_axes(**axes), point=point)


def token_bytes(inputs: TensorInputs) -> int:
    """Key and value of one token."""
    pool = inputs.arguments["k_to"]
    heads = pool.shape[2 if inputs.arguments["layout_to"] == "NHD" else 1]
    return 2 * int(heads) * int(pool.shape[3]) * int(pool.element_size())


def batch_of(shape: Resolved) -> Point:
    if shape.point is None:
        raise UsageError(f"{shape.op} needs a batch", remedy="write e.g. 32*1@4096")
    return shape.point


def _targets(inputs: TensorInputs) -> set[int]:
    given = inputs.arguments
    if "slots" in given:
        return {int(page) for page in (given["slots"] // given["page_size"]).unique()}
    pages = given["targets"] if "targets" in given else given["table_to"]
    return {int(page) for page in pages.unique()} - {0}


def draw_rows(form: tuple[int, ...], settings: InputSettings, generator: torch.Generator) -> Tensor:
    values = torch.randn(form, generator=generator, device=settings.device, dtype=torch.float32)
    return values.to(settings.dtype)
