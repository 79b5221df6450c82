"""The release gate's parity checks of imported models, with tokenizers and chat templates in the form of other families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from factory.evals.baselines import open_token_shards
from factory.evals.evaluator import evaluate_candidate, load_current_suite
from factory.evals.parity import ParityCase, check_parity
from factory.evals.policy import EvalPolicy
from factory.evals.probes.checks import CHECKS, OF_ENGINE
from factory.evals.probes.conversations import (
    choose_spelled_tokens,
    encode_prompt_or_none,
    make_typed_chats,
    make_typed_texts,
    select_special_ids,
)
from factory.evals.probes.engine_process import VLLM_PROGRAM
from factory.evals.reference_model import ReferenceModel
from factory.evals.tasks import encode_documents
from factory.evals.token_bytes import TokenBytes
from factory.ingest.chain import ingest_shard
from factory.ingest.tokenizer import Tokenizer
from factory.ledger.plant import Plant
from factory.ledger.rows import CandidateRow, EvaluationRow
from tests.support.factory.made_up_text import prose
from tests.support.models.small_models import CASES
from tests.support.serving.imported import Imported, import_case, make_tokenizer_folder

CONTEXT = 256  # room for the fixed chats of the checks
# tokenizer and template → the small model that has them
CASE_OF_TEMPLATE = {
    "llama3": "llama-scaled",
    "gemma": "gemma3_text-scaled",
    "mistral": "mistral-windows",
    "smollm2": "smollm3-plain",
}
ANSWERS = (
    "  Two blanks, and one line end.\n",
    "naïve café, 日本語 🙂",
    "def f(x):\n\treturn x\n",
    "Yes.",
    "```\n- a\n- b\n```",
)
SLOW = pytest.mark.slow("transformers and an engine come up for each")


def make_chat(number: int) -> dict[str, Any]:
    """A chat of two answers, a third of them with a system message, which Gemma's template refuses."""
    words = prose(number).split()
    messages = [
        {"role": "user", "content": f" {' '.join(words[:9])}? "},
        {"role": "assistant", "content": ANSWERS[number % len(ANSWERS)]},
        {"role": "user", "content": f"{' '.join(words[9:20])}\n\n"},
        {"role": "assistant", "content": f"{' '.join(words[20:40])} {number}"},
    ]
    if number % 3 == 0:
        messages.insert(0, {"role": "system", "content": f"Answer as number {number}."})
    return {"messages": messages, "domain": "chat", "source": f"c{number}", "license": "MIT"}


def import_with_documents(name: str, root: Path, **keys: Any) -> Plant:
    """An imported model with the tokenizer ``name``, in a workspace with 60 texts and 90 chats. ``keys``: of its config.json."""
    case = next(case for case in CASES if str(case) == CASE_OF_TEMPLATE[name])
    wide = {**case.keys, "max_position_embeddings": CONTEXT, **keys}
    imported: Imported = import_case(replace(case, keys=wide), root, name)
    rows = [{"text": prose(n), "domain": "news", "source": f"s{n}", "license": "MIT"} for n in range(60)]
    rows += [make_chat(200 + n) for n in range(90)]
    (root / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ingest_shard(imported.plant, root / "new.jsonl")
    return imported.plant


def measure_import(plant: Plant, **policy: Any) -> dict[str, tuple[bool | None, str]]:
    """What the daemon does with release 0 once documents are held out: (passed, detail) of each check of the gate."""
    evals = {"documents_per_domain": 8, "parity_documents": 8, **policy}
    (plant.workspace.root / "policies" / "evals.yaml").write_text(yaml.safe_dump(evals))
    [candidate] = CandidateRow.select(plant.ledger)
    parity = EvaluationRow.get(plant.ledger, evaluate_candidate(plant, candidate.id)).summary["parity"]
    assert set(parity) == set(CHECKS)
    return {name: (check["ok"], check["detail"]) for name, check in parity.items()}


@SLOW
@pytest.mark.parametrize("name", CASE_OF_TEMPLATE)
def test_an_imported_model_with_its_own_template_passes_every_check_of_the_gate(name: str, tmp_path: Path) -> None:
    checks = measure_import(import_with_documents(name, tmp_path), vllm="never")
    assert {check: detail for check, (ok, detail) in checks.items() if ok is not True} == {}


@pytest.mark.long("vLLM takes minutes to start")
@pytest.mark.parametrize("name", CASE_OF_TEMPLATE)
def test_the_gate_checks_vllm_with_the_template_of_an_imported_model(name: str, tmp_path: Path) -> None:
    if not VLLM_PROGRAM.exists():
        pytest.skip("vLLM is not installed: make serve-env")
    plant = import_with_documents(name, tmp_path, hidden_size=128, head_dim=32)
    checks = measure_import(plant, vllm="auto")
    assert {check: detail for check, (ok, detail) in checks.items() if ok is not True} == {}
    details = [checks[check][1] for check in OF_ENGINE]
    assert all("native: " in detail and "vllm: " in detail and "skipped" not in detail for detail in details), details
    print(name, *details, sep="\n")


def edit_template(old: str, new: str) -> Callable[[Path], None]:
    def edit(export: Path) -> None:
        file = export / "chat_template.jinja"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return edit


# a change of the export's template, and the checks that see it
CHANGES: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "llama3": (edit_template(" | trim", ""), {"whitespace", "tools_printed"}),
    "gemma": (edit_template("<end_of_turn>\n", "<end_of_turn>"), {"server_chat", "whitespace"}),
    "mistral": (edit_template("' [INST] '", "'[INST] '"), {"server_chat", "whitespace", "system_message"}),
}


