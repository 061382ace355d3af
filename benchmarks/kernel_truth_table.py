"""From rows of readings to errors, the criterion, each tool's worst case, and a table. Pure; no clock, no GPU.

A row is one kernel in one cache state. Its reference is what the profiler (CUPTI) saw in that state: `span`, `sum`, or
the `bracket` of both, within which no error is counted. They are the same for one kernel, and the same for every tool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

OURS = "kbench"
RAW = "kbench, with gaps"
WITHIN_SHARE, WITHIN_US = 0.03, 0.3
BEHIND_SHARE, BEHIND_US = 0.005, 0.1
DECLINING = "EVENT_FLOOR"
"""kbench's own word that a flushed single call is too short for an event pair: it declines, rotation is the answer."""


REFERENCES = ("span", "sum", "bracket")
Bounds = tuple[float, float]


def tool_errors(readings: Sequence[Mapping[str, float]], references: Sequence[Bounds]) -> dict[str, float]:
    """One tool's readings (`us`, perhaps `sm_mhz`), round by round, against the profiler's of the same rounds."""
    nearest = [min(max(one["us"], low), high) for one, (low, high) in zip(readings, references, strict=True)]
    errors = [one["us"] - reference for one, reference in zip(readings, nearest, strict=True)]
    shares = [error / reference for error, reference in zip(errors, nearest, strict=True)]
    values = [reading["us"] for reading in readings]
    clocks = [reading["sm_mhz"] for reading in readings if reading.get("sm_mhz")]
    found = {"us": median(values), "error_us": median(errors), "error_pct": 100 * median(shares)}
    found["spread_pct"] = 100 * (max(values) - min(values)) / median(values)
    return found | ({"sm_mhz": median(clocks)} if clocks else {})


def tolerance_us(reference_us: float) -> float:
    return max(WITHIN_US, WITHIN_SHARE * reference_us)


