"""Fusion and stream candidates of hand-made steps with known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agents.line_profiler.capture import Line, RecordedOperation
from agents.line_profiler.graph import (
    find_concurrency_candidates,
    find_conditions_of_lines,
    find_data_flow_edges,
    find_fusion_candidates,
)
from agents.line_profiler.lines import PeakRates, summarise_lines

MB = 1e6
ROOF = PeakRates(flops_per_s=1e12, bytes_per_s=1e9)


def line(number: int) -> Line:
    return ("made/up.py", number, "")


def event(number: int, reads: tuple[int, ...], writes: tuple[int, ...], **other: object) -> RecordedOperation:
    """A pointwise operation on tensors of one megabyte each, at a tenth of the bandwidth."""
    moved = MB * (len(reads) + len(writes))
    return RecordedOperation(
        line(number), "", bool(other.get("backward")), "aten.mul.Tensor", moved / 1e8, 0.0,
        float(other.get("flops", 0.0)), moved, reads, writes, None,  # type: ignore[arg-type]
    )  # fmt: skip


def candidates(events: list[RecordedOperation]) -> dict[tuple[str, ...], float]:
    lines = summarise_lines(events, {}, step_s=0.1, roof=ROOF)
    return {c.lines: c.bytes_saved for c in find_fusion_candidates(events, lines, ROOF.bytes_per_s, 0.1)}


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"made/up.py:{number}" for number in numbers)


def test_a_chain_is_found_and_its_intermediates_are_counted() -> None:
    events = [event(1, (0,), (1,)), event(2, (1,), (2,)), event(3, (2,), (3,))]
    assert candidates(events) == {names(1, 2, 3): 4 * MB}  # two intermediates, each written once and read once
    found = find_fusion_candidates(events, summarise_lines(events, {}, 0.1, ROOF), ROOF.bytes_per_s, 0.1)
    assert found[0].gain_s == pytest.approx(4 * MB / 1e9) and found[0].intermediates == 2


def test_a_chain_that_runs_from_cache_gains_at_most_its_share_of_the_bytes() -> None:
    events = [replace(event(n, (n - 1,), (n,)), seconds=1e-4) for n in (1, 2, 3)]  # 20 GB/s where a copy reaches one
    (found,) = find_fusion_candidates(events, summarise_lines(events, {}, 0.01, ROOF), ROOF.bytes_per_s, 0.01)
    assert found.bytes_saved == 4 * MB and found.gain_s == pytest.approx(3e-4 * 4 / 6)


def test_an_intermediate_that_another_line_reads_stays_in_memory() -> None:
    events = [event(1, (0,), (1,)), event(2, (1,), (2,)), event(3, (2,), (3,)), event(4, (1,), (4,))]
    assert candidates(events) == {names(2, 3): 2 * MB}


def test_a_chain_is_broken_by_the_backward_of_another_line_but_not_by_its_own() -> None:
    forward = [event(1, (0,), (1,)), event(2, (1,), (2,))]
    assert candidates([*forward, event(2, (9, 1), (10,), backward=True)]) == {names(1, 2): 3 * MB}
    assert candidates([*forward, event(3, (9, 1), (10,), backward=True)]) == {}


def test_a_matrix_product_ends_a_chain() -> None:
    events = [event(1, (0,), (1,)), event(2, (1, 8), (2,), flops=1e12), event(3, (2,), (3,))]
    assert candidates(events) == {}


def test_a_tensor_from_before_the_step_is_not_an_intermediate() -> None:
    assert candidates([event(1, (5,), (5,)), event(1, (5,), (5,))]) == {}  # an update in place of a parameter


def test_branches_are_independent_until_they_join() -> None:
    events = [
        event(1, (0,), (1,)),
        event(2, (1,), (2,)),
        event(3, (1,), (3,)),
        event(4, (3,), (4,)),
        event(5, (2, 4), (5,)),
    ]
    (found,) = find_concurrency_candidates(events, 0.1)
    assert (found.fork, found.branches) == (names(1)[0], (names(2), names(3, 4)))
    assert found.gain_s == pytest.approx(events[1].seconds)  # the shorter branch


def test_an_operation_counts_once_however_many_forks_lead_to_it() -> None:
    tables = [event(8, (6,), (8,)), event(9, (7,), (9,))]  # both branches read both of these as well
    events = [
        event(1, (0,), (1,)),
        *tables,
        event(2, (1, 8, 9), (2,)),
        event(3, (1, 8, 9), (3,)),
        event(5, (2, 3), (5,)),
    ]
    (found,) = find_concurrency_candidates(events, 0.1)
    assert found.times == 1 and found.gain_s == pytest.approx(events[3].seconds)


def test_a_line_that_depends_on_another_is_not_a_stream_candidate() -> None:
    assert find_concurrency_candidates([event(1, (0,), (1,)), event(2, (1,), (2,)), event(3, (1, 2), (3,))], 0.1) == []


def test_edges_go_from_the_last_writer() -> None:
    found = find_data_flow_edges([event(1, (0,), (1,)), event(2, (1,), (1,)), event(3, (1,), (3,))], {})
    assert [(edge.source, edge.target) for edge in found] == [names(1, 2), names(2, 3)]


def test_conditional_lines_are_recognised_from_the_source() -> None:
    lines = (
        ("if self.experts is not None:", 0),
        ("tensor.scatter(self.apply_mlp(", 1),
        ("y_BTD, extras = self", 1),
        ("self.weight(self.down_bias)", 2),
    )
    from agents.line_profiler.lines import read_source_lines

    source = read_source_lines("trainer/model/block.py")
    start = next(n for n, text in enumerate(source, 1) if "def run(" in text)
    for text, how_many in lines:
        number = next(n for n, found in enumerate(source, 1) if n > start and text in found)
        assert len(find_conditions_of_lines("trainer/model/block.py")[number]) == how_many, text
