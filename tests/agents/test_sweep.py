"""A sweep's shapes, its operations and its marks, compared with numbers that were computed by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from agents.line_profiler.isolation import time_operation_alone
from agents.line_profiler.lines import PeakRates
from agents.line_profiler.sweep.shapes import SHAPES, make_one_layer_model
from agents.line_profiler.sweep.slices import LayerSlice, record_slice_operations
from agents.line_profiler.sweep.sweep import SweepResult, make_sweep_table, measure_slices, parse_slices
from agents.line_profiler.sweep.sweep_items import (
    SweepLimits,
    collect_distinct_operations,
    mark_measurable_items,
    measure_sweep_item,
)
from agents.line_profiler.sweep.work_queue import ProcessWorkers, SweepError
from tests.support.messages import codes, refused
from tests.support.paths import ROOT

ROOF = PeakRates(1e12, 1e10)
PARAMETERS = {"7b": 7e9, "29b": 29e9, "375b": 375e9, "1t": 1e12}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_their_names(name: str) -> None:
    assert SHAPES[name].parameters == pytest.approx(PARAMETERS[name], rel=0.05)
    assert (SHAPES[name].experts is not None) == (name in ("375b", "1t"))


@pytest.mark.parametrize("name", SHAPES)
def test_a_slice_computes_one_layer_forward_and_backward(name: str) -> None:
    """FLOPs of its matrix products: 6 a weight and token, of the experts those that a token goes to."""
    of = LayerSlice(name, 2, 64)
    shape = make_one_layer_model(SHAPES[name], 64)
    assert shape.layers == 1 and shape.is_expert_layer(0) == (shape.experts is not None)
    weights = shape.matmul_parameter_count - shape.vocab_size * shape.d_model
    assert sum(event.flops for event in record_slice_operations(of)) == pytest.approx(6 * weights * 128)
    assert {event.line[0] for event in record_slice_operations(of)} >= {
        "trainer/model/block.py",
        "kernels/rms_norm/__init__.py",
        "kernels/swiglu/__init__.py",
    }


def test_identical_operations_of_all_slices_are_measured_once() -> None:
    alone = collect_distinct_operations([LayerSlice("7b", 1, 64)], ROOF)
    assert len({item.what for item in alone}) <= len(alone) and sum(item.index < 0 for item in alone) == 1
    assert len(collect_distinct_operations([LayerSlice("7b", 1, 64), LayerSlice("7b", 1, 64)], ROOF)) == len(alone)
    both = collect_distinct_operations([LayerSlice("7b", 1, 64), LayerSlice("7b", 2, 64)], ROOF)
    assert len(alone) < len(both) < 2 * len(alone)  # the casts of weights are the same


def test_an_item_that_does_not_fit_names_the_limit() -> None:
    items = mark_measurable_items(
        collect_distinct_operations([LayerSlice("1t", 1, 64)], ROOF), SweepLimits(1e9, 1.0, 1e9, 1), workers=1
    )
    large = [item for item in items if item.bytes > 1e9]
    assert large and set(codes(item.fits for item in large)) <= {
        "line_profiler.needs_memory",
        "line_profiler.needs_time",
    }
    assert any(not item.fits for item in items)
    none = mark_measurable_items(
        collect_distinct_operations([LayerSlice("1t", 1, 64)], ROOF), SweepLimits(1e9, 1.0, 0.0, 1), workers=1
    )
    assert all(item.fits for item in none) and "line_profiler.no_time" in codes(item.fits for item in none)


def test_operations_of_experts_run_on_made_up_indices() -> None:
    """Where only shapes were recorded, indices must be valid and the experts' rows balanced."""
    names = ("index", "gather", "scatter", "sort", "topk", "cumsum")
    seen = set()
    for event in record_slice_operations(LayerSlice("375b", 1, 16)):
        signature = event.signature
        if (
            signature is None
            or not any(name in signature.operation_name for name in names)
            or signature.tensor_bytes > 1e8
        ):
            continue
        found = time_operation_alone(signature, (None,) * len(signature.leaves), torch.device("cpu"), 0.05)
        assert found.why_not == "" and found.iterations >= 3, str(signature)
        seen.add(signature.operation_name.split(".")[1])
    assert {"index", "gather", "scatter_add", "index_put", "sort"} <= seen


@pytest.mark.long("two workers measure operations of two large models' layers")
def test_a_sweep_measures_fitting_operations_and_marks_the_others(tmp_path: Path) -> None:
    limits = SweepLimits(memory_bytes=2e8, item_s=0.3, total_s=6.0, threads=1)
    slices = [LayerSlice("7b", 1, 16), LayerSlice("1t", 1, 16)]
    found = measure_slices(slices, limits, lambda: ProcessWorkers(measure_sweep_item, 2), 2, "reference")
    assert SweepResult.from_mapping(json.loads(json.dumps(asdict(found)))) == found
    by_model = {one.model: one for one in found.slices}
    marks = {line.how for one in found.slices for line in one.lines}
    assert marks >= {"measured", "roofline"}
    for one in found.slices:
        assert one.seconds == pytest.approx(sum(line.seconds for line in one.lines))
        assert 0 < one.measured_share < 1
    source = (ROOT / "trainer" / "model" / "experts.py").read_text().splitlines()
    place = f"trainer/model/experts.py:{next(n for n, text in enumerate(source, 1) if 'y = by_expert(' in text)}"
    down = next(line for line in by_model["1t"].lines if line.name.startswith(place))
    assert down.how in ("roofline", "both")  # 384 experts are 11 GB
    missing = [item for item in found.items if item.why_not]
    assert missing and all(item.seconds == item.roof_s for item in missing)
    assert "1t" in make_sweep_table(found)


@pytest.mark.parametrize(
    ("given", "code", "data"),
    [
        (("8b", "1", "64"), "line_profiler.no_shape", {"shape": "8b", "known": ["7b", "29b", "375b", "1t"]}),
        (("7b", "0", "64"), "line_profiler.not_numbers", {"option": "--batches", "value": "0"}),
        (("7b", "1", "a"), "line_profiler.not_numbers", {"option": "--sequences", "value": "a"}),
    ],
)
def test_an_invalid_option_is_an_error_that_names_the_allowed_values(
    given: tuple[str, str, str], code: str, data: dict[str, Any]
) -> None:
    with refused(code, SweepError, **data):
        parse_slices(*given)
