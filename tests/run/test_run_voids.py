"""Voids in a run: noted in the ledger once, made up for by further sessions, and given up on where they go on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver import FAKE

from kbench.decide import Evidence
from kbench.ledger import Kind
from kbench.plan import Plan, make_plan
from kbench.record import RunRecord
from kbench.run import conditions
from kbench.run.conditions import Reading
from kbench.run.execute import execute
from kbench.run.history import History
from kbench.run.loop import Loop, Options, sessions_of
from kbench.run.session import Host
from kbench.suite import load_suite


@pytest.fixture
def voiding(suite: Path) -> Path:
    suite.write_text(suite.read_text().replace("looks = [2]", 'looks = [2]\nvoid_codes = ["host_contention"]'))
    return suite


class Host0:
    """A host whose other processes take half of it in the sessions of the given numbers."""

    def __init__(self, busy: set[int]) -> None:
        self.busy, self.asked = busy, 0

    def __call__(self, device: str) -> Reading:
        session, after = divmod(self.asked, 2)
        self.asked += 1
        cores = len(os.sched_getaffinity(0))
        taken = 5.0 * cores if after and session in self.busy else 0.0
        return Reading(wall_s=10.0 * after, busy_s=taken, own_s=0.0, gpus=None, ecc_uncorrected=None)


def plan_of(suite: Path) -> Plan:
    return make_plan(load_suite(suite))


def go(suite: Path, observe: Any = None, **options: Any) -> RunRecord | None:
    seen = {} if observe is None else {"observe": observe}
    return execute(plan_of(suite), Options(("step",), suite.parent / "r", Host("cpu", FAKE), **seen, **options))


def voids(suite: Path) -> list[dict[str, Any]]:
    history = History.read(suite.parent / "r", "loop")
    return [entry.body for entry in history.entries if entry.kind is Kind.VOID]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(*sessions: int) -> None:
        monkeypatch.setattr(conditions, "read", Host0(set(sessions)))

    yield install


def test_a_void_session_is_noted_and_measured_again(voiding: Path, busy: Any) -> None:
    busy(1)
    record = go(voiding)
    assert record is not None
    assert [mark.complete for mark in record.sessions] == [True, True, True]
    assert record.sessions[1].conditions == {"foreign_cpu_share": 0.5}
    [body] = voids(voiding)
    assert (body["code"], body["session"], body["run"]) == ("host_contention", 1, record.run_id)
    assert not {"variant", "arm"} & set(body)
    codes = plan_of(voiding).loaded.suite.rule.void_codes
    assert sessions_of([record], "step", codes) == 2
    evidence = Evidence.of([record], void_codes=codes)
    assert evidence.sessions == 2 and [void.session for void in evidence.voids] == [1]
    assert History.read(voiding.parent / "r", "loop").evidence(plan_of(voiding))[2] == 1


def test_without_the_code_the_same_session_counts(suite: Path, busy: Any) -> None:
    busy(1)
    record = go(suite)
    assert record is not None and len(record.sessions) == 2 and voids(suite) == []


def test_voids_without_end_are_given_up_on(voiding: Path, busy: Any) -> None:
    busy(*range(50))
    said: list[str] = []
    record = go(voiding, lambda event, **facts: said.append(event))
    assert record is not None and len(record.sessions) == 2  # as many as the last look
    assert said.count("session_void") == 2 and said.count("too_many_voids") == 1
    assert len(voids(voiding)) == 2


def test_a_void_that_a_kill_kept_from_the_ledger_is_made_up_for_once(
    voiding: Path, busy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(0)
    whole = Loop._note_voids
    monkeypatch.setattr(Loop, "_note_voids", lambda self: None)

    class KilledError(Exception):
        pass

    def kill(event: str, **facts: Any) -> None:
        if event == "session_done" and facts["session"] == 0:
            raise KilledError

    with pytest.raises(KilledError):
        go(voiding, kill)
    assert voids(voiding) == []
    monkeypatch.setattr(Loop, "_note_voids", whole)
    busy()
    record = go(voiding, resume=True)
    assert record is not None
    assert [body["session"] for body in voids(voiding)] == [0]
    assert sessions_of([record], "step", ("host_contention",)) == 2


def test_what_is_read_around_a_session() -> None:
    before = Reading(0.0, 100.0, 1.0, 2, 5)
    cores = len(os.sched_getaffinity(0))
    after = Reading(10.0, 100.0 + 8.0 * cores, 1.0 + 3.0 * cores, 1, 6)
    assert conditions.between(before, after) == {"foreign_cpu_share": 0.5, "gpus": [2, 1], "ecc_uncorrected": [5, 6]}
    assert conditions.between(before, replace(before, gpus=None)) == {"ecc_uncorrected": [5, 5]}
    less = replace(after, busy_s=0.0, gpus=None, ecc_uncorrected=None)
    assert conditions.between(before, less) == {"foreign_cpu_share": 0.0}


def test_the_host_itself_can_be_read() -> None:
    first = conditions.read("cpu")
    sum(range(100_000))
    second = conditions.read("cpu")
    assert second.wall_s >= first.wall_s and second.own_s >= first.own_s and first.gpus is None
    assert second.busy_s >= first.busy_s > 0.0
