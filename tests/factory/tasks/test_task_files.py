"""Task files that are wrong are refused by name, before anything is measured or loaded."""

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
from factory.tasks.task_file import load_named, load_task
from tests.support.factory.task_files import choice_items, programs, sums, write_lm_eval_task, write_task

POLICY = TasksPolicy()


def with_item(number: int, items: list[dict[str, Any]] | None = None, **changes: Any) -> list[dict[str, Any]]:
    items = choice_items() if items is None else items
    items[number] |= changes
    return [{key: value for key, value in item.items() if value is not ...} for item in items]


CHOICE, MATHS, CODE = "multiple_choice", "maths", "code"


@pytest.mark.parametrize(
    ("kind", "items", "says"),
    [
        (CHOICE, [], "0 items, at least 8 are needed (items_min in tasks.yaml)"),
        (CHOICE, with_item(3, answer=...), "record 4: key 'answer' is missing"),
        (CHOICE, with_item(3, answer=4), "record 4: answer 4 names no choice"),
        (CHOICE, with_item(3, choices=["A", "A", "B"], answer="A"), "record 4"),
        (CHOICE, with_item(3, answer="none of them"), "record 4: answer 'none of them' names no choice"),
        (CHOICE, with_item(3, id="q1"), "id 'q1' appears twice, in records 2 and 4"),
        (CHOICE, with_item(3, colour="red"), "record 4: unknown key 'colour'"),
        (CHOICE, with_item(3, choices=["a"]), "record 4: key 'choices'"),
        (CHOICE, with_item(3, choices=["a", "a"], answer=0), "record 4: two of its choices are the same"),
        (CHOICE, with_item(3, choices=["a", ""], answer=0), "record 4: key 'choices.1'"),
        (CHOICE, with_item(3, question=" "), "record 4: it has no question"),
        (CHOICE, with_item(3, question="\ud800"), "record 4: key 'question'"),
        (CHOICE, with_item(3, choices=["a", " "], answer=0), "record 4: a choice is blank"),
        (CHOICE, with_item(3, answer=-1), "record 4: answer -1 names no choice"),
        (CHOICE, with_item(3, answer=math.nan), "record 4: key 'answer"),
        (CHOICE, with_item(3, answer=True), "record 4: key 'answer"),
        (CHOICE, choice_items() + with_item(1, id="again")[1:2], "records 2 and 13 ask the same: remove one, or give both one 'source'"),
        (MATHS, with_item(3, sums(), answer=math.inf), "record 4: key 'answer"),
        (MATHS, with_item(3, sums(), answer=" "), "record 4: it has no answer"),
        (MATHS, with_item(3, sums(), answer="It is #### "), "record 4: it has no answer"),
        (MATHS, sums() + with_item(3, sums(), id=99, answer=8)[3:4], "records 4 and 11 ask the same and have two answers, '7' and '8'"),
        (CODE, with_item(3, programs(), tests="  # none yet"), "record 4: its tests test nothing: every program would pass"),
        (CODE, with_item(3, programs(), tests="assert ("), "record 4: its tests are no Python, so no program would pass"),
        (CODE, with_item(3, programs(), tests="assert add3(1) == 4 \0"), "record 4: its tests are no Python"),
    ],
)  # fmt: skip
def test_items_that_are_wrong_are_named(
    workspace: Workspace, kind: str, items: list[dict[str, Any]], says: str
) -> None:
    path = write_task(workspace, "asked", items, kind=kind)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says in str(found.value) and "asked.jsonl" in str(found.value)


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([], "0 items, at least 8 are needed"),
        (with_item(3, answer=...), "record 4: key 'answer' is missing"),
        (with_item(3, answer=math.nan), "record 4: key 'answer' is nan, which is no answer"),
        (with_item(3, question="\ud800"), "record 4: '\\ud800' alone is no character"),
        (with_item(3, id="q1"), "id 'q1' appears twice, in records 2 and 4"),
    ],
)  # fmt: skip
def test_records_of_lm_eval_that_are_wrong_are_named(
    workspace: Workspace, items: list[dict[str, Any]], says: str
) -> None:
    path = write_lm_eval_task(workspace, "asked", items)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says in str(found.value) and "asked" in str(found.value)


