"""The record of executed code, and the distances of two runs in weights, moments and scores."""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from factory.evals.tasks import EvalItem, compute_bits_per_byte_by_domain
from factory.gates.patch.checkpoint_difference import (
    compute_squared_moment_distances,
    compute_weight_drift,
    find_checkpoint_difference,
)
from factory.gates.patch.execution_recorder import (
    RECORDER_FILE,
    ExecutedCode,
    ExecutionRecorder,
    iterate_code_objects,
    make_code_object_name,
)
from factory.gates.patch.held_out_scores import (
    compute_gains_by_document,
    measure_bits_per_byte,
    read_held_out_texts,
    score_weights,
)
from factory.gates.patch.matrix.unexecuted_code import find_unexecuted_native_files
from factory.gates.training_start import find_training_start
from factory.ledger.plant import Plant
from tests.support.factory.code_loop import make
from tests.support.gates.reasons import Expected, expect, tells
from tests.support.paths import ROOT
from tests.support.trainer.segments import recipe_with
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.format import Checkpoint

# -- what was executed -----------------------------------------------------------------------------------------------------
CODE = """\
def double(x):
    if x > 5:
        return 0
    return x * 2


def other(): return 1
"""


WATCHED = {"trainer/a.py": [2], "kernels/b.py": [4, 7], "trainer/gone.py": [1]}


def written(folder: Path, *names: str, text: str = CODE) -> dict[str, dict[str, Any]]:
    """Files, executed as modules."""
    recorder = ExecutionRecorder(str(folder), {})
    recorder.watch.install()
    made: dict[str, dict[str, Any]] = {}
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        code, _ = recorder.watch.compile_watched(text, name, WATCHED.get(name, []), str(path))
        made[name] = {"code": code, "names": {}}
        exec(made[name]["code"], made[name]["names"])
    return made


NAMES = ("trainer/a.py", "kernels/b.py", "policies/c.py", "trainers/d.py")


@pytest.mark.parametrize("thread", [False, True])
def test_executed_lines_of_the_trainer_and_the_kernels_are_recorded(tmp_path: Path, thread: bool) -> None:
    files = written(tmp_path, *NAMES)
    recorder = ExecutionRecorder(str(tmp_path), WATCHED)
    run = lambda: [files[name]["names"]["double"](1) for name in NAMES]
    before = sys.gettrace()
    recorder.start()
    if thread:
        sys.settrace(before)
        started = threading.Thread(target=run)
        started.start()
        started.join()
    else:
        run()
    recorder.stop()
    for late in (run, threading.Thread(target=run).run):
        late()
    late_thread = threading.Thread(target=lambda: files["kernels/b.py"]["names"]["other"]())
    late_thread.start()
    late_thread.join()
    sys.settrace(before)
    found = recorder.to_json()
    assert found["lines"] == {"trainer/a.py": [1, 2, 4], "kernels/b.py": [1, 2, 4]}
    assert found["traced"] == found["launched"] == {}
    assert found["instructions"].keys() == {"trainer/a.py", "kernels/b.py"}, "and not of files without watched lines"
    (double,) = (code for code in iterate_code_objects(files["trainer/a.py"]["code"]) if code.co_name == "double")
    assert {name for name, _ in found["instructions"]["trainer/a.py"]} == {make_code_object_name(double)}
    assert found["instructions"]["trainer/a.py"] == sorted(found["instructions"]["trainer/a.py"])
    assert json.loads(json.dumps(found))["instructions"]["trainer/a.py"], "no set and no tuple in it"


