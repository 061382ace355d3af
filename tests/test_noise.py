"""The noise card: its key, its file, and the one reason why none fits."""

from __future__ import annotations

import json
import statistics
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kbench.errors import UsageError
from kbench.noise import CardKey, CaseNoise, NoCard, NoiseCard, Scatter, key_of, lookup, make, store
from kbench.suite.schema import Arm, EngineSettings, Measure, ModelSettings

NOW = datetime(2026, 5, 1, tzinfo=UTC)
CASE, OTHER = "step/step/nano/2*1@256", "step/step/nano/1*1@127"
ESTIMATES = tuple(0.001 * ((7 * n) % 16 - 8) for n in range(16))
WITHIN = tuple(1e-6 * (1 + n % 3) for n in range(16))
NOISE = CaseNoise(metrics={"step_time": Scatter.of(ESTIMATES, WITHIN)})


def snapshot(**cpu: Any) -> dict[str, Any]:
    return {
        "os": {"machine": "x86_64"},
        "cpu": {"model": "Xeon", "logical_cores": 2, "usable_cores": 2, "governors": ["performance"], "turbo": True}
        | cpu,
        "gpus": [],
        "python": {"packages": {"torch": "2.13.0"}},
    }


def gpu_snapshot(**facts: Any) -> dict[str, Any]:
    gpu = {"name": "H200", "uuid": "GPU-1", "power_limit_w": 700.0, "throttle_reasons": ["gpu-idle"]} | facts
    return snapshot() | {"gpus": [gpu]}


def arm(**changes: Any) -> Arm:
    known: dict[str, Any] = {
        "name": "a",
        "model": ModelSettings(preset="nano"),
        "engine": EngineSettings(),
        "prefill": "sdpa",
        "decode": "sdpa-gather",
        "page_size": 16,
        "layout": "NHD",
        "seed": 1,
        "root": "/",
    }
    return Arm(**known | changes)


def key(facts: dict[str, Any] | None = None, device: str = "cpu", measure: Measure | None = None, **of: Any) -> CardKey:
    return key_of(facts or snapshot(), device, arm(**of), measure or Measure())


def card(of: CardKey | None = None, cases: tuple[str, ...] = (CASE,), created: datetime = NOW) -> NoiseCard:
    return make(of or key(), dict.fromkeys(cases, NOISE), "suite/run", created)


def why(root: Path, of: CardKey | None = None, cases: tuple[str, ...] = (CASE,), now: datetime = NOW) -> str:
    found = lookup(root, of or key(), cases, now)
    assert isinstance(found, NoCard)
    assert "\n" not in found.why
    return found.why


def test_a_card_is_found_again_as_it_was_written(tmp_path: Path) -> None:
    path, written = store(tmp_path, card())
    assert path == tmp_path / "noise" / f"{key().name}.json"
    assert lookup(tmp_path, key(), [CASE], NOW) == written == card()
    assert json.loads(path.read_text())["schema"] == "kbench.noise-card/1"
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_spread_is_that_of_the_statistics_module() -> None:
    scatter = NOISE.metrics["step_time"]
    assert scatter.sd == pytest.approx(statistics.stdev(ESTIMATES))
    assert scatter.within_variance == pytest.approx(statistics.fmean(WITHIN))


def test_no_card_at_all(tmp_path: Path) -> None:
    assert why(tmp_path) == "no noise card for this host: run kbench calibrate"


def test_it_expires_to_the_second(tmp_path: Path) -> None:
    store(tmp_path, card())
    end = NOW + timedelta(days=14)
    assert isinstance(lookup(tmp_path, key(), [CASE], end - timedelta(seconds=1)), NoiseCard)
    assert "expired on 2026-05-15" in why(tmp_path, now=end)


