"""Three tasks of the lm-eval package on one exported model give the same numbers as lm-eval with its own model, to the last digit."""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from factory.core.workspace import Workspace
from factory.evals.reference_model import ReferenceModel
from factory.ingest.tokenizer import Tokenizer, train_tokenizer
from factory.tasks.answer_generation import _prompt as generation_prompt
from factory.tasks.items import TaskError
from factory.tasks.lm_eval_run import run_lm_eval
from factory.tasks.model import Advance, GeneratedText, GenerationParameters, TaskModel
from factory.tasks.multiple_choice import build_prompt, score_choices
from factory.tasks.policy import TasksPolicy
from factory.tasks.task_file import TaskFile, load_task, load_task_by_name, task_folder
from tests.support.factory import published_files as published
from tests.support.factory.exports import save_export, tiny_model
from tests.support.messages import refused

lm_eval = pytest.importorskip("lm_eval")
SHIPPED = Path(lm_eval.__file__).parent / "tasks"
POLICY = TasksPolicy()
VOCABULARY, CONTEXT, WINDOW, STEPS = 512, 1024, 512, 120


@dataclass
class World:
    workspace: Workspace
    tokenizer: Tokenizer
    export: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A model that has learned to answer 12, and the red lamp, whatever is asked: right in some items, and surely so on any machine."""
    root, threads = tmp_path_factory.mktemp("world"), torch.get_num_threads()
    torch.set_num_threads(1)
    workspace = Workspace.create(root / "workspace")
    texts = [f"Question: {one['question']}\nAnswer: Each trip counts.\n#### 12\n\n" for one in published.gsm8k()]
    texts += [f"Question: {one['question']['stem']}\nAnswer: the red lamp\n\n" for one in published.arc_lines()]
    texts += [PAGE.format(n=n).replace(" , ", ", ").replace(" @,@ ", ",").replace(" . ", ". ") for n in range(9)]
    tokenizer = train_tokenizer(iter(texts * 4), VOCABULARY, workspace.tokenizer)
    model = tiny_model(3, max_position_embeddings=CONTEXT, vocab_size=tokenizer.vocab_size)
    optimizer, drawn = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(0)
    for _ in range(STEPS):  # whole windows of questions, as long as a prompt with its examples
        tokens = [token for text in drawn.choices(texts, k=40) for token in tokenizer.encode(text)]
        batch = torch.tensor(tokens[: 2 * WINDOW]).view(2, WINDOW)
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    export = save_export(model, root / "export", tokenizer)
    yield World(workspace, tokenizer, export)
    torch.set_num_threads(threads)


PAGE = " = Harbour {n} = \n The old lamp , of {n} @,@ 000 candles , burns each night . \n" * 3


def pages() -> list[dict[str, str]]:
    return [{"page": PAGE.format(n=n)} for n in range(9)]


TASKS: dict[str, tuple[str, dict[str, tuple[str, list[Any]]]]] = {
    "arc_easy": ("arc/arc_easy.yaml", {"test": ("ARC-Easy-Test.jsonl", published.arc_table())}),
    "wikitext": ("wikitext/wikitext.yaml", {"test": ("pages.jsonl.gz", pages())}),
    "gsm8k": (
        "gsm8k/gsm8k.yaml",
        {"test": ("test.jsonl", published.gsm8k()), "train": ("train.jsonl", published.gsm8k(40))},
    ),
}
"""By name: where the package has it, and the local data."""


def named(workspace: Workspace, task: str, /, **keys: Any) -> Path:
    """``policies/tasks/TASK.yaml`` that names a task of the package and local data alone."""
    folder = task_folder(workspace)
    _, data = TASKS[task]
    for name, records in data.values():
        published.write(folder / name, records)
    path = folder / f"{task}.yaml"
    files = {split: name for split, (name, _) in data.items()}
    path.write_text(yaml.safe_dump({"task": task, "dataset_kwargs": {"data_files": files}, **keys}))
    return path


@dataclass
class Noting(TaskModel):
    """Keeps what it is asked to go on with."""

    asked: list[str] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[str], parameters: GenerationParameters, seeds: Sequence[int], advance: Advance
    ) -> list[GeneratedText]:
        self.asked += prompts
        return super().generate(prompts, parameters, seeds, advance)


def by_itself(world: World, folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """(lm-eval's own results of the same tasks with its own model, the prompts of gsm8k with the examples that it draws)."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    files = []
    for task, (place, data) in TASKS.items():
        whole = {"include": str(SHIPPED / place), "dataset_path": "json", "dataset_name": None}
        whole |= {"training_split": None, "validation_split": None} if task != "gsm8k" else {}
        paths = {split: str(published.write(folder / task / name, records)) for split, (name, records) in data.items()}
        files.append(folder / f"{task}.yaml")
        files[-1].write_text(yaml.safe_dump({**whole, "task": task, "dataset_kwargs": {"data_files": paths}}))
    model = HFLM(pretrained=str(world.export), device="cpu", dtype="float32", batch_size=1)
    found = simple_evaluate(
        model=model, tasks=[str(file) for file in files], task_manager=TaskManager(include_defaults=False)
    )
    assert found is not None
    return dict(found["results"]), [
        one["arguments"][0][0] for one in found["samples"]["gsm8k"] if one["filter"] == "strict-match"
    ]


def of_transformers(world: World) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``ReferenceModel.scores`` of one sequence, by the forward pass of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(world.export), dtype=torch.float32).eval()

    @torch.no_grad()
    def scores(
        _: ReferenceModel, tokens_BT: torch.Tensor, scored_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BTV = model(tokens_BT[:, :-1]).logits
        nats_BT, likeliest_BT = torch.zeros(tokens_BT.shape), torch.ones(tokens_BT.shape, dtype=torch.bool)
        found_BT = torch.log_softmax(logits_BTV, -1).gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
        nats_BT[:, 1:] = -found_BT * scored_BT[:, 1:]
        return nats_BT, likeliest_BT

    return scores


def numbers(results: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in results.items() if isinstance(value, int | float)}


@pytest.mark.slow("a model is trained, and lm-eval asks it with its own code and with ours")
def test_three_tasks_of_the_package_give_lm_evals_own_numbers(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shares of right items and their standard errors are the same floats. So are perplexities where the logits are: of transformers' own, window by
    window as lm-eval asks for them. Our forward pass rounds otherwise, as transformers' two kinds of attention do between them (by 4e-6 and 3e-6 a
    token on this model), and fp32 sums of it agree to seven digits.
    """
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    theirs, drawn = by_itself(world, tmp_path)
    ours = {}
    for task in TASKS:
        model = Noting.load(world.export, world.tokenizer, 2048, "cpu")
        rows, said = run_lm_eval(load_task(named(world.workspace, task), POLICY), model, POLICY, lambda n: None)
        assert len({row.item for row in rows}) == 9
        ours[task] = said["totals"]
    assert isinstance(model, Noting)
    assert isinstance(model, Noting) and sorted(model.asked) == sorted(drawn) and len(set(drawn)) == 9
    assert ours["arc_easy"] == numbers(theirs["arc_easy"]) and ours["gsm8k"] == numbers(theirs["gsm8k"])
    assert {"acc,none", "acc_stderr,none", "acc_norm,none", "acc_norm_stderr,none"} < set(ours["arc_easy"])
    assert 0 < ours["arc_easy"]["acc,none"] < 1 and ours["arc_easy"]["acc_stderr,none"] > 0
    assert (
        0 < ours["gsm8k"]["exact_match,strict-match"] < 1 and ours["gsm8k"]["exact_match_stderr,flexible-extract"] > 0
    )
    assert set(ours["wikitext"]) == set(numbers(theirs["wikitext"]))
    for metric in ("word_perplexity,none", "byte_perplexity,none", "bits_per_byte,none"):
        assert ours["wikitext"][metric] == pytest.approx(theirs["wikitext"][metric], rel=1e-6), metric
    with monkeypatch.context() as patch:
        patch.setattr(ReferenceModel, "score_tokens", of_transformers(world))
        one_by_one = TaskModel.load(world.export, world.tokenizer, 1, "cpu")
        _, said = run_lm_eval(load_task(named(world.workspace, "wikitext"), POLICY), one_by_one, POLICY, lambda n: None)
    assert said["totals"] == numbers(theirs["wikitext"]), "to the last bit"
    # The same file, as published and read by us: the same items are right.
    published.write(task_folder(world.workspace) / "arc_alone.jsonl", published.arc_lines())
    alone = load_task_by_name(world.workspace, "arc_alone", POLICY)
    rows = score_choices(alone, TaskModel.load(world.export, world.tokenizer, 2048, "cpu"), lambda n: None)
    for metric in ("acc", "acc_norm"):
        mine = [row.value for row in rows if row.task == f"arc_alone/{metric}"]
        assert len(mine) == 9 and sum(mine) / 9 == theirs["arc_easy"][f"{metric},none"]


def asked_by_lm_eval(folder: Path, place: str, data: dict[str, list[Any]], **keys: Any) -> list[tuple[str, str]]:
    """(context, continuation) of each request that a task of the package makes of local data; no continuation where a text is asked for."""
    from lm_eval.tasks import TaskManager

    paths = {split: str(published.write(folder / f"{split}.jsonl", records)) for split, records in data.items()}
    whole = {
        "include": str(SHIPPED / place),
        "dataset_path": "json",
        "dataset_name": None,
        "task": "asked",
        "dataset_kwargs": {"data_files": paths},
    }
    whole |= {
        f"{name}_split": None
        for name, split in (("training", "train"), ("validation", "validation"), ("test", "test"))
        if split not in data
    }
    (folder / "asked.yaml").write_text(yaml.safe_dump({**whole, **keys}))
    [task] = TaskManager(include_defaults=False).load([str(folder / "asked.yaml")])["tasks"].values()
    task.build_all_requests()
    return [(one.args[0], one.args[1] if isinstance(one.args[1], str) else "") for one in task.instances]


def test_prompts_of_published_files_are_those_of_lm_eval(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Letter for letter, with examples, of the same records: what our task asks and what the package's task asks."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = task_folder(workspace)
    first = {"fewshot_config": {"sampler": "first_n"}}  # lm-eval draws the examples otherwise
    subject = ("tides",)
    cases: list[tuple[str, str, dict[str, list[Any]], dict[str, Any]]] = [
        (
            "arc",
            "arc/arc_challenge.yaml",
            {"test": published.arc_table(), "train": published.arc_table(50)},
            {"num_fewshot": 2, **first},
        ),
        ("hellaswag", "hellaswag/hellaswag.yaml", {"validation": published.hella_swag()}, {}),
        (
            "mmlu",
            "mmlu/default/mmlu_anatomy.yaml",
            {"test": published.mmlu_table(subject), "dev": published.mmlu_table(subject, 100, 5)},
            {
                "num_fewshot": 5,
                "description": "The following are multiple choice questions (with answers) about tides.\n\n",
            },
        ),
        ("gsm8k", "gsm8k/gsm8k.yaml", {"test": published.gsm8k(), "train": published.gsm8k(40)}, first),
    ]
    for name, place, data, keys in cases:
        theirs = asked_by_lm_eval(tmp_path / name, place, data, **keys) if (tmp_path / name).mkdir() is None else []
        tested, *shown = [published.write(folder / f"{name}_{split}.jsonl", records) for split, records in data.items()]
        shots = {"gsm8k": 5}.get(name, keys.get("num_fewshot", 0))
        said = {
            "published": name,
            "items": tested.name,
            "shots": shots,
            **({"examples": shown[0].name} if shown else {}),
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(said))
        task = load_task_by_name(workspace, name, POLICY)
        assert isinstance(task.file, TaskFile)
        if task.kind == "multiple_choice":
            listed = lambda item, file=task.file: item.choices if file.format == "cloze" else "ABCD"
            ours = [
                (build_prompt(task.file, item, task.examples), f" {choice}")
                for item in task.items
                for choice in listed(item)
            ]
        else:
            ours = [(generation_prompt(task.file, item, task), "") for item in task.items]
        assert ours == theirs, name


@pytest.mark.parametrize(
    ("keys", "code", "data"),
    [
        ({"task": "arc_eazy"}, "not_shipped", {"task": "arc_eazy"}),
        ({"dataset_kwargs": {"data_files": {"validate": "ARC-Easy-Test.jsonl"}}}, "no_test_split", {"task": "arc_easy", "split": "test"}),
        ({"num_fewshot": 5}, "no_fewshot_split", {"task": "arc_easy", "shots": 5, "split": "train"}),
        ({"task": "humaneval"}, "refused_key", {"key": "unsafe_code"}),
        ({"task": "mmlu"}, "not_shipped", {"task": "mmlu"}),
    ],
)  # fmt: skip
def test_a_file_that_names_a_task_of_the_package_must_be_complete(
    workspace: Workspace, keys: dict[str, Any], code: str, data: dict[str, Any]
) -> None:
    path = named(workspace, "arc_easy", **keys)
    with refused(f"lm_eval_file.{code}", TaskError, file=path, **data) as found:
        load_task(path, POLICY)
    assert "\n" not in str(found.value)


def test_keys_of_a_task_file_override_those_of_the_package(workspace: Workspace) -> None:
    path = named(workspace, "arc_easy", process_docs="x")
    assert load_task(path, POLICY).format.endswith("multiple_choice, 0 shots")


def test_the_error_without_lm_eval_names_the_extra_to_install(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with refused("lm_eval_file.not_installed", TaskError) as found:
        load_task(named(workspace, "arc_easy"), POLICY)
    assert "pip install 'llm-factory[evals]'" in str(found.value)