def test_code_that_the_compiler_makes_is_not_recorded_as_code_of_the_file(tmp_path: Path) -> None:
    """torch.compile makes functions of its own, under a file's name."""
    made = written(tmp_path, "trainer/a.py")["trainer/a.py"]["names"]
    other: dict[str, Any] = {}
    exec(compile(CODE.replace("* 2", "+ 2"), str(tmp_path / "trainer" / "a.py"), "exec"), other)
    recorder = ExecutionRecorder(str(tmp_path), WATCHED)
    recorder.start()
    other["double"](1), other["double"](1)
    recorder.stop()
    assert recorder.to_json()["lines"] == recorder.to_json()["instructions"] == {}
    recorder.start()
    made["double"](1), made["double"](9)
    recorder.stop()
    assert recorder.to_json()["lines"] == {"trainer/a.py": [1, 2, 3, 4]}


def test_a_file_that_is_not_python_has_no_code(tmp_path: Path) -> None:
    for name, text in (("a", "x = = 1"), ("b", "x = 1\0"), ("c", "x = 1")):
        (tmp_path / name).write_text(text)
    found = ExecutionRecorder(str(tmp_path), dict.fromkeys("abcd", [1])).precise
    assert [len(found[f"{tmp_path}/{name}"]) for name in "abcd"] == [0, 0, 1, 0]


def test_code_names_distinguish_functions_on_the_same_line() -> None:
    lines = "f, g = (lambda x: x), (lambda x: x)\n"
    names = [make_code_object_name(code) for code in iterate_code_objects(compile(lines, "a", "exec"))]
    assert len(set(names)) == 3 and [name.split(":")[:2] for name in names[1:]] == [["<lambda>", "1"]] * 2
    assert all(len(name.rpartition(":")[2]) == 8 for name in names)
    assert names == [make_code_object_name(code) for code in iterate_code_objects(compile(lines, "b", "exec"))]


def test_records_of_several_processes_are_added() -> None:
    left = {
        "lines": {"a": [1, 2]}, "instructions": {"a": [["f", 1]]}, "traced": {"a": [[1, 2, 3, 4]]}, "launched": {"a": [[1, 9]]},
        "conditions": {"a": [[0, "true"]]},
    }  # fmt: skip
    found, other = ExecutedCode(), ExecutedCode()
    found.add_record(left)
    other.add_record(
        {
            "lines": {"a": [2, 3], "b": [4]},
            "instructions": {"a": [["f", 2]]},
            "traced": {"b": [[5, 6, 7, 8]]},
            "launched": {"a": [[2, 3]]},
            "conditions": {"a": [[0, "false"]]},
        }
    )
    found.merge_executed_code(other)
    assert found == ExecutedCode(
        {"a": {1, 2, 3}, "b": {4}}, {"a": {("f", 1), ("f", 2)}}, {"a": {(1, 2, 3, 4)}, "b": {(5, 6, 7, 8)}}, {"a": {(1, 9), (2, 3)}},
        {"a": {(0, "true"), (0, "false")}},
    )  # fmt: skip


COMPILED = """
    import json, runpy, sys, torch
    from types import SimpleNamespace

    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def run(function, *arguments, **settings):
        return function.fn, arguments, settings

    InterpretedFunction.run = JITFunction.run = run
    recorder = runpy.run_path(sys.argv[1])["ExecutionRecorder"](sys.argv[2], {"kernels/a.py": [1], "kernels/b.py": [1], "kernels/c.py": range(1, 9)})
    recorder.watch_compiler()
    spaces = [runpy.run_path(f"{sys.argv[2]}/{name}") for name in ("kernels/a.py", "kernels/b.py", "elsewhere/c.py")]
    for kind, space, settings in zip((InterpretedFunction, JITFunction, JITFunction), spaces, ({}, {"warmup": True}, {"warmup": False})):
        held = SimpleNamespace(fn=space["double"])
        assert kind.run(held, 1, 2, **settings) == (held.fn, (1, 2), settings)
    JITFunction.run(SimpleNamespace(fn=spaces[0]["other"]))
    for name in ("c", "d"):
        double = torch.compile(runpy.run_path(f"{sys.argv[2]}/kernels/{name}.py")["double"], backend="eager")
        assert double(torch.ones(3), 1).tolist() == [2, 2, 2]
    print(json.dumps(recorder.to_json()))
"""