def worst(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each tool's worst case: where its error is the largest multiple of the tolerance of DESIGN §12."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, tool in row["tools"].items():
            multiple = abs(tool["error_us"]) / tolerance_us(row["profiler_us"])
            if name not in found or multiple > found[name]["tolerances"]:
                found[name] = {
                    "kernel": row["kernel"],
                    "state": row["state"],
                    "error_us": tool["error_us"],
                    "error_pct": tool["error_pct"],
                    "tolerances": multiple,
                }
    return found


def criterion(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Ours within 3 % or 0.3 µs on every row, and never further off than the best other tool by max(0.5 %, 0.1 µs)."""
    failures: list[str] = []
    declined: list[str] = []
    judged = 0
    for row in rows:
        place, reference = f"{row['kernel']}, {row['state']}", row["profiler_us"]
        if OURS not in row["tools"]:
            failures.append(f"{place}: {OURS} gave no reading")
            continue
        if DECLINING in row.get("flags", ()):
            declined.append(f"{place}: {OURS} says {DECLINING}")
            continue
        judged += 1
        error = abs(row["tools"][OURS]["error_us"])
        if error > tolerance_us(reference):
            failures.append(f"{place}: {error:.3f} µs off {reference:.3f} µs ({100 * error / reference:.2f} %)")
        others = {name: abs(tool["error_us"]) for name, tool in row["tools"].items() if not name.startswith(OURS)}
        if others:
            best = min(others, key=lambda name: others[name])
            if error - others[best] > max(BEHIND_US, BEHIND_SHARE * reference):
                failures.append(f"{place}: {error:.3f} µs off, {best} only {others[best]:.3f} µs")
    return {"holds": judged > 0 and not failures, "judged": judged, "failures": failures, "declined": declined}


def with_reference(rows: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The same rows against one of `REFERENCES`: errors are computed again from the rounds that are kept."""
    low, high = ("sum", "span") if kind == "bracket" else (kind, kind)
    judged = []
    for row in rows:
        references = [(min(one[low], one[high]), one[high]) for one in row["profiled"]]
        tools = {
            name: tool_errors(readings, _own(readings, low, high) or _paired(references, len(readings)))
            for name, readings in row["readings"].items()
            if readings
        }
        judged.append({**row, "profiler_us": median(upper for _, upper in references), "tools": tools})
    return judged


def without_gaps(row: Mapping[str, Any], calibration: Sequence[float], calibrator_us: float | None) -> dict[str, Any]:
    """The row with kbench's readings as kernel times: less what the calibrator read beyond its own kernel's time.

    Per node of a graph; per call where each was flushed. A replay that the profiler watched has wider gaps, and shows
    them: there the one between calls is taken off.
    """
    readings = dict(row["readings"])
    if OURS not in readings:
        return {**row, "gap_per_kernel_us": None}
    flushed = row["state"] == "flush"
    gap = median(calibration) - calibrator_us if calibration and calibrator_us is not None else None
    count = 1 if flushed else row["kernels"]

    def off(one: Mapping[str, float]) -> float:
        if "between" in one and not flushed:
            return one["between"]
        return 0.0 if gap is None else count * gap

    readings[RAW] = readings[OURS]
    readings[OURS] = [{**one, "us": one["us"] - off(one)} for one in readings[OURS]]
    return {**row, "readings": readings, "gap_per_kernel_us": gap}


def _own(readings: Sequence[Mapping[str, float]], low: str, high: str) -> list[Bounds]:
    """What the profiler saw of the very calls that a tool timed; empty where it did not watch all of them."""
    if not all("span" in one for one in readings):
        return []
    return [(min(one[low], one[high]), one[high]) for one in readings]


def _paired(references: Sequence[Bounds], rounds: int) -> list[Bounds]:
    """A reference for each round: the mean of the profiles before and after it where it lies between two, else all."""
    if len(references) == rounds + 1:
        return [((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in pairwise(references)]
    return [(median(low for low, _ in references), median(high for _, high in references))] * rounds


# ------------------------------------------------------------------------------------------------- words

LEGEND = """
Every cell is the tool's error against the profiler in the same cache state, in µs and in percent.

- **state**: what precedes a call. `hot`: the same call, same buffers. `cold`: as many input sets in turn as make at
  least 3×L2, all captured. `flush`: {flush_mib} MiB written before each call, as do_bench does. The label behind it is
  what kbench's check of the sizes says: `warm` where too much or too little data make the wish impossible.
- **profiler µs**: CUPTI through torch.profiler, of the same calls in the same state. **sum**: kernel durations of a
  call, added up. **span**: from its first kernel's start to its last one's end, so gaps within a call count, those
  between calls do not. For one kernel both are its duration. Errors are against the **{reference}**. Profiling widens
  gaps (see `gap`), so for calls of several kernels the truth lies between sum and span: the bracket.
- **same replay**: one replay under the profiler, by kbench's clock and by the profiler's, first kernel to last, a call.
- Kernels below {long_us:.0f} µs are read before the process first profiles, where profiling would slow launches down.
  Longer ones run at a clock that the power cap moves: there the profiler watches each tool's own run, and the reference
  is what it saw of the very calls that the tool timed (the later half of them; nvbench excepted), after the device was
  kept busy for {settle_ms:.0f} ms.
- **kbench** is kernel time, **kbench, with gaps** what a call takes on the device in a replay, which is what level 1's
  verdicts compare. Between them lies the gap to the next graph node (after a flush: what an event pair reads of
  itself). It is the same for all kernels in one cache state and is measured on another kernel, which stands in no row
  (`torch.neg`): its reading beside each row's, less its own profiler time. In a run that the profiler watches, gaps are
  wider and seen: there it is the one between calls.
- A copy captured in a graph is a memcpy node, which is slower than the copy kernel of an eager call: hence two times.
- A child process holds a second CUDA context, asleep, throughout: the state in which kbench's workers are measured.
- **nvbench** resets the device, so it runs in a process of its own before the others: not interleaved with them.
- **EVENT_FLOOR**: kbench's own word, in the state `flush`, that an event pair around one such short call reads too much
  of itself. It declines that reading (the row is shown, not judged); rotation (`cold`) is what it offers instead.
- **worst case**: where the error is the largest multiple of max(0.3 µs, 3 %).
"""


def markdown(document: Mapping[str, Any]) -> str:
    rows = document["rows"]
    names = sorted({name for row in rows for name in row["tools"]}, key=lambda name: (not name.startswith(OURS), name))
    lines = ["# Timers against profiler kernel time", "", _where(document), ""]
    verdict = document["criterion"]
    held = {kind: "holds" if document["criterion_by"][kind]["holds"] else "missed" for kind in REFERENCES}
    lines.append(
        f"Criterion {'holds' if verdict['holds'] else 'missed'} on {verdict['judged']} rows, judged against the"
    )
    lines.append(
        f"{document['settings']['reference']} ({', '.join(f'{kind}: {said}' for kind, said in held.items())})."
    )
    facts = [f"{name} {value:.3f}" for name, value in document["facts"].items() if isinstance(value, float)]
    lines += ["", f"A graph node of the smallest kernel, µs: {', '.join(facts)}.", ""] if facts else [""]
    lines += [f"- missed: {text}" for text in verdict["failures"]] + [
        f"- declined: {text}" for text in verdict["declined"]
    ]
    lines += [
        "",
        "## Worst case of each tool",
        "",
        *_table(["tool", "kernel", "state", "error", "× tolerance"], _worst(document)),
    ]
    head = ["kernel", "state (label)", "profiler sum / span µs", "kernels", "gap µs"]
    head += ["same replay: kbench / profiler µs", "SM MHz", *names]
    lines += ["", "## Every case", "", *_table(head, [_cells(row, names) for row in rows])]
    settings = document["settings"]
    lines.append(LEGEND.format_map(settings).rstrip())
    for name, why in document.get("absent", {}).items():
        lines.append(f"- {name} is absent: {why}")
    for text in document.get("problems", ()):
        lines.append(f"- problem: {text}")
    return "\n".join(lines) + "\n"


def _where(document: Mapping[str, Any]) -> str:
    facts = [f"{name} {value}" for name, value in document["environment"].items()]
    return "; ".join(facts) + "."


def _worst(document: Mapping[str, Any]) -> list[list[str]]:
    ordered = sorted(document["worst"].items(), key=lambda item: item[1]["tolerances"])
    return [[name, case["kernel"], case["state"], _error(case), f"{case['tolerances']:.2f}"] for name, case in ordered]


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    shown = [_error(row["tools"][name]) if name in row["tools"] else "" for name in names]
    both = f"{row['profiler_sum_us']:.3f} / {row['profiler_span_us']:.3f}"
    clock = f"{row['sm_mhz']:.0f}" if row.get("sm_mhz") else ""
    state = f"{row['state']} ({row['label']})" if row["label"] != row["state"] else row["state"]
    flags = f" {' '.join(row['flags'])}" if row.get("flags") else ""
    replay = f"{row['kbench_same_replay_us']:.3f} / {row['profiler_period_us']:.3f}" if row["state"] != "flush" else ""
    facts = [row["kernel"], state + flags, both, str(row["kernels"]), f"{row['gap_us']:.2f}", replay, clock]
    return [*facts, *shown]


def _error(tool: Mapping[str, Any]) -> str:
    return f"{tool['error_us']:+.2f} ({tool['error_pct']:+.1f} %)"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
