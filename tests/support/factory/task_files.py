"""Task files of evaluation tasks, written into a workspace: questions on Python's standard library, sums, small programs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from factory.core.workspace import Workspace
from tests.support.text.library import library


def choice_items(count: int = 12, choices: int = 4) -> list[dict[str, Any]]:
    """Which words open the documentation of a function of ``textwrap`` and ``inspect``?"""
    drawn = random.Random(0)
    by_words = {  # two functions may open with the same words
        member.doc.split(".")[0][:60]: member.name
        for module in ("textwrap", "inspect")
        for member in library()[module].members
        if member.kind == "function"
    }
    known = [(name, words) for words, name in by_words.items()]
    items = []
    for number, (name, right) in enumerate(known[:count]):
        others = drawn.sample([words for _, words in known if words != right], choices - 1)
        at = drawn.randrange(choices)
        listed = [*others[:at], right, *others[at:]]
        items.append({"id": f"q{number}", "question": f"What does {name} do?", "choices": listed, "answer": at})
    return items


def sums(count: int = 10) -> list[dict[str, Any]]:
    return [{"id": n, "question": f"What is {n} + {n + 1}?", "answer": 2 * n + 1} for n in range(count)]


def programs(count: int = 8) -> list[dict[str, Any]]:
    return [
        {
            "id": f"add{n}",
            "prompt": f"def add{n}(x):\n",
            "tests": f"assert add{n}(1) == {n + 1}",
            "solution": f"    return x + {n}\n",
        }
        for n in range(count)
    ]


def write_task(workspace: Workspace, name: str, asked: list[dict[str, Any]], /, **keys: Any) -> Path:
    """``policies/tasks/NAME.yaml`` with its items beside it."""
    folder = workspace.root / "policies" / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in asked))
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"kind": "multiple_choice", "items": f"{name}.jsonl", **keys}))
    return path


# ARC's and MMLU's formats as lm-eval has them, on a local file.
LM_EVAL = {
    "cloze": {
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "letter": {
        "doc_to_text": "{{question}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:",
        "doc_to_choice": ["A", "B", "C", "D"],
        "metric_list": [{"metric": "acc"}],
    },
}


def write_lm_eval_task(workspace: Workspace, name: str, items: list[dict[str, Any]], **keys: Any) -> Path:
    """A task file of lm-eval, with its items beside it."""
    path = write_task(workspace, name, items)
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_target": "answer",
        **LM_EVAL["cloze"],
        **keys,
    }
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return path


def write_policy(workspace: Workspace, **keys: Any) -> None:
    """``policies/tasks.yaml`` of the workspace."""
    path = workspace.root / "policies" / "tasks.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(keys))