def test_launched_and_traced_code_is_recorded_in_place_of_lines(tmp_path: Path) -> None:
    """In a process of its own: the recorder changes the compilers."""
    pytest.importorskip("triton")
    written(tmp_path, "kernels/a.py", "kernels/b.py", "elsewhere/c.py")
    text = CODE.replace("(x):", "(x, y):").replace("x >", "y >")
    written(tmp_path, "kernels/c.py", "kernels/d.py", text=text)
    command = [sys.executable, "-c", dedent(COMPILED), str(RECORDER_FILE), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["launched"] == {"kernels/a.py": [[1, 4], [7, 7]]}
    assert found["traced"].keys() == {"kernels/c.py"} and set(found["lines"]["kernels/c.py"]) - {1} == {2, 4}
    (product,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.BinOp))
    place = [product.lineno, product.col_offset, product.end_lineno, product.end_col_offset]
    assert place in found["traced"]["kernels/c.py"] and not any(
        first == 3 for first, *_ in found["traced"]["kernels/c.py"]
    )


# -- what was left ---------------------------------------------------------------------------------------------------------
def weights(**values: list[float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("candidate", "baseline", "of_one", "found"),
    [
        ({"a": [3.0, 4.0]}, {"a": [3.0, 4.0]}, True, 0.0),
        ({"a": [3.0, 5.0]}, {"a": [3.0, 4.0]}, True, 0.2),
        ({"a": [3.0, 4.0], "b": [2.0]}, {"a": [3.0, 4.0], "b": [1.0]}, True, 0.5),  # half that of the worst
        ({"a": [3.0, 4.0], "b": [2.0]}, {"a": [3.0, 4.0], "b": [1.0]}, False, 26**-0.5),
        ({"a": [0.1]}, {"a": [0.0]}, True, 1e9),  # it did not move
        ({"a": [0.1]}, {"a": [0.0]}, False, 1e9),
        ({}, {}, True, 0.0),
    ],
)
def test_the_distance_of_weights_is_a_share_of_their_movement(
    candidate: Any, baseline: Any, of_one: bool, found: float
) -> None:
    origin = {name: torch.zeros(len(value)) for name, value in baseline.items()}
    assert compute_weight_drift(weights(**candidate), weights(**baseline), origin, of_one) == pytest.approx(found)
    if of_one:
        assert compute_weight_drift(weights(**candidate), weights(**baseline), origin) == pytest.approx(found)
    moved = {name: tensor + 7 for name, tensor in origin.items()}
    ours, theirs = ({name: tensor + 7 for name, tensor in weights(**side).items()} for side in (candidate, baseline))
    assert compute_weight_drift(ours, theirs, moved, of_one) == pytest.approx(found, rel=1e-4)


EQUAL = ("step", "kind", "first_step", "data_plan", "sampler", "skipped")
STATE: dict[str, Any] = dict.fromkeys(EQUAL, 1) | {
    "detector": {"a": 9.0},
    "recipe": {"compile": True, "batch": {"micro_sequences": 2, "sequences": 4}, "seed": 1},
}
MOMENTS = weights(**{"exp_avg.w": [1.0, 1.0], "exp_avg.v": [1.0], "exp_avg_sq.w": [1.0, 1.0], "step.w": [3.0]})


def test_the_distance_of_moments_is_computed_for_each_kind() -> None:
    other = weights(**{"exp_avg.w": [1.0, 3.0], "exp_avg.v": [0.0], "exp_avg_sq.w": [1.0, 1.5], "step.w": [3.0]})
    found = compute_squared_moment_distances(Checkpoint({}, MOMENTS, {}), Checkpoint({}, other, {}))
    assert found == {"exp_avg": pytest.approx(5.0), "exp_avg_sq": pytest.approx(0.25), "step": 0.0}


AWAY = {"exp_avg": 4.0, "exp_avg_sq": 1.0}


@pytest.mark.parametrize(
    ("state", "moments", "expected"),
    [
        ({}, {}, None),
        ({"more": 1}, {}, None),
        *(({key: 2}, {}, expect("patch.state_differs", keys=[key])) for key in EQUAL),
        *(({key: None}, {}, expect("patch.state_lacks", keys=[key])) for key in ("step", "detector", "recipe")),
        ({"detector": {"a": 10.0}}, {}, None),
        ({"detector": {"a": 10.1}}, {}, expect("patch.state_differs", keys=["detector"])),
        ({"detector": {"b": 9.0}}, {}, expect("patch.state_differs", keys=["detector"])),
        ({"recipe": STATE["recipe"] | {"compile": False}}, {}, None),
        ({"recipe": STATE["recipe"] | {"batch": {"micro_sequences": 1, "sequences": 4}}}, {}, None),
        (
            {"recipe": STATE["recipe"] | {"batch": {"micro_sequences": 2, "sequences": 8}}},
            {},
            expect("patch.state_differs", keys=["recipe"]),
        ),
        ({"recipe": STATE["recipe"] | {"batch": 3}}, {}, expect("patch.state_differs", keys=["recipe"])),
        ({"recipe": STATE["recipe"] | {"seed": 2}}, {}, expect("patch.state_differs", keys=["recipe"])),
        ({}, {"exp_avg.w": [2.0, 1.0]}, None),  # half of what leaving out steps causes
        ({}, {"exp_avg.w": [2.01, 1.0]}, expect("patch.optimiser_apart", kind="exp_avg", most=0.5)),
        ({}, {"exp_avg.v": [2.5]}, expect("patch.optimiser_apart", kind="exp_avg", share=0.75)),
        ({}, {"exp_avg_sq.w": [1.0, 1.6]}, expect("patch.optimiser_apart", kind="exp_avg_sq", share=0.6)),
        ({}, {"step.w": [4.0]}, expect("patch.optimiser_step", tensor="step.w")),
        ({}, {"exp_avg.v": [1.0, 1.0]}, expect("patch.optimiser_shape", tensor="exp_avg.v")),
        ({}, {"exp_avg.v": None}, expect("patch.optimiser_shape", tensor="exp_avg.v")),
        ({}, {"more.w": [1.0]}, expect("patch.optimiser_apart", kind="more", share=math.inf)),
    ],
)
def test_differences_of_checkpoints_are_found(
    state: dict[str, Any], moments: dict[str, Any], expected: Expected | None
) -> None:
    ours = {key: value for key, value in (STATE | state).items() if value is not None}
    kept = MOMENTS | {name: value if value is None else torch.tensor(value) for name, value in moments.items()}
    candidate = Checkpoint({}, {name: value for name, value in kept.items() if value is not None}, ours)
    found = find_checkpoint_difference(candidate, Checkpoint({}, MOMENTS, STATE), AWAY, 0.5)
    assert tells([found], expected) if found and expected else found == expected, found
    double = Checkpoint({}, MOMENTS | {"exp_avg.v": MOMENTS["exp_avg.v"].double()}, STATE)
    other_dtype = find_checkpoint_difference(double, Checkpoint({}, MOMENTS, STATE), AWAY, 0.5)
    assert other_dtype and other_dtype.code == "patch.optimiser_shape"


def item(domain: str, cluster: str, value: float, weight: float) -> EvalItem:
    return EvalItem("bits", f"{domain} {cluster} {weight}", domain, cluster, value, weight)


def test_a_source_document_counts_once() -> None:
    nat = 0.6931471805599453  # of a bit
    theirs = [
        item("docs", "b", 9 * nat, 2.0),
        item("docs", "a", 4 * nat, 4.0),
        item("docs", "a", 4 * nat, 8.0),
        item("code", "a", nat, 1.0),
    ]
    theirs += [item("chat", "a", 1.0, 0.0)]
    ours = [
        EvalItem(one.task, one.item, one.domain, one.cluster, one.value - more * nat, one.weight)
        for one, more in zip(theirs, (1, 2, 4, -3, 1))
    ]
    assert compute_gains_by_document(ours, theirs) == {
        "code": [pytest.approx(-3.0)],
        "docs": [pytest.approx(0.5), pytest.approx(0.5)],
    }
    for other in (theirs[:-1], [*theirs[:-1], item("chat", "a", 1.0, 1.0)], [*theirs[:-1], theirs[0]]):
        with pytest.raises((ValueError, AssertionError)):
            compute_gains_by_document(ours, other)


def test_held_out_texts_are_limited_and_from_the_dev_half(tmp_path: Path) -> None:
    made = make()
    plant, start = Plant(made.workspace, made.ledger), find_training_start(made.ledger)
    assert start is not None
    many, policy = read_held_out_texts(60, 2048, plant)
    few, short = read_held_out_texts(1, 2048, plant)[0], read_held_out_texts(60, 40, plant)[0]
    sealed = {row["key"] for row in made.ledger.read("SELECT key FROM held_out WHERE sealed")}
    keys = {text.document.key for text in many}
    assert keys and not keys & sealed and len(keys) == len(many) == len(short)
    domains = [text.document.domain for text in few]
    assert sorted(domains) == sorted({text.document.domain for text in many}) and len(few) <= len(many)
    assert all(text.bytes <= 40 < 1000 < other.bytes <= 2048 for text, other in zip(short, many, strict=True))
    origin = checkpoints.read_tensors(start.checkpoint, "model")
    found = score_weights(origin, start.recipe, short, policy)
    assert [one.weight for one in found] == [text.bytes for text in short]
    assert measure_bits_per_byte(origin, start.recipe, short, policy) == compute_bits_per_byte_by_domain(found)
    assert recipe_with().model.vocab_size == start.recipe["model"]["vocab_size"]


@pytest.mark.parametrize(
    ("path", "loaded", "checked", "executed"),
    [
        ("kernels/swiglu/swiglu.cpp", {"swiglu"}, {"swiglu"}, True),
        ("kernels/swiglu/swiglu.cpp", {"swiglu"}, {"rms_norm"}, False),  # loaded, but no check called the op
        ("kernels/swiglu/swiglu.cpp", {"attention", "swiglu_more"}, {"swiglu"}, False),
        ("kernels/swiglu/fused.cpp", {"swiglu.fused"}, {"swiglu"}, True),
        ("kernels/swiglu/own.h", {"swiglu"}, {"swiglu"}, True),
        ("kernels/native/numbers.h", {"attention"}, set(), True),
        ("kernels/native/numbers.h", set(), {"swiglu"}, False),
        ("kernels/swiglu/swiglu.cu", {"swiglu_cuda"}, {"swiglu"}, False),
        ("kernels/swiglu/cpp.py", set(), set(), True),  # Python is looked at line by line
    ],
)
def test_a_cpp_file_counts_as_executed_if_a_checked_op_loaded_it(
    path: str, loaded: set[str], checked: set[str], executed: bool
) -> None:
    code = ExecutedCode()
    code.merge_executed_code(ExecutedCode(native=loaded))
    found = find_unexecuted_native_files([path], checked, code)
    assert [part.path for part in found] == ([] if executed else [path])
    assert {part.required_device for part in found} <= {"cuda" if path.endswith(".cu") else ""}


def test_the_record_names_the_cpp_libraries_that_the_process_loaded(tmp_path: Path) -> None:
    program = (
        f"import runpy, torch\nrecorder = runpy.run_path({str(RECORDER_FILE)!r})\n"
        "before = recorder['list_native_libraries']()\n"
        "from kernels import native\nnative.load_library('swiglu')\n"
        "print(before, recorder['ExecutionRecorder']('.', {}).to_json()['native'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[0] == "[] ['swiglu']"
    record = ExecutedCode()
    record.add_record(
        {"lines": {}, "instructions": {}, "traced": {}, "launched": {}, "conditions": {}}
    )  # an older driver's
    assert record.native == set()
