"""Points of [step] that cannot be measured are refused before anything runs, with file, line and remedy."""

from __future__ import annotations

import pytest

from kbench.plan import make_plan

from .conftest import Edit, problems

STEP = '[step]\npoints = ["1*1@127"]'
SAME = ('[variants.b]\nextends = "a"\npage_size = 64', '[variants.b]\nextends = "a"')


def at(point: str) -> tuple[str, str]:
    return STEP, f'[step]\npoints = ["1*1@127", "{point}"]'


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("4*4@900:3", "verifies no drafted tokens"),
        ("2*64@900c+1*1@100", "cuts one prompt a step"),
        ("1*1@100+2*64@900c", "cuts one prompt a step"),
        ("1*64@900c", "samples nothing"),
        ("1*1@200000", "a context of 200,000 tokens"),
        ("8*1@900;page=32", "whose claim is pages of 16 and 64"),
        ("8*1@900;moe=hot", "tiny has no experts"),
        ("8*1@60;prefix_share=0.5", "no whole page of history is shared"),
        ("1*1@900;prefix_share=0.5", "shares its prefix with nobody"),
        ("8*1@900;graph=maybe", "attribute graph=maybe"),
    ],
)
def test_a_point_that_cannot_be_measured_is_one_line(load: Edit, point: str, said: str) -> None:
    (problem,) = problems(load, at(point))
    assert said in problem.what
    assert problem.key == "step.points[1]"
    assert problem.line == 23
    assert problem.remedy


def test_page_and_graph_are_checked_against_the_arms_implementations(load: Edit) -> None:
    blocked = ('decode = "sdpa-gather"', 'decode = "blocked"')
    found = problems(load, SAME, blocked, at("8*1@900;page=8"))
    assert {problem.what for problem in found} >= {
        "8*1@900;page=8: blocked cannot serve a so: page_size: wants 8, has a multiple of 16"
    }
    found = problems(load, SAME, blocked, at("8*1@900;graph=on"))
    assert all("graph: wants single-token capture" in problem.what for problem in found)
    load(SAME, blocked, at("8*1@900;page=32;graph=off;tail=full"))


def test_tails_that_differ_between_the_arms_are_refused(load: Edit) -> None:
    (problem,) = problems(load, ("page_size = 64", "page_size = 128"), at("8*1@900;tail=full"))
    assert "makes 8*1@960 and 8*1@1024 of it" in problem.what


def test_a_recorded_load_must_be_there_and_counts_by_its_content(load: Edit) -> None:
    expert = ('preset = "tiny"', 'preset = "tiny-moe"')
    point = at("8*1@900;moe=recorded:loads.json")
    (problem,) = problems(load, expert, point)
    assert "no file of loads" in problem.what
    (problem,) = problems(load, expert, at("8*1@900;moe=zipf:21"))
    assert "the exponent of zipf" in problem.what and "0 to 20" in problem.remedy


def test_kernels_take_no_attributes(load: Edit) -> None:
    kernel = '[kernel]\npoints = ["1*1@127"]'
    for point in ("1*1@127;graph=off", "1*1@127+64@900c"):
        (problem,) = problems(load, (kernel, f'[kernel]\npoints = ["{point}"]'))
        assert "a kernel computes on lengths" in problem.what


def test_attributes_make_cases_of_their_own_and_are_locked(load: Edit) -> None:
    plain, odd = make_plan(load()), make_plan(load(at("1*1@127;graph=off;sampling=topkp")))
    assert [str(case) for case in odd.at("step")] == [
        "step/step/tiny/1*1@127",
        "step/step/tiny/1*1@127;graph=off;sampling=topkp",
    ]
    assert plain.lock_hash != odd.lock_hash
    same = make_plan(load(at("1*1@127;sampling=greedy;graph=auto")))
    assert same.at("step") == plain.at("step")


def test_a_regime_names_an_attributed_cell(load: Edit) -> None:
    loaded = load(
        at("1*1@127;graph=off"),
        ('trace_class = ["chat"]\npoints = ["1*1@127"]', 'trace_class = ["chat"]\npoints = ["1*1@127;graph=off"]'),
    )
    assert not [problem for problem in loaded.warnings if "not measured" in problem.what]