def test_a_case_that_is_not_on_it(tmp_path: Path) -> None:
    store(tmp_path, card())
    assert OTHER in why(tmp_path, cases=(CASE, OTHER))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (key(gpu_snapshot(), "cuda"), "another host"),
        (key(snapshot(turbo=False)), "another host"),
        (key(measure=Measure(blocks=12)), "another block count (6, not 12)"),
        (key(measure=Measure(window_ms=10.0)), "another window ms"),
        (key(page_size=64), "another page size"),
        (key(model=ModelSettings(preset="nano", dtype="bfloat16")), "another dtype"),
        (key(engine=EngineSettings(graph="graph")), "another graph"),
        (key(snapshot() | {"python": {"packages": {"torch": "2.14.0"}}}), "another torch"),
    ],
)
def test_it_says_what_the_nearest_card_differs_in(tmp_path: Path, other: CardKey, said: str) -> None:
    store(tmp_path, card())
    assert said in why(tmp_path, of=other)


def test_another_device_of_the_same_host_class(tmp_path: Path) -> None:
    store(tmp_path, card(key(gpu_snapshot(), "cuda")))
    assert "another device (GPU-1, not GPU-2)" in why(tmp_path, of=key(gpu_snapshot(uuid="GPU-2"), "cuda"))
    held = gpu_snapshot(throttle_reasons=["applications-clocks-setting"])
    assert "another clock policy" in why(tmp_path, of=key(held, "cuda"))


def test_what_noise_does_not_depend_on_is_not_in_the_key() -> None:
    assert key(decode="blocked") == key()
    assert key(gpu_snapshot(temperature_c=80), "cuda") == key(gpu_snapshot(temperature_c=30), "cuda")


@pytest.mark.parametrize("keep", [0, 1, 200, -2])
def test_a_torn_card_is_no_card(tmp_path: Path, keep: int) -> None:
    path, _ = store(tmp_path, card())
    path.write_bytes(path.read_bytes()[:keep])
    assert "damaged" in why(tmp_path)


def edited(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    scatter = document["cases"][CASE]["metrics"]["step_time"]
    scatter |= changes
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "changes",
    [
        {"sd": 1e-9},
        {"within_variance": 0.5},
        {"estimates": list(ESTIMATES[:15])},
        {"within": list(WITHIN[:3])},
        {"within": [-1e-6] * 16, "within_variance": -1e-6},
        {"comment": "a key too many"},
        {"sd": "0.004"},
    ],
)
def test_a_card_whose_numbers_do_not_agree_is_no_card(tmp_path: Path, changes: dict[str, Any]) -> None:
    path, _ = store(tmp_path, card())
    edited(path, **changes)
    assert "damaged" in why(tmp_path)


def test_a_renamed_card_of_another_measurement_is_no_card(tmp_path: Path) -> None:
    path, _ = store(tmp_path, card(key(measure=Measure(blocks=12))))
    path.rename(path.with_name(f"{key().name}.json"))
    assert "another block count (12, not 6)" in why(tmp_path)


def test_fifteen_sessions_are_too_few() -> None:
    with pytest.raises(ValidationError, match="at least 16"):
        Scatter.of(ESTIMATES[:15])
    with pytest.raises(UsageError, match="lasts 0 days"):
        make(key(), {CASE: NOISE}, "suite/run", NOW, days=0)


def test_other_cases_are_kept_and_the_card_is_as_old_as_its_oldest(tmp_path: Path) -> None:
    store(tmp_path, card(cases=(CASE,)))
    later = NOW + timedelta(days=3)
    _, both = store(tmp_path, card(cases=(OTHER,), created=later))
    assert set(both.cases) == {CASE, OTHER}
    assert both.expires == NOW + timedelta(days=14)
    _, renewed = store(tmp_path, card(cases=(CASE, OTHER), created=later))
    assert renewed.expires == later + timedelta(days=14)
    long_after = NOW + timedelta(days=30)
    _, alone = store(tmp_path, card(cases=(OTHER,), created=long_after))
    assert set(alone.cases) == {OTHER}