def test_items_that_ask_the_same_and_have_one_source_are_one_cluster(workspace: Workspace) -> None:
    items = [{**item, "source": "a book"} for item in choice_items() + with_item(1, id="again")[1:2]]
    assert len(load_task(write_task(workspace, "asked", items), POLICY).items) == 13


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"kind": "choice"}, "key 'kind'"),
        ({"formt": "cloze"}, "unknown key 'formt'; did you mean 'format'"),
        ({"items": "../../../etc/passwd"}, "lies outside"),
        ({"items": "https://host/x.jsonl"}, "lies outside"),
        ({"items": "other.jsonl"}, "no file 'other.jsonl' of items there; did you mean"),
        ({"shots": 2}, "which file the examples are of is missing"),
        ({"shots": 20, "examples": "asked_examples.jsonl"}, "3 examples, 20 are to be shown"),
        ({"prompt": "Q: {questoin}"}, "prompt: it must hold {question}"),
        ({"prompt": "Q: {question.__class__}"}, "prompt: it must hold {question}"),
        ({"prompt": "Q: {question"}, "prompt: expected '}'"),
        ({"prompt": "{question}", "format": "letter"}, "{choices} and {question}"),
        ({"pass_at": [1, 10], "samples": 5}, "pass@10 needs at least as many samples, there are 5"),
        ({"samples": 5}, "set a temperature"),
        ({"temperature": float("nan")}, "key 'temperature'"),
    ],
)  # fmt: skip
def test_keys_that_are_wrong_are_named(workspace: Workspace, keys: dict[str, Any], says: str) -> None:
    write_task(workspace, "asked_examples", choice_items(15)[12:])
    path = write_task(workspace, "asked", choice_items(), **keys)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says in str(found.value) and "asked" in str(found.value)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("x.jsonl", b'{"id": 1}\n{"id": 2', "line 2"),
        ("x.jsonl", b'{"id": 1, "id": 2}', "a key appears twice"),
        ("x.jsonl", b"[" * 100_000, "line 1"),
        ("x.jsonl", b"\xff\xfe\x00", "line 1: byte 0xff is not UTF-8"),
        ("x.csv", b"id,question\n1,caf\xe9\n", "line 2: byte 0xe9 is not UTF-8"),
        ("x.json", b"", "cannot be read as json"),
        ("x.jsonl", b"[1]\n", "record 1 is list"),
        ("x.json", b'{"id": 1}', "expected a list of records"),
        ("x.csv", b"id,question\n1,2,3\n", "row 2 has another number of fields"),
        ("x.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
)
def test_files_of_items_that_cannot_be_read_are_named(workspace: Workspace, name: str, data: bytes, says: str) -> None:
    path = write_task(workspace, "asked", choice_items(), items=name)
    (path.parent / name).write_bytes(data)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says in str(found.value) and name in str(found.value)


def test_maths_and_code_are_read_and_hold_what_they_must(workspace: Workspace) -> None:
    assert [item.answer for item in load_task(write_task(workspace, "sums", sums(), kind="maths"), POLICY).items][
        3
    ] == 7
    assert load_task(write_task(workspace, "code", programs(), kind="code"), POLICY).items[2].key == "add2"
    empty = [{**item, "answer": " "} for item in sums()]
    with pytest.raises(TaskError, match="record 1: it has no answer"):
        load_task(write_task(workspace, "sums", empty, kind="maths"), POLICY)
    with pytest.raises(TaskError, match="unknown key 'question'"):
        load_task(write_task(workspace, "code", sums(), kind="code"), POLICY)


def test_the_protocol_is_all_but_the_items(workspace: Workspace) -> None:
    first = load_task(write_task(workspace, "asked", choice_items()), POLICY)
    write_task(workspace, "shown", choice_items(15)[12:])
    fewer = load_task(write_task(workspace, "asked", choice_items()[:9]), POLICY)
    assert first.protocol == fewer.protocol and first.identity("t") != fewer.identity("t")
    for changed in ({"format": "letter"}, {"prompt": "Q: {question}"}, {"shots": 1, "examples": "shown.jsonl"}):
        other = load_task(write_task(workspace, "asked", choice_items(), **changed), POLICY)
        assert other.protocol != first.protocol and other.identity("t") != first.identity("t")
    assert first.identity("t") != first.identity("another tokenizer")