@SLOW
@pytest.mark.parametrize("name", CHANGES)
def test_another_template_in_the_export_of_an_imported_model_fails_its_checks(name: str, tmp_path: Path) -> None:
    plant, (change, seen) = import_with_documents(name, tmp_path), CHANGES[name]
    [candidate] = CandidateRow.select(plant.ledger)
    export = Path(shutil.copytree(candidate.export_path, tmp_path / "changed"))
    change(export)
    folder, suite = plant.workspace.tokenizer, load_current_suite(plant)
    tokenizer, token_bytes = Tokenizer.load(folder), TokenBytes.load(folder)
    listed = plant.ledger.read("SELECT id, path FROM token_shards WHERE tokens > 0")
    shards = open_token_shards(plant.workspace.root, {"token_shards": [{**row, "generation": 1} for row in listed]})
    case = ParityCase(
        replace(candidate, export_path=str(export)), tokenizer, folder, token_bytes, ReferenceModel.load(export), suite,
        encode_documents(suite.documents, tokenizer, token_bytes, 2048), shards, plant.ledger, EvalPolicy(parity_documents=8, vllm="never"),
    )  # fmt: skip
    failed = {check.name for check in check_parity(case) if check.ok is False}
    assert failed >= {"template", "bos_eos", "tokenizer"} | seen, failed


@pytest.mark.parametrize("name", CASE_OF_TEMPLATE)
def test_typed_texts_spell_the_special_tokens_of_the_models_own_tokenizer(name: str) -> None:
    import tokenizers

    folder = make_tokenizer_folder(name)
    tokenizer, library = Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = choose_spelled_tokens(tokenizer)
    assert set(words) <= set(tokenizer.special) and tokenizer.special[words[2]] == tokenizer.stop_token
    special = lambda ids: select_special_ids(ids, tokenizer.special_ids)
    for text in make_typed_texts(words):
        assert special(library.encode(text, add_special_tokens=False).ids), (
            "a program that matches special tokens finds some"
        )
        assert not special(tokenizer.encode(text))
    plain, typed = (
        tokenizer.encode_chat_prompt([{"role": "user", "content": said}])
        for said in ("a", make_typed_chats(words)[0][0]["content"])
    )
    assert special(plain) == special(typed)


@pytest.mark.parametrize("name", CASE_OF_TEMPLATE)
def test_a_message_with_null_for_content_gets_the_ids_of_transformers(name: str) -> None:
    """Servers send ``"content": null`` beside calls. transformers leaves such keys out before a template sees them."""
    from transformers import AutoTokenizer

    folder = make_tokenizer_folder(name)
    there, here = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    chat = [{"role": "user", "content": "The weather?"}, {"role": "assistant", "content": None, "tool_calls": []}]
    ours = encode_prompt_or_none(chat, here)
    try:
        theirs = there.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    except jinja2.exceptions.UndefinedError:
        theirs = None
    assert ours == theirs and (ours is not None) == (name in ("llama3", "gemma"))
