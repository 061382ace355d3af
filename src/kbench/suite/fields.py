"""What the tables of a suite are made of: checked text, levels, metrics, and the closed table itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

from kbench import catalog
from kbench.errors import UsageError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Multiple = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?x$")]


def checked(text: str, parse: Callable[[str], object]) -> str:
    """Turn a catalogue error into one that pydantic collects with all the others."""
    try:
        parse(text)
    except UsageError as error:
        problem = error.problems[0]
        raise ValueError(f"{problem.what} | {problem.remedy}") from error
    return text


def known_op(text: str) -> None:
    if text not in catalog.OPS:
        raise UsageError(f"no operation {text!r}", remedy=f"one of {', '.join(catalog.OPS)}")


ShapeText = Annotated[str, AfterValidator(lambda text: checked(text, catalog.parse_shape))]
StepText = Annotated[str, AfterValidator(lambda text: checked(text, catalog.parse_step))]
PresetName = Annotated[str, AfterValidator(lambda text: checked(text, catalog.model_shape))]
OpName = Annotated[str, AfterValidator(lambda text: checked(text, known_op))]
Level = Literal["kernel", "step", "workload"]
Mode = Literal["virtual", "exec"]
Test = Literal["superiority", "noninferiority", "max_increase", "equivalence"]
Metric = Literal[
    "latency",
    "step_time",
    "step_time_p99",
    "conversion_time",
    "metadata_time",
    "goodput",
    "ttft_p50",
    "ttft_p99",
    "tpot_p50",
    "tpot_p99",
    "preemptions_per_1k",
    "recomputed_tokens",
    "hit_ratio",
    "output_divergence",
]
METRICS_OF_LEVEL: dict[str, tuple[str, ...]] = {
    "kernel": ("latency",),
    "step": ("step_time", "step_time_p99", "conversion_time", "metadata_time"),
    "workload": (
        "goodput",
        "ttft_p50",
        "ttft_p99",
        "tpot_p50",
        "tpot_p99",
        "preemptions_per_1k",
        "recomputed_tokens",
        "hit_ratio",
        "output_divergence",
    ),
}


class Strict(BaseModel):
    """Base of every table: frozen, closed, and a string under a field is that field's documentation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
