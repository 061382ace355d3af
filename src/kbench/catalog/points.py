"""The grammar of batches, and of the shapes that kernels and steps are measured at.

Owns `Point` (a batch, in vLLM's grammar) and `Shape` (a point, explicit axes, or a point with axes; of a step a point
with attributes). It knows no operation: which axes one has is `catalog.ops`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kbench.catalog.attributes import PLAIN, StepAttributes, parse_attributes
from kbench.errors import UsageError

_GROUP = re.compile(
    r"(?:(?P<count>[0-9]{1,9})\*)?(?P<query>[0-9]{1,9})(?:@(?P<kv>[0-9]{1,9}))?(?P<chunk>c?)(?::(?P<drafts>[0-9]{1,9}))?"
)
_VLLM_GROUP = re.compile(
    r"(?P<count>[0-9]{1,9})?q(?P<query>[0-9]{1,9})(?P<query_k>k?)(?:(?:s|kv)(?P<kv>[0-9]{1,9})(?P<kv_k>k?))?"
)
MAX_SEQUENCES = 65_536
MAX_CONTEXT = 16_777_216


@dataclass(frozen=True, slots=True)
class Group:
    """`count` sequences that each run `query_tokens` and hold `kv_tokens` after the step."""

    count: int
    query_tokens: int
    kv_tokens: int
    chunked: bool = False
    """A chunk of a longer prompt: more of it follows, so the step samples nothing for it."""
    drafts: int = 0
    """Drafted tokens among the query tokens, to be verified."""

    def __str__(self) -> str:
        kv = "" if self.kv_tokens == self.query_tokens else f"@{self.kv_tokens}"
        drafts = f":{self.drafts}" if self.drafts else ""
        return f"{self.count}*{self.query_tokens}{kv}{'c' * self.chunked}{drafts}"


@dataclass(frozen=True, slots=True)
class Point:
    """A batch: `32*1@4096` is 32 sequences of one query token and KV length 4,096 after the step; `+` joins groups."""

    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return "+".join(str(group) for group in self.groups)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """`(query_tokens, kv_tokens)` of every sequence, in order."""
        return [(group.query_tokens, group.kv_tokens) for group in self.groups for _ in range(group.count)]

    @property
    def chunks(self) -> list[bool]:
        """Of every sequence, in order: whether it is a chunk, with more of its prompt to come."""
        return [group.chunked for group in self.groups for _ in range(group.count)]

    @property
    def bare(self) -> Point:
        """Lengths alone, without chunks and drafts: what a kernel or a cost grid sees of the batch."""
        return Point(tuple(Group(group.count, group.query_tokens, group.kv_tokens) for group in self.groups))

    @property
    def batch(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def context(self) -> int:
        """The longest KV length in the batch, after the step."""
        return max(group.kv_tokens for group in self.groups)

    @property
    def query_tokens(self) -> int:
        return sum(group.count * group.query_tokens for group in self.groups)

    @property
    def kv_tokens(self) -> int:
        return sum(group.count * group.kv_tokens for group in self.groups)

    @property
    def is_decode(self) -> bool:
        return all(group.query_tokens == 1 for group in self.groups)


def parse_point(text: str) -> Point:
    """Read `[N*]Q[@K][c][:D]` groups joined by `+`, or what vLLM's attention benchmark writes for the same batch.

    c: a chunk, more of the prompt follows. D: drafted tokens among the Q. `2q2k_32q1s4k` is `2*2048+32*1@4096`: count,
    q and query length, s (or kv) and KV length, k for 1,024, joined by underscores. Raises UsageError with the
    offending group and the grammar.
    """
    bare = text.replace(" ", "")
    vllm = "q" in bare
    groups = []
    for part in bare.split("_" if vllm else "+"):
        match = (_VLLM_GROUP if vllm else _GROUP).fullmatch(part)
        if match is None:
            theirs = "write [N]qQ[sK], joined by _, k for 1,024, e.g. 2q2k_32q1s4k"
            raise UsageError(
                f"point {text!r}: cannot read {part!r}",
                remedy=theirs if vllm else "write [N*]Q[@K][c][:D], joined by +, e.g. 32*1@4096 or 30*1@1024+512@2048c",
            )
        query = int(match["query"]) * (1_024 if vllm and match["query_k"] else 1)
        kv = int(match["kv"]) * (1_024 if vllm and match["kv_k"] else 1) if match["kv"] else query
        chunked, drafts = (False, 0) if vllm else (bool(match["chunk"]), int(match["drafts"] or 0))
        group = Group(int(match["count"] or 1), query, kv, chunked, drafts)
        if not 1 <= group.count <= MAX_SEQUENCES or not 1 <= query <= group.kv_tokens <= MAX_CONTEXT:
            raise UsageError(
                f"point {text!r}: {part!r} is not a batch",
                remedy=f"1 to {MAX_SEQUENCES} sequences, 1 <= query <= KV length <= {MAX_CONTEXT}",
            )
        if not drafts < query:
            raise UsageError(
                f"point {text!r}: {part!r} drafts {drafts} of {query} query tokens",
                remedy="one query token at least is no draft",
            )
        groups.append(group)
    return Point(tuple(groups))


_AXIS = re.compile(r"(?P<name>[a-z][a-z0-9_]{0,31})=(?P<value>[A-Za-z0-9][A-Za-z0-9_.-]{0,31})")


@dataclass(frozen=True, slots=True)
class Shape:
    """What one case computes on. Kernel: a batch, axes by name, or both; the model fills in what is left out. Step: a
    batch, and attributes after semicolons.

    `32*1@4096`, `m=4000,n=4000,k=4000`, `32*1@4096,window=128`, `32*1@4096;graph=off`. Axes and attributes are sorted,
    so a shape has one spelling.
    """

    point: Point | None
    axes: tuple[tuple[str, str], ...] = ()
    attributes: StepAttributes = PLAIN

    @property
    def is_batch(self) -> bool:
        """A batch without axes: what a step can be measured at."""
        return self.point is not None and not self.axes

    def __str__(self) -> str:
        parts = [str(self.point)] if self.point is not None else []
        return ",".join(parts + [f"{name}={value}" for name, value in self.axes]) + str(self.attributes)


def parse_shape(text: str) -> Shape:
    """Read a shape. Raises UsageError with the offending part and the grammar."""
    point: Point | None = None
    axes: dict[str, str] = {}
    head, *attributes = text.replace(" ", "").split(";")
    for place, part in enumerate(head.split(",")):
        match = _AXIS.fullmatch(part)
        if match is not None and match["name"] not in axes:
            axes[match["name"]] = match["value"]
        elif place == 0 and "=" not in part:
            point = parse_point(part)
        else:
            twice = " (named twice)" if match is not None else ""
            raise UsageError(
                f"shape {text!r}: cannot read {part!r}{twice}",
                remedy="write a batch, axes or both, e.g. 32*1@4096 or m=4000,n=4000,k=4000 or 32*1@4096,window=128",
            )
    if attributes and (point is None or axes):
        raise UsageError(
            f"shape {text!r}: attributes belong to a step, which has a batch and no axes",
            remedy="write e.g. 32*1@4096;graph=off",
        )
    return Shape(point, tuple(sorted(axes.items())), parse_attributes(attributes))


def parse_step(text: str) -> Shape:
    """Read what a step is measured at: a batch and its attributes. Raises UsageError where it has axes or no batch."""
    shape = parse_shape(text)
    if not shape.is_batch:
        raise UsageError(f"{text!r} is not a batch", remedy="write [N*]Q[@K], joined by +, then ;name=value")
    return shape