def test_an_unknown_task_is_told_the_nearest(workspace: Workspace) -> None:
    with pytest.raises(TaskError, match="holds no task file"):
        load_named(workspace, "asked", POLICY)
    write_task(workspace, "asked", choice_items())
    with pytest.raises(TaskError, match="did you mean 'asked'"):
        load_named(workspace, "aksed", POLICY)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"dataset_path": "allenai/ai2_arc"}, "nothing is loaded from elsewhere"),
        ({"dataset_kwargs": {"data_files": {"test": "https://host/x.jsonl"}}}, "must be the name of one local file"),
        ({"dataset_kwargs": {"data_files": "../../ledger.db"}}, "nothing is read from elsewhere"),
        ({"dataset_kwargs": {"data_files": "*.jsonl"}}, "must be the name of one local file"),
        ({"dataset_kwargs": {"data_files": "asked.jsonl", "trust_remote_code": True}}, "and nothing else"),
        ({"dataset_kwargs": None}, "dataset_kwargs must be"),
        ({"dataset_name": "main"}, "a local file has no such part"),
        ({"custom_dataset": "x"}, "key 'custom_dataset' is refused"),
        ({"unsafe_code": True}, "outside a sandbox"),
        ({"use_prompt": "promptsource:*"}, "loads prompts from elsewhere"),
        ({"group": "x"}, "it is a group"),
        ({"metric_list": [{"metric": "bleu", "hf_evaluate": True}]}, "loads code from elsewhere"),
        ({"doc_to_txt": "x"}, "unknown key 'doc_to_txt'; did you mean 'doc_to_text'"),
        ({"include": "../other.yaml"}, "no such file"),
        ({"include": "asked.yaml"}, "it includes itself"),
        ({"num_fewshot": -1}, "num_fewshot"),
        ({"task": ["a", "b"]}, "the name of one task"),
    ],
)  # fmt: skip
def test_what_lm_eval_may_not_do_is_refused_before_it_runs(
    workspace: Workspace, keys: dict[str, Any], says: str
) -> None:
    path = write_lm_eval_task(workspace, "asked", choice_items(), **keys)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says in str(found.value) and "asked.yaml" in str(found.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("task: !function utils.f\n", "!function utils.f: it runs Python"),
        ("task: x\nprocess_docs: !function utils.f\n", "'functions: true' in tasks.yaml allows it"),
        ("task: !!python/object/apply:os.system [ls]\n", "cannot be read as YAML"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: [*c]\n"
         "f: &f [*c,*c,*c,*c,*c,*c,*c,*c]\ng: [*f,*f,*f,*f,*f,*f,*f,*f]\n", "more than 20000 values"),
        ("- a\n", "expected keys with values"),
        ("task: [", "cannot be read as YAML"),
    ],
)  # fmt: skip
def test_yaml_that_would_run_code_is_refused(workspace: Workspace, text: str, says: str) -> None:
    path = write_lm_eval_task(workspace, "asked", choice_items())
    path.write_text(text)
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert says in str(found.value)


def test_what_a_file_includes_is_held_to_the_same_and_counts(workspace: Workspace) -> None:
    path = write_lm_eval_task(workspace, "asked", choice_items())
    part = path.with_name("_part.yaml")
    whole = yaml.safe_load(path.read_text())
    part.write_text(yaml.safe_dump({key: value for key, value in whole.items() if key != "task"}))
    path.write_text("include: _part.yaml\ntask: asked\n")
    first = load_task(path, POLICY)
    assert len(first.records) == 12
    part.write_text(part.read_text() + "num_fewshot: 1\n")
    second = load_task(path, POLICY)
    assert second.protocol != first.protocol and "1 shots" in second.format
    part.write_text(part.read_text() + "process_docs: !function utils.f\n")
    with pytest.raises(TaskError, match="!function"):
        load_task(path, POLICY)
    (path.parent / "utils.py").write_text("def f(docs): return docs\n")
    allowed = load_task(path, TasksPolicy(functions=True))
    (path.parent / "utils.py").write_text("def f(docs): return docs.select(range(8))\n")
    assert load_task(path, TasksPolicy(functions=True)).protocol != allowed.protocol


def test_any_bytes_are_a_task_file_or_an_error(workspace: Workspace, tmp_path: Path) -> None:
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
