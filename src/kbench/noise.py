"""The noise card of a host: how much two equal variants differ there, session by session, when nothing differs.

Owns the file `OUT/noise/<key>.json` (schema `kbench.noise-card/1`), what makes a card fit a measurement, and the one
reason why none does. A card is what lets one session speak (`decide.quick`): it says how sessions scatter on this host,
device, engine, clock policy and measuring settings. It is never evidence for a rule. How estimates are made from
samples, and what is concluded from them, is not known here.

The host is a class (processor, cores, clocks, device), not a name: an ephemeral runner may bring its card along, and a
noisier machine of the same class shows in the scatter within its sessions, which every verdict is widened by.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from kbench import __version__, env
from kbench.errors import MeasurementError, UsageError
from kbench.hashing import sha256_of
from kbench.suite.schema import Arm, Measure

SCHEMA = "kbench.noise-card/1"
LEAST_SESSIONS = 16
"""A spread from fewer sessions is too uncertain to stand for one's own."""
DAYS = 14
_CALIBRATE = "run kbench calibrate"


class _Closed(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Device(_Closed):
    name: str
    """The GPUs' or the processor's model."""
    uuid: str
    """The GPU's; empty for a processor, which has none."""


class Engine(_Closed):
    """What runs, as far as noise depends on it: the baseline arm's settings, not its kernels."""

    kbench: str
    torch: str
    model: str
    layers: int
    """0: the model's own number."""
    dtype: str
    page_size: int
    graph: str


class Clocks(_Closed):
    """Who sets the clocks, as `kbench.env` sees it; null where the system does not say."""

    governors: tuple[str, ...]
    turbo: bool | None
    power_limit_w: float | None
    held: bool
    """Whether application clocks are set on the device."""


class Measuring(_Closed):
    blocks: int
    window_steps: int
    window_ms: float


class CardKey(_Closed):
    """Everything that must be equal for a card to speak about a measurement."""

    host: str
    device: Device
    engine: Engine
    clocks: Clocks
    measuring: Measuring

    @property
    def name(self) -> str:
        """The card's file, without its ending."""
        return f"{self.host}-{sha256_of(self.model_dump(mode='json'))[:16]}"


class Scatter(_Closed):
    """One metric of one case over the sessions of the calibration."""

    estimates: tuple[float, ...] = Field(min_length=LEAST_SESSIONS)
    """One a session: log ratios of times, or relative changes of what is taken once a session."""
    sd: float = Field(ge=0)
    """Their standard deviation."""
    within: tuple[float, ...] = ()
    """The variance of each estimate as its own session shows it; empty for what is taken once a session."""
    within_variance: float = Field(ge=0)
    """The mean of `within`, 0 where there is none."""

    @model_validator(mode="after")
    def _agree(self) -> Scatter:
        if self.within and len(self.within) != len(self.estimates):
            raise ValueError("within holds another number of sessions than estimates")
        if any(variance < 0 for variance in self.within):
            raise ValueError("within holds a negative variance")
        derived = Scatter.summary(self.estimates, self.within)
        for given, found in zip((self.sd, self.within_variance), derived, strict=True):
            if abs(given - found) > 1e-9 * max(given, found, 1e-12):
                raise ValueError("sd or within_variance do not follow from the sessions")
        return self

    @classmethod
    def of(cls, estimates: Sequence[float], within: Sequence[float] = ()) -> Scatter:
        sd, variance = cls.summary(estimates, within)
        return cls(estimates=tuple(estimates), sd=sd, within=tuple(within), within_variance=variance)

    @staticmethod
    def summary(estimates: Sequence[float], within: Sequence[float]) -> tuple[float, float]:
        centre = sum(estimates) / len(estimates)
        square = sum((value - centre) ** 2 for value in estimates) / (len(estimates) - 1)
        return float(square**0.5), float(sum(within) / len(within)) if within else 0.0


class CaseNoise(_Closed):
    """One case: the metric that is judged, and the components that are shown beside it."""

    metrics: dict[str, Scatter] = Field(min_length=1)


class NoiseCard(_Closed):
    schema_: Literal["kbench.noise-card/1"] = Field(default="kbench.noise-card/1", alias="schema")
    key: CardKey
    cases: dict[str, CaseNoise] = Field(min_length=1)
    """By case id."""
    run: str
    """The newest calibration in it: `<suite>/<run>`."""
    created: AwareDatetime
    expires: AwareDatetime

    @property
    def file(self) -> str:
        return f"{self.key.name}.json"


@dataclass(frozen=True, slots=True)
class NoCard:
    """Why there is no card to go by: one sentence."""

    why: str


def key_of(snapshot: Mapping[str, Any], device: str, baseline: Arm, measure: Measure) -> CardKey:
    """The key of measurements of `baseline` on this host; `snapshot` is `env.snapshot()`."""
    cpu = snapshot["cpu"]
    gpu = (snapshot["gpus"] or [{}])[0] if device == "cuda" else {}
    held = "applications-clocks-setting" in (gpu.get("throttle_reasons") or ())
    model = baseline.model.preset or Path(baseline.model.checkpoint or "checkpoint").name
    return CardKey(
        host=env.host_key(snapshot),
        device=Device(name=str(gpu.get("name") or cpu["model"]), uuid=str(gpu.get("uuid") or "")),
        engine=Engine(
            kbench=__version__,
            torch=str(snapshot["python"]["packages"]["torch"]),
            model=model,
            layers=baseline.model.layers or 0,
            dtype=baseline.model.dtype,
            page_size=baseline.page_size,
            graph=baseline.engine.graph,
        ),
        clocks=Clocks(
            governors=tuple(cpu["governors"]), turbo=cpu["turbo"], power_limit_w=gpu.get("power_limit_w"), held=held
        ),
        measuring=Measuring(
            blocks=measure.blocks, window_steps=measure.window_steps, window_ms=float(measure.window_ms)
        ),
    )


def make(key: CardKey, cases: Mapping[str, CaseNoise], run: str, now: datetime, days: int = DAYS) -> NoiseCard:
    if days < 1:
        raise UsageError(f"a card that lasts {days} days", remedy="give at least one day")
    return NoiseCard(
        schema="kbench.noise-card/1",
        key=key,
        cases=dict(cases),
        run=run,
        created=now,
        expires=now + timedelta(days=days),
    )


def store(root: Path, card: NoiseCard) -> tuple[Path, NoiseCard]:
    """Write the card whole or not at all. Cases that only a valid older card of the same key has are kept.

    Then the card ends when the older one would have: a card is as old as its oldest case. Returns what was written.
    """
    folder = root / "noise"
    path = folder / card.file
    older = _read(path) if path.is_file() else NoCard("")
    if isinstance(older, NoiseCard) and older.key == card.key and older.expires > card.created:
        kept = {case: noise for case, noise in older.cases.items() if case not in card.cases}
        if kept:
            together = {**kept, **card.cases}
            card = card.model_copy(update={"cases": together, "expires": min(card.expires, older.expires)})
    partial = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with partial.open("w") as file:
            file.write(json.dumps(card.model_dump(mode="json", by_alias=True), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise MeasurementError(
            f"cannot write the noise card: {error.strerror or error}", where=str(path), remedy="choose another --out"
        ) from error
    return path, card


def lookup(root: Path, key: CardKey, cases: Sequence[str], now: datetime | None = None) -> NoiseCard | NoCard:
    """The card for `cases` measured under `key`, or the one reason why there is none. Never raises for a bad card."""
    path = root / "noise" / f"{key.name}.json"
    if not path.is_file():
        return NoCard(_nearest(root / "noise", key))
    card = _read(path)
    if isinstance(card, NoCard):
        return card
    if card.key != key:
        return NoCard(f"the noise card {path.name} is of {_other(card.key, key)}: {_CALIBRATE}")
    if card.expires <= (now or datetime.now(UTC)):
        return NoCard(f"the noise card expired on {card.expires.date()}: {_CALIBRATE} again")
    missing = next((case for case in cases if case not in card.cases), None)
    if missing is not None:
        return NoCard(f"the noise card does not hold {missing}: {_CALIBRATE} with it")
    return card


def _read(path: Path) -> NoiseCard | NoCard:
    try:
        # JSON mode: arrays become tuples and texts times, while types stay strict otherwise.
        return NoiseCard.model_validate_json(path.read_bytes())
    except OSError as error:
        return NoCard(f"the noise card {path.name} cannot be read: {error.strerror or error}")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return NoCard(f"the noise card {path.name} is damaged: {place + ': ' if place else ''}{first['msg']}")


def _nearest(folder: Path, key: CardKey) -> str:
    """Why no card fits: what the one that fits best is of."""
    found = [card for card in map(_read, sorted(folder.glob("*.json"))) if isinstance(card, NoiseCard)]
    if not found:
        return f"no noise card for this host: {_CALIBRATE}"
    nearest = min(found, key=lambda card: len(list(_differences(card.key, key))))
    return f"no noise card for this measurement, the nearest is of {_other(nearest.key, key)}: {_CALIBRATE}"


def _other(theirs: CardKey, ours: CardKey) -> str:
    """`another block count (6, not 12)`; the first difference in the order of the key."""
    return next(_differences(theirs, ours), "another key")


def _differences(theirs: CardKey, ours: CardKey) -> Iterator[str]:
    named = {
        ("host", ""): "another host",
        ("device", "name"): "another device",
        ("device", "uuid"): "another device",
        ("clocks", ""): "another clock policy",
        ("measuring", "blocks"): "another block count",
    }
    for part in CardKey.model_fields:
        one, two = getattr(theirs, part), getattr(ours, part)
        if one == two:
            continue
        if not isinstance(one, _Closed):
            yield f"{named[(part, '')]} ({one}, not {two})"
            continue
        for field in type(one).model_fields:
            left, right = getattr(one, field), getattr(two, field)
            if left != right:
                what = named.get((part, field)) or named.get((part, ""), f"another {field.replace('_', ' ')}")
                left, right = (_shown(value) for value in (left, right))
                yield f"{what} ({left}, not {right})"


def _shown(value: Any) -> str:
    return ", ".join(value) or "none" if isinstance(value, tuple) else "unknown" if value is None else str(value)
