"""Invalid task files are refused with their name before anything is measured or loaded."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from factory.core.workspace import Workspace
from factory.tasks.items import TaskError
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import load_task, load_task_by_name
from tests.support.factory.task_files import choice_items, programs, sums, write_lm_eval_task, write_task
from tests.support.messages import refused, says

POLICY = TasksPolicy()
Expected = str | tuple[str, dict[str, Any]]  # as ``says`` takes it


def with_item(number: int, items: list[dict[str, Any]] | None = None, **changes: Any) -> list[dict[str, Any]]:
    items = choice_items() if items is None else items
    items[number] |= changes
    return [{key: value for key, value in item.items() if value is not ...} for item in items]


CHOICE, MATHS, CODE = "multiple_choice", "maths", "code"


@pytest.mark.parametrize(
    ("kind", "items", "record", "expected"),
    [
        (CHOICE, [], None, ("task_file.few_items", {"count": 0, "limit": 8})),
        (CHOICE, with_item(3, answer=...), 4, "'answer'"),
        (CHOICE, with_item(3, answer=4), 4, "answer 4 names no choice"),
        (CHOICE, with_item(3, choices=["A", "A", "B"], answer="A"), 4, ("items.same_choices", {})),
        (CHOICE, with_item(3, answer="none of them"), 4, "'none of them' names no choice"),
        (CHOICE, with_item(3, id="q1"), None, ("items.repeated_id", {"id": "q1", "first": 2, "second": 4})),
        (CHOICE, with_item(3, colour="red"), 4, "'colour'"),
        (CHOICE, with_item(3, choices=["a"]), 4, "'choices'"),
        (CHOICE, with_item(3, choices=["a", "a"], answer=0), 4, ("items.same_choices", {})),
        (CHOICE, with_item(3, choices=["a", ""], answer=0), 4, "'choices.1'"),
        (CHOICE, with_item(3, question=" "), 4, ("items.no_question", {})),
        (CHOICE, with_item(3, question="\ud800"), 4, "'question'"),
        (CHOICE, with_item(3, choices=["a", " "], answer=0), 4, ("items.blank_choice", {})),
        (CHOICE, with_item(3, answer=-1), 4, "answer -1 names no choice"),
        (CHOICE, with_item(3, answer=math.nan), 4, "'answer"),
        (CHOICE, with_item(3, answer=True), 4, "'answer"),
        (CHOICE, choice_items() + with_item(1, id="again")[1:2], None, ("items.same_question", {"first": 2, "second": 13})),
        (MATHS, with_item(3, sums(), answer=math.inf), 4, "'answer"),
        (MATHS, with_item(3, sums(), answer=" "), 4, ("items.no_answer", {})),
        (MATHS, with_item(3, sums(), answer="It is #### "), 4, ("items.no_answer", {})),
        (MATHS, sums() + with_item(3, sums(), id=99, answer=8)[3:4], None,
         ("items.two_answers", {"first": 4, "second": 11, "answers": ["'7'", "'8'"]})),
        (CODE, with_item(3, programs(), tests="  # none yet"), 4, ("items.empty_tests", {})),
        (CODE, with_item(3, programs(), tests="assert ("), 4, ("items.odd_tests", {})),
        (CODE, with_item(3, programs(), tests="assert add3(1) == 4 \0"), 4, ("items.odd_tests", {})),
    ],
)  # fmt: skip
def test_a_wrong_item_is_an_error_that_names_its_record(
    workspace: Workspace, kind: str, items: list[dict[str, Any]], record: int | None, expected: Expected
) -> None:
    path = write_task(workspace, "asked", items, kind=kind)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says(found.value.message, expected), found.value
    assert "asked.jsonl" in str(found.value) and (record is None or f"record {record}" in str(found.value))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([], ("task_file.few_items", {"count": 0, "limit": 8})),
        (with_item(3, answer=...), ("lm_eval_file.missing_key", {"record": 4, "key": "answer"})),
        (with_item(3, answer=math.nan), ("lm_eval_file.not_finite", {"record": 4, "key": "answer"})),
        (with_item(3, question="\ud800"), ("lm_eval_file.half_character", {"record": 4, "text": "\ud800"})),
        (with_item(3, id="q1"), ("items.repeated_id", {"id": "q1", "first": 2, "second": 4})),
    ],
)  # fmt: skip
def test_a_wrong_record_of_lm_eval_is_an_error_that_names_it(
    workspace: Workspace, items: list[dict[str, Any]], expected: Expected
) -> None:
    path = write_lm_eval_task(workspace, "asked", items)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says(found.value.message, expected) and "asked" in str(found.value), found.value


def test_items_with_the_same_question_and_source_are_accepted_as_one_cluster(workspace: Workspace) -> None:
    items = [{**item, "source": "a book"} for item in choice_items() + with_item(1, id="again")[1:2]]
    assert len(load_task(write_task(workspace, "asked", items), POLICY).items) == 13


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"kind": "choice"}, "'kind'"),
        ({"formt": "cloze"}, "'format'"),
        ({"items": "../../../etc/passwd"}, ("task_file.outside", {"key": "items", "name": "../../../etc/passwd"})),
        ({"items": "https://host/x.jsonl"}, ("task_file.outside", {"key": "items", "name": "https://host/x.jsonl"})),
        ({"items": "other.jsonl"}, ("task_file.no_items_file", {"key": "items", "name": "other.jsonl"})),
        ({"shots": 2}, "shots: name the file"),
        ({"shots": 20, "examples": "asked_examples.jsonl"}, ("task_file.few_examples", {"count": 3, "shots": 20})),
        ({"prompt": "Q: {questoin}"}, "prompt: the names"),
        ({"prompt": "Q: {question.__class__}"}, "exactly {question}"),
        ({"prompt": "Q: {question"}, "prompt: expected '}'"),
        ({"prompt": "{question}", "format": "letter"}, "{choices} and {question}"),
        ({"pass_at": [1, 10], "samples": 5}, "pass@10 needs at least 10 samples"),
        ({"samples": 5}, "samples: with temperature 0"),
        ({"temperature": float("nan")}, "'temperature'"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_an_error_that_names_it(workspace: Workspace, keys: dict[str, Any], expected: Expected) -> None:
    write_task(workspace, "asked_examples", choice_items(15)[12:])
    path = write_task(workspace, "asked", choice_items(), **keys)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says(found.value.message, expected) and "asked" in str(found.value), found.value


@pytest.mark.parametrize(
    ("name", "data", "mark"),
    [
        ("x.jsonl", b'{"id": 1}\n{"id": 2', "line 2"),
        ("x.jsonl", b'{"id": 1, "id": 2}', "a key appears twice"),
        ("x.jsonl", b"[" * 100_000, "line 1"),
        ("x.jsonl", b"\xff\xfe\x00", "line 1: byte 0xff is not UTF-8"),
        ("x.csv", b"id,question\n1,caf\xe9\n", "line 2: byte 0xe9 is not UTF-8"),
        ("x.json", b"", "cannot be read as json"),
        ("x.jsonl", b"[1]\n", "record 1 is list"),
        ("x.json", b'{"id": 1}', "must contain a list of records"),
        ("x.csv", b"id,question\n1,2,3\n", "row 2 and the first line have different numbers of fields"),
        ("x.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
)
def test_an_unreadable_file_of_items_is_an_error_that_names_it(
    workspace: Workspace, name: str, data: bytes, mark: str
) -> None:
    path = write_task(workspace, "asked", choice_items(), items=name)
    (path.parent / name).write_bytes(data)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert mark in str(found.value) and name in str(found.value)


def test_maths_and_code_files_are_read_and_missing_values_are_errors(workspace: Workspace) -> None:
    assert [item.answer for item in load_task(write_task(workspace, "sums", sums(), kind="maths"), POLICY).items][
        3
    ] == 7
    assert load_task(write_task(workspace, "code", programs(), kind="code"), POLICY).items[2].key == "add2"
    empty = [{**item, "answer": " "} for item in sums()]
    with refused("items.odd_record", TaskError, record=1) as found:
        load_task(write_task(workspace, "sums", empty, kind="maths"), POLICY)
    assert says(found.value.message, ("items.no_answer", {}))
    with pytest.raises(TaskError, match="'question'"):
        load_task(write_task(workspace, "code", sums(), kind="code"), POLICY)


def test_the_protocol_depends_on_all_keys_and_examples_but_not_on_items(workspace: Workspace) -> None:
    first = load_task(write_task(workspace, "asked", choice_items()), POLICY)
    write_task(workspace, "shown", choice_items(15)[12:])
    fewer = load_task(write_task(workspace, "asked", choice_items()[:9]), POLICY)
    assert first.protocol_sha256 == fewer.protocol_sha256 and first.make_evaluation_identity(
        "t"
    ) != fewer.make_evaluation_identity("t")
    for changed in ({"format": "letter"}, {"prompt": "Q: {question}"}, {"shots": 1, "examples": "shown.jsonl"}):
        other = load_task(write_task(workspace, "asked", choice_items(), **changed), POLICY)
        assert other.protocol_sha256 != first.protocol_sha256 and other.make_evaluation_identity(
            "t"
        ) != first.make_evaluation_identity("t")
    assert first.make_evaluation_identity("t") != first.make_evaluation_identity("another tokenizer")


def test_the_error_for_an_unknown_task_names_the_nearest_task(workspace: Workspace) -> None:
    with refused("task_file.empty_folder", TaskError, task="asked"):
        load_task_by_name(workspace, "asked", POLICY)
    write_task(workspace, "asked", choice_items())
    with refused("task_file.unknown_task", TaskError, task="aksed") as found:
        load_task_by_name(workspace, "aksed", POLICY)
    assert "'asked'" in found.value.data["hint"]


@pytest.mark.parametrize(
    ("keys", "code", "data"),
    [
        ({"dataset_path": "allenai/ai2_arc"}, "no_local_data", {"given": "allenai/ai2_arc"}),
        ({"dataset_kwargs": {"data_files": {"test": "https://host/x.jsonl"}}}, "odd_data_file", {"name": "https://host/x.jsonl"}),
        ({"dataset_kwargs": {"data_files": "../../ledger.db"}}, "no_data_file", {"name": "../../ledger.db"}),
        ({"dataset_kwargs": {"data_files": "*.jsonl"}}, "odd_data_file", {"name": "*.jsonl"}),
        ({"dataset_kwargs": {"data_files": "asked.jsonl", "trust_remote_code": True}}, "dataset_kwargs", {}),
        ({"dataset_kwargs": None}, "dataset_kwargs", {}),
        ({"dataset_name": "main"}, "dataset_name", {}),
        ({"custom_dataset": "x"}, "refused_key", {"key": "custom_dataset"}),
        ({"unsafe_code": True}, "refused_key", {"key": "unsafe_code"}),
        ({"use_prompt": "promptsource:*"}, "refused_key", {"key": "use_prompt"}),
        ({"group": "x"}, "refused_key", {"key": "group"}),
        ({"metric_list": [{"metric": "bleu", "hf_evaluate": True}]}, "hf_evaluate", {}),
        ({"doc_to_txt": "x"}, "unknown_key", {"key": "doc_to_txt"}),
        ({"include": "../other.yaml"}, "no_include", {"included": "../other.yaml"}),
        ({"include": "asked.yaml"}, "circular_include", {}),
        ({"num_fewshot": -1}, "num_fewshot", {}),
        ({"task": ["a", "b"]}, "no_task", {}),
    ],
)  # fmt: skip
def test_a_key_that_lm_eval_may_not_use_is_refused_before_lm_eval_runs(
    workspace: Workspace, keys: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    path = write_lm_eval_task(workspace, "asked", choice_items(), **keys)
    with refused(f"lm_eval_file.{code}", TaskError, file=path, **data):
        load_task(path, POLICY)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("task: !function utils.f\n", "function"),
        ("task: x\nprocess_docs: !function utils.f\n", "function"),
        ("task: !!python/object/apply:os.system [ls]\n", "no_yaml"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*c]\n"
         "f: &f [*c,*c,*c,*c,*c,*c,*c,*c]\ng: [*f,*f,*f,*f,*f,*f,*f,*f]\n", "too_many_values"),
        ("- a\n", "no_mapping"),
        ("task: [", "no_yaml"),
    ],
)  # fmt: skip
def test_yaml_that_would_run_code_is_refused(workspace: Workspace, text: str, code: str) -> None:
    path = write_lm_eval_task(workspace, "asked", choice_items())
    path.write_text(text)
    with refused(f"lm_eval_file.{code}", TaskError, file=path):
        load_task(path, POLICY)


def test_included_files_obey_the_same_rules_and_change_the_protocol(workspace: Workspace) -> None:
    path = write_lm_eval_task(workspace, "asked", choice_items())
    part = path.with_name("_part.yaml")
    whole = yaml.safe_load(path.read_text())
    part.write_text(yaml.safe_dump({key: value for key, value in whole.items() if key != "task"}))
    path.write_text("include: _part.yaml\ntask: asked\n")
    first = load_task(path, POLICY)
    assert len(first.records) == 12
    part.write_text(part.read_text() + "num_fewshot: 1\n")
    second = load_task(path, POLICY)
    assert second.protocol_sha256 != first.protocol_sha256 and "1 shots" in second.format
    part.write_text(part.read_text() + "process_docs: !function utils.f\n")
    with pytest.raises(TaskError, match="!function"):
        load_task(path, POLICY)
    (path.parent / "utils.py").write_text("def f(docs): return docs\n")
    allowed = load_task(path, TasksPolicy(functions=True))
    (path.parent / "utils.py").write_text("def f(docs): return docs.select(range(8))\n")
    assert load_task(path, TasksPolicy(functions=True)).protocol_sha256 != allowed.protocol_sha256


def test_any_bytes_are_read_as_a_task_file_or_are_a_task_error(workspace: Workspace, tmp_path: Path) -> None:
    path = write_task(workspace, "asked", choice_items())
    data = path.read_bytes()
    lines = (path.parent / "asked.jsonl").read_bytes()
    for at in range(len(data) + 1):
        path.write_bytes(data[:at])
        with contextlib.suppress(TaskError):
            load_task(path, POLICY)
    path.write_bytes(data)
    for at in range(0, len(lines), 97):
        (path.parent / "asked.jsonl").write_bytes(lines[:at] + b"\x00\xff" + lines[at + 2 :])
        with pytest.raises(TaskError):
            load_task(path, POLICY)
    assert json.loads(lines.split(b"\n")[0])["id"] == "q0"
