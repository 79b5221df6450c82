"""Each published file of eight benchmarks becomes a task in policies/tasks/, with the prompts of its paper."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from factory.core.workspace import Workspace
from factory.ingest.rules.task_folder import SUFFIXES
from factory.ingest.task_hashes import record_task_ngrams
from factory.ledger.ledger import Ledger
from factory.ledger.plant import Plant
from factory.tasks.answer_generation import _prompt as generation_prompt
from factory.tasks.items import CodeItem, TaskError
from factory.tasks.libraries import refuse_missing_libraries
from factory.tasks.multiple_choice import build_prompt
from factory.tasks.policy import TaskLimits, TasksPolicy
from factory.tasks.task_file import VERSIONS, EvalTask, TaskFile, list_tasks, load_task, load_task_by_name, task_folder
from factory.tasks.verifiers import check_maths_answers, check_programs, check_solutions
from tests.support.factory import published_files as published
from tests.support.factory.task_files import choice_items, write_task
from tests.support.messages import refused, says

POLICY = TasksPolicy()
LIMITS = TaskLimits(code_cpu_seconds=5, code_seconds=60.0, code_printed_kib=64)


def dropped(workspace: Workspace, name: str, records: list[Any]) -> Path:
    return published.write(task_folder(workspace) / name, records)


def alone(workspace: Workspace, name: str, records: list[Any]) -> EvalTask:
    return load_task(dropped(workspace, name, records), POLICY)


def prompts(task: EvalTask) -> list[str]:
    assert isinstance(task.file, TaskFile)
    if task.kind == "multiple_choice":
        return [build_prompt(task.file, item, task.examples) for item in task.items]
    return [generation_prompt(task.file, item, task) for item in task.items]


def error_of(path: Path) -> str:
    """The message of the error that a task file gives."""
    with pytest.raises(TaskError) as found:
        load_task(path, POLICY)
    assert "\n" not in str(found.value)
    return found.value.message


def test_each_published_file_in_the_folder_is_a_task(workspace: Workspace) -> None:
    for name, (_, records) in published.FILES.items():
        dropped(workspace, name, records)
    found = list_tasks(task_folder(workspace))
    assert not found.others and len(found.tasks) == len(published.FILES)
    for name, path in found.tasks.items():
        assert path.name.startswith(name)
        benchmark, records = published.FILES[path.name]
        task = load_task_by_name(workspace, name, POLICY)
        assert isinstance(task.file, TaskFile) and (task.name, task.file.published) == (name, benchmark)
        assert len(task.items) == (12 if benchmark == "mbpp" else len(records)) and not task.notes
        assert task.format.startswith(f"{benchmark} as published, ") and len(set(prompts(task))) == len(task.items)
    packed, plain = found.tasks["BigCodeBench"], dropped(workspace, "plain.jsonl", published.big_code_bench())
    assert load_task(packed, POLICY).items_sha256 == load_task(plain, POLICY).items_sha256


def test_published_files_give_the_documented_prompts_and_right_answers(workspace: Workspace) -> None:
    """The first prompt of each, letter for letter, and the right answer of an item."""
    task = alone(workspace, "harbour_law_test.csv", published.mmlu_rows())
    assert prompts(task)[0] == (
        "The following are multiple choice questions (with answers) about harbour law.\n\n"
        "On which shelf does the catalogue\nkeep volume 0, as counted from zero?\nA. shelf 0\nB. shelf 1\nC. shelf 2\nD. shelf 3\nAnswer:"
    )
    assert [item.right_choice_index for item in task.items] == [
        n % 4 for n in range(9)
    ]  # the first line is an item, not a header
    task = alone(workspace, "ARC-Easy-Test.jsonl", published.arc_lines())
    assert prompts(task)[0] == "Question: Which lamp of harbour 0 burns when a ship may enter?\nAnswer:"
    assert [item.right_choice_index for item in task.items] == [n % 4 for n in range(9)] and task.items[
        3
    ].key == "Harbour_3"
    assert prompts(alone(workspace, "arc.parquet", published.arc_table())) == prompts(task)
    task = alone(workspace, "hellaswag_val.jsonl", published.hella_swag())
    assert prompts(task)[0] == "Mending a net: A fisherman sits on crate 0. He looks for the hole. The man"
    assert task.items[0].choices[:2] == ["ties the torn threads together. Then he rests.", "paints the crate blue."]
    assert [item.right_choice_index for item in task.items] == [n % 4 for n in range(9)]
    assert len({item.cluster for item in task.items}) == 5  # two items of one video count as one
    task = alone(workspace, "gsm8k_test.jsonl", published.gsm8k())
    assert prompts(task)[2].startswith("Question: A ferry carries 2 cars") and prompts(task)[2].endswith("\nAnswer:")
    replies = [(task.items[2], "2 * 3 is 6.\n#### 6"), (task.items[2], "#### 5")]
    assert [one.right for one in check_maths_answers(replies, LIMITS)] == [True, False]
    task = alone(workspace, "math.jsonl", published.hendrycks_math())
    assert prompts(task)[2] == "Problem:\nWhat is $2 + \\frac{1}{2}$?\n\nSolution:"
    assert isinstance(task.file, TaskFile) and task.file.stop_texts == ("Problem:",)
    task = alone(workspace, "HumanEval.jsonl", published.human_eval())
    assert prompts(task)[0] == published.human_eval()[0]["prompt"]
    task = alone(workspace, "BigCodeBench.jsonl", published.big_code_bench())
    assert prompts(task)[0] == published.big_code_bench()[0]["complete_prompt"]


def test_mbpp_uses_tasks_2_to_4_as_examples_and_tests_its_test_split(workspace: Workspace) -> None:
    records = published.mbpp()
    task = alone(workspace, "mbpp.jsonl", records)
    asked = lambda n: (
        f"You are an expert Python programmer, and here is your task: {records[n - 1]['text']} Your code should pass these tests:\n\n"
        + "\n".join(records[n - 1]["test_list"])
        + "\n[BEGIN]\n"
    )
    shown = [f"{asked(n)}{records[n - 1]['code']}\n[DONE]" for n in (2, 3, 4)]
    assert prompts(task)[0] == "\n\n".join([*shown, asked(11)])
    assert [item.id for item in task.items] == list(range(11, 23)) and "3 shots" in task.format
    assert prompts(alone(workspace, "sanitized-mbpp.json", published.sanitized_mbpp())) == prompts(task)
    without = alone(workspace, "others.jsonl", published.mbpp(11))  # as in the Parquet file of one split
    assert "0 shots" in without.format and prompts(without)[0] == asked(11)


def test_prompts_of_mbpp_are_those_of_lm_eval(workspace: Workspace) -> None:
    """Its template, as the installed package has it; the task itself wants code from the network."""
    lm_eval = pytest.importorskip("lm_eval")
    import yaml
    from jinja2 import Environment

    from factory.tasks.lm_eval_file import _Loader

    text = (Path(lm_eval.__file__).parent / "tasks" / "mbpp" / "mbpp.yaml").read_text(encoding="utf-8")
    template = Environment().from_string(yaml.load(text, _Loader)["doc_to_text"])  # noqa: S506 - a SafeLoader
    without = alone(workspace, "mbpp.jsonl", published.mbpp(11))
    # jinja drops one newline at the end of a template; lm-eval keeps it
    assert [one.removesuffix("\n") for one in prompts(without)] == [
        template.render(**one) for one in published.mbpp(11)
    ]


@pytest.mark.parametrize(
    ("name", "records", "wrong"),
    [
        ("HumanEval.jsonl.gz", published.human_eval()[2:5], "    return values\n"),
        ("mbpp.jsonl", published.mbpp(11, 13), "def raised_11(x):\n  return x\n"),
        ("sanitized-mbpp.json", published.sanitized_mbpp()[10:13], "raised_11 = lambda x: 11"),
        ("BigCodeBench.jsonl.gz", published.big_code_bench()[1:4], "    return '{}'\n"),
    ],
)
def test_published_solutions_pass_their_tests_and_wrong_programs_fail(
    workspace: Workspace, name: str, records: list[Any], wrong: str
) -> None:
    """In the real sandbox. What only defines its tests would let the wrong program pass."""
    path = dropped(workspace, name, records)
    items: list[CodeItem] = list(load_task(path, TasksPolicy(items_min=2)).items)
    assert len(items) == 3
    check_solutions(items, LIMITS)
    empty = {"mbpp": "", "sanitized-mbpp": ""}.get(path.name.partition(".")[0], "    return None\n")
    found = check_programs([(items[0].make_program_of_reply(text), items[0].tests) for text in (wrong, empty)], LIMITS)
    assert [one.right for one in found] == [False, False]
    assert any(word in found[0].why for word in ("AssertionError", "NameError")), found[0]
    with refused("verifiers.solution_fails", TaskError, item=items[1].key):
        check_solutions([items[1].model_copy(update={"solution": wrong})], LIMITS)


def test_missing_libraries_of_programs_are_named(workspace: Workspace) -> None:
    records = published.big_code_bench("['json', 'no_such_library.part', 'nor_this']")
    items = alone(workspace, "BigCodeBench.jsonl", [*records[:2], *published.big_code_bench()[2:]]).items
    with refused("libraries.missing", TaskError, concerned=2, items=9, libraries=["no_such_library", "nor_this"]):
        refuse_missing_libraries(items, LIMITS)
    refuse_missing_libraries(items[2:], LIMITS)
    broken = dropped(
        workspace, "BigCodeBench.jsonl", [*published.big_code_bench(), {**records[0], "task_id": "x", "libs": "json,"}]
    )
    assert "'json,'" in error_of(broken)
    assert says(error_of(broken), ("benchmarks.odd_record", {"record": 10}))


def test_examples_of_mmlu_are_of_the_subject_of_the_question(workspace: Workspace) -> None:
    subjects = ("harbour_law", "tides")
    dropped(workspace, "mmlu.parquet", published.mmlu_table(subjects))
    dropped(workspace, "mmlu_dev.parquet", published.mmlu_table(subjects, 100, 5))
    path = task_folder(workspace) / "mmlu.yaml"
    path.write_text("published: mmlu\nitems: mmlu.parquet\nexamples: mmlu_dev.parquet\nshots: 5\n")
    task = load_task_by_name(workspace, "mmlu", POLICY)
    last = prompts(task)[-1]
    assert last.count("(tides)") == 6 and "(harbour_law)" not in last and last.count("Answer:") == 6
    assert last.startswith("The following are multiple choice questions (with answers) about tides.\n\nOn which shelf")
    dropped(workspace, "mmlu_dev.parquet", published.mmlu_table(subjects[:1], 100, 5))
    few = (
        "task_file.few_examples_of_subject",
        {"file": path.with_name("mmlu_dev.parquet"), "subject": "tides", "count": 0, "shots": 5},
    )
    assert says(error_of(path), few)


def test_a_yaml_file_overrides_the_defaults_of_a_benchmark(workspace: Workspace) -> None:
    dropped(workspace, "test.jsonl", published.gsm8k())
    dropped(workspace, "train.jsonl", published.gsm8k(100))
    found = list_tasks(task_folder(workspace))
    assert list(found.tasks) == ["gsm8k"]
    assert list(found.others) == ["train.jsonl"]
    assert says(found.others["train.jsonl"], ("task_file.training_split", {"split": "train", "benchmark": "gsm8k"}))
    path = task_folder(workspace) / "sums.yaml"
    path.write_text("published: gsm8k\nitems: test.jsonl\nexamples: train.jsonl\nshots: 2\nmax_tokens: 64\n")
    task = load_task_by_name(workspace, "sums", POLICY)
    assert isinstance(task.file, TaskFile) and (task.kind, task.file.max_tokens) == ("maths", 64)
    first = published.gsm8k(100)[0]
    assert prompts(task)[0].startswith(f"Question: {first['question']}\nAnswer: {first['answer']}\n\nQuestion: ")
    assert list_tasks(task_folder(workspace)).others == {}  # both files are named now
    path.write_text("published: gsm8k\nkind: code\nitems: test.jsonl\n")
    assert says(error_of(path), ("task_file.other_kind", {"given": "code", "benchmark": "gsm8k", "kind": "maths"}))
    path.write_text("published: gsm8\nitems: test.jsonl\nkind: maths\n")
    assert "'published'" in error_of(path)
    path.write_text("published: humaneval\nitems: test.jsonl\n")
    keys = ["canonical_solution", "entry_point", "prompt", "task_id", "test"]
    assert says(error_of(path), ("benchmarks.missing_keys", {"benchmark": "humaneval", "keys": keys}))


def with_record(records: list[Any], number: int, **changes: Any) -> list[Any]:
    return [record | (changes if at == number else {}) for at, record in enumerate(records)]


@pytest.mark.parametrize(
    ("name", "records", "expected"),
    [
        ("HumanEval.jsonl", published.human_eval()[:1], ("task_file.few_items", {"count": 1, "limit": 8})),
        ("HumanEval.jsonl", with_record(published.human_eval(), 3, task_id="HumanEval/2"),
         ("items.repeated_id", {"id": "HumanEval/2", "first": 3, "second": 4})),
        ("HumanEval.jsonl", with_record(published.human_eval(), 3, test=7), ("benchmarks.odd_key", {"key": "test", "given": "7"})),
        ("HumanEval.jsonl", [*published.human_eval(), {"task_id": "x"}], ("benchmarks.odd_record", {"record": 10})),
        ("mbpp.jsonl", with_record(published.mbpp(), 14, test_list=[]), "record 15: test_list is empty"),
        ("mbpp.jsonl", with_record(published.mbpp(), 14, test_list=["assert ("]), ("items.odd_tests", {})),
        ("gsm8k.jsonl", with_record(published.gsm8k(), 3, answer="twelve"), "record 4: the answer has no ####"),
        ("gsm8k.jsonl", with_record(published.gsm8k(), 3, answer="so #### "), ("items.no_answer", {})),
        ("math.jsonl", with_record(published.hendrycks_math(), 3, solution="It is 5."), "record 4: the solution has no \\boxed"),
        ("mmlu.parquet", with_record(published.mmlu_table(("tides",)), 3, answer=4), "record 4: answer 4 names no choice"),
        ("arc.jsonl", with_record(published.arc_lines(), 3, answerKey="E"), "record 4: answerKey 'E' is not one of the labels 1, 2, 3, 4"),
        ("hellaswag_val.jsonl", with_record(published.hella_swag(), 3, label=4), "record 4: label '4' is not"),
        ("hellaswag_val.jsonl", with_record(published.hella_swag(), 3, label=""), "record 4: label '' is not"),
        ("hellaswag_val.jsonl", with_record(published.hella_swag(), 3, endings=["a", "a", "b", "c"]), ("items.same_choices", {})),
    ],
)  # fmt: skip
def test_an_invalid_published_file_is_refused_with_a_one_line_message(
    workspace: Workspace, name: str, records: list[Any], expected: str | tuple[str, dict[str, Any]]
) -> None:
    error = error_of(dropped(workspace, name, records))
    assert says(error, expected) and name in error, error


def test_repeated_items_of_a_published_file_are_measured_and_count_as_one(workspace: Workspace) -> None:
    records = published.mmlu_table(("tides",))
    again = {**records[1], "answer": 3}
    double = {
        **records[2],
        "question": "Which?",
        "choices": ["one", "one", "two", "three"],
        "answer": 2,
    }  # harmless: letters are scored
    task = alone(workspace, "mmlu.parquet", [*records, records[0], again, double])
    assert len(task.items) == 12 and len({item.cluster for item in task.items}) == 10
    (note,) = task.notes
    assert says(note, ("items.repeated_question", {"count": 2, "item": "10", "other": "1"}))


def test_math_is_read_from_its_folder_of_numbered_files(workspace: Workspace, ledger: Ledger) -> None:
    folder = task_folder(workspace)
    for n, record in enumerate(published.hendrycks_math(12)):
        for place in ("prealgebra", "MATH/test/prealgebra"):
            path = folder / place / f"{n}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=4))
    found = list_tasks(folder)
    assert list(found.tasks) == ["prealgebra"] and list(found.others) == ["MATH/test/prealgebra"]
    task = load_task_by_name(workspace, "prealgebra", POLICY)
    assert "What is $10 + " in prompts(task)[10] and len(task.items) == 12  # by number, not by name
    (folder / "other.yaml").write_text("published: math\nitems: MATH/test/prealgebra\n")
    assert load_task_by_name(workspace, "other", POLICY).items == task.items and not list_tasks(folder).others
    assert (record_task_ngrams(Plant(workspace, ledger), 13), record_task_ngrams(Plant(workspace, ledger), 13)) == (
        1,
        0,
    )  # two folders of one content
    (folder / "prealgebra" / "3.json").write_text("[1]")
    assert error_of(folder / "prealgebra").startswith(str(folder / "prealgebra" / "3.json"))


def test_the_error_for_an_archive_or_a_wrong_folder_says_what_to_do(workspace: Workspace) -> None:
    folder = task_folder(workspace)
    inner = folder / "MATH" / "test" / "algebra"
    inner.mkdir(parents=True)
    (inner / "0.json").write_text('{"problem": "1+1?", "solution": "\\\\boxed{2}"}')
    (folder / "empty").mkdir()
    (folder / "MATH.tar").write_bytes(b"")
    expected = {
        "MATH.tar": ("task_file.odd_name", {"file": folder / "MATH.tar"}),
        "MATH": str(inner),
        "empty": "0.json",
        "gone.tar": ("task_file.no_file", {"file": folder / "gone.tar"}),
    }
    for name, wanted in expected.items():
        error = error_of(folder / name)
        assert says(error, wanted) and error.startswith(str(folder / name)), error


def test_every_data_file_that_is_not_a_task_is_listed_with_a_reason(workspace: Workspace) -> None:
    folder = task_folder(workspace)
    write_task(workspace, "asked", choice_items())
    dropped(workspace, "HumanEval.jsonl", published.human_eval())
    dropped(workspace, "HumanEval.jsonl.gz", published.human_eval())
    dropped(workspace, "unknown.jsonl", [{"prompt": "x", "label": 1}])
    dropped(workspace, "below/HumanEval.jsonl", published.human_eval())
    (folder / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08 no more")
    (folder / "MATH.tar").write_bytes(b"not read")
    (folder / "README.md").write_text("About these.")
    found = list_tasks(folder)
    assert list(found.tasks) == ["HumanEval", "asked", "broken"]
    assert error_of(found.tasks["broken"]).startswith(str(folder / "broken.jsonl.gz"))
    expected: dict[str, tuple[str, dict[str, Any]]] = {
        "MATH.tar": ("task_file.not_read", {"suffixes": SUFFIXES}),
        "HumanEval.jsonl.gz": ("task_file.same_name", {"other": "HumanEval.jsonl", "task": "HumanEval"}),
        "below/HumanEval.jsonl": ("task_file.not_named", {}),
        "unknown.jsonl": ("task_file.unknown_fields", {"fields": "label, prompt", "file": "unknown.jsonl"}),
    }
    assert list(found.others) == list(expected)
    assert [name for name, why in found.others.items() if not says(why, expected[name])] == []
    kept_out = {name for name, why in found.others.items() if says(why, ("task_file.no_task", {}))}
    assert kept_out == set(expected) - {"MATH.tar"}
    assert says(error_of(folder / "unknown.jsonl"), expected["unknown.jsonl"])


def test_tasks_without_the_newer_keys_keep_their_protocol_hash(workspace: Workspace) -> None:
    """Keys that came later do not hold a line of releases: the hash is of the keys that there were."""
    items = [{"id": n, "question": f"Which is {n}?", "choices": ["a", "b"], "answer": 0} for n in range(8)]
    write_task(workspace, "shown", [{**items[0], "question": "Which is it?"}])
    task = load_task(write_task(workspace, "asked", items, examples="shown.jsonl", shots=1), POLICY)
    keys = (
        '{"kind":"multiple_choice","items":"","format":"cloze","prompt":"","examples":"","shots":1,"max_tokens":256,"stop":null,"samples":1,'
        '"temperature":0.0,"pass_at":[1],"seed":0}'
    )
    shown = [{"id": 0, "source": "", "question": "Which is it?", "choices": ["a", "b"], "answer": 0}]
    whole = [VERSIONS["multiple_choice"], "multiple_choice", hashlib.sha256(keys.encode()).hexdigest(), shown]
    assert task.protocol_sha256 == hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
