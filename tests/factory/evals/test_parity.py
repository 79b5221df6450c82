"""Every difference between trainer, checkpoint, export, transformers and engine fails its own check. An intact export passes all checks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factory.evals.evaluator import load_current_suite
from factory.evals.export_parity import OF_CHECKPOINT, OF_FILES, check_against_checkpoint, check_export_files
from factory.evals.parity import CHECKS, ParityCase, check_parity
from factory.evals.policy import EvalPolicy
from factory.evals.probes.checks import OF_ENGINE
from factory.evals.probes.engine_process import VLLM_PROGRAM
from factory.evals.probes.server import ProbeAnswer
from factory.evals.reference_model import ReferenceModel
from factory.evals.tasks import encode_documents
from factory.evals.token_bytes import TokenBytes
from factory.ingest.chat_template import OLDER_TEMPLATES, TEMPLATE_WITHOUT_CALLS_AND_BOS
from factory.ledger.ledger import record_event
from factory.ledger.rows import CandidateRow
from tests.support.factory.export_breaks import (
    BREAKS,
    in_json,
    in_weights,
    rounded,
)
from tests.support.factory.exports import VOCAB, FilledPlant
from tests.support.messages import codes, tree
from trainer.contract.data.document_stream import DocumentStream
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard


def case_of(plant: FilledPlant, candidate: CandidateRow, export: Path) -> ParityCase:
    suite = load_current_suite(plant)
    token_bytes = TokenBytes.load(plant.workspace.tokenizer)
    texts = encode_documents(suite.documents, plant.tokenizer, token_bytes, 2048)
    return ParityCase(
        replace(candidate, export_path=str(export)), plant.tokenizer, plant.workspace.tokenizer, token_bytes, ReferenceModel.load(export),
        suite, texts, [plant.shard], plant.ledger, EvalPolicy(parity_documents=8, vllm="never"),
    )  # fmt: skip


SLOW = pytest.mark.slow("transformers and an engine come up for each")
IN_SLOW_TIER = ("special tokens no longer defused", "another tokenizer")


def failed(checks: list[Any]) -> dict[str, str]:
    assert sorted(check.name for check in checks) == sorted(set(CHECKS) - {"export", "finite_loss"})
    return {check.name: check.detail for check in checks if check.ok is False}


@SLOW
def test_an_intact_export_passes_every_check(plant: FilledPlant, sound: CandidateRow) -> None:
    checks = check_parity(case_of(plant, sound, Path(sound.export_path)))
    assert not failed(checks) and all(check.ok for check in checks), [check for check in checks if not check.ok]


@pytest.mark.long("vLLM takes minutes to start")
def test_vllm_is_checked_if_it_is_installed(plant: FilledPlant, sound: CandidateRow) -> None:
    if not VLLM_PROGRAM.exists():
        pytest.skip("vLLM is not installed: make serve-env")
    case = case_of(plant, sound, Path(sound.export_path))
    checks = check_parity(replace(case, policy=EvalPolicy(parity_documents=8, vllm="auto")))
    assert not failed(checks) and all(check.ok for check in checks), [check for check in checks if not check.ok]
    of_engines = {check.name: check.detail for check in checks if check.name in OF_ENGINE}
    assert set(of_engines) == set(OF_ENGINE)
    assert all("native: " in detail and "vllm: " in detail for detail in of_engines.values()), of_engines
    print(*of_engines.items(), sep="\n")


@SLOW
@pytest.mark.sample(*IN_SLOW_TIER)
@pytest.mark.parametrize("name", BREAKS)
def test_each_damage_of_an_export_fails_its_own_check(
    plant: FilledPlant, sound: CandidateRow, tmp_path: Path, name: str
) -> None:
    own, others, make = BREAKS[name]
    broken = Path(shutil.copytree(sound.export_path, tmp_path / "export"))
    make(broken)
    found = failed(check_parity(case_of(plant, sound, broken)))
    assert set(found) == {own} | others, found
    assert "again" in found[own] or "must" in found[own], "it says what to do"


IN_FILES = (*OF_CHECKPOINT, *OF_FILES)


@pytest.mark.parametrize("name", [name for name, (own, _, _) in BREAKS.items() if own in IN_FILES])
def test_damaged_files_are_found_before_any_program_starts(
    plant: FilledPlant, sound: CandidateRow, tmp_path: Path, name: str
) -> None:
    """What transformers would say of the tokenizer is left out."""
    from factory.evals import parity as module

    own, others, make = BREAKS[name]
    broken = Path(shutil.copytree(sound.export_path, tmp_path / "export"))
    make(broken)
    case = replace(case_of(plant, sound, Path(sound.export_path)), candidate=replace(sound, export_path=str(broken)))
    stop = [case.tokenizer.end_token, case.tokenizer.stop_token]
    files = module._files(case, stop, ProbeAnswer({}, None, "not asked"))
    checks = [*check_against_checkpoint(plant.ledger, case.candidate, case.tokenizer.vocab_size), *files]
    assert {check.name for check in checks if check.ok is False} == {own} | others & set(IN_FILES), checks


def test_an_export_is_compared_with_its_record_and_unchecked_without_one(
    plant: FilledPlant, sound: CandidateRow, tmp_path: Path
) -> None:
    checks = lambda row: {
        check.name: (check.ok, check.detail)
        for check in check_against_checkpoint(plant.ledger, row, plant.tokenizer.vocab_size)
    }
    broken = Path(shutil.copytree(sound.export_path, tmp_path / "export"))
    in_weights(rounded)(broken)
    ok, detail = checks(replace(sound, export_path=str(broken)))["weights"]
    assert ok is False and codes(tree(detail))[1:] == ["export_parity.other_weights", "export_parity.again"]
    older = CandidateRow.get(plant.ledger, plant.add_candidate(Path(sound.export_path)))
    with plant.ledger.begin() as tx:
        record_event(tx, "candidate", f"candidate:{older.id}", {"segment": older.segment})
    assert {ok for ok, _ in checks(older).values()} == {None}
    for _, told in checks(older).values():
        assert codes(tree(told))[1:] == ["export_parity.not_recorded", "export_parity.again"]


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    "content", [None, b"", b"[]", b"{", b"\xff\xfe", b"null", b'{"eos_token": {"content": []}, "chat_template": 3}']
)
def test_missing_or_malformed_files_fail_their_checks(
    sound: CandidateRow, tmp_path: Path, name: str, content: bytes | None
) -> None:
    export = Path(shutil.copytree(sound.export_path, tmp_path / "export"))
    (export / name).unlink()
    if content is not None:
        (export / name).write_bytes(content)
    found = {check.name: check.ok for check in check_export_files(export, None, [0, 2, 0], [0, 2], 0)}
    own = {
        "generation_config.json": "generation_config",
        "tokenizer_config.json": "bos_eos",
        "chat_template.jinja": "template",
    }
    assert found[own[name]] is False, found


# -- the trainer's side ------------------------------------------------------------------------------------------------
def trainer_checks(plant: FilledPlant, sound: CandidateRow, shard: Any) -> dict[str, bool | None]:
    """The checks of the trainer's side on another token shard, without any program."""
    from factory.evals import parity as module

    case = replace(case_of(plant, sound, Path(sound.export_path)), shards=[shard])
    made = [module._tokenizer(case), module._trainer_tokens(case), module._packing(case)]
    return {check.name: check.ok for check in made}


def shard_with(
    plant: FilledPlant, folder: Path, change: Callable[[Any, Any], tuple[Any, Any]], sha256: str = ""
) -> Any:
    """The plant's shard once more, ids and masks changed."""
    rows = plant.shard.documents.to_pylist()

    def documents() -> Iterator[TokenizedDocument]:
        for row in rows:
            start, stop = row["start"], row["start"] + row["length"]
            ids, mask = change(plant.shard.tokens[start:stop].copy(), plant.shard.read_loss_mask(start, stop).copy())
            yield TokenizedDocument(row["key"], row["key"], row["domain"], "s", "psf", ids.astype(np.uint32), mask)

    return write_token_shard(
        folder, documents(), vocab_size=VOCAB, tokenizer_sha256=sha256 or plant.tokenizer.sha256
    )  # fmt: skip


def begun_late(ids: Any, mask: Any) -> tuple[Any, Any]:
    return ids, np.concatenate([mask[1:], mask[:1]])


def split_otherwise(ids: Any, mask: Any) -> tuple[Any, Any]:
    """The same bytes in other tokens: a merge that the trainer's tokenizer did not do."""
    return np.repeat(ids, np.where(ids == ids[len(ids) // 2], 2, 1)), np.repeat(
        mask, np.where(ids == ids[len(ids) // 2], 2, 1)
    )


def muted(ids: Any, mask: Any) -> tuple[Any, Any]:
    """A chat whose answers are of weight 0."""
    return ids, mask if mask.all() else np.zeros_like(mask)


def half_muted(ids: Any, mask: Any) -> tuple[Any, Any]:
    """An answer without its first token's loss."""
    return ids, mask if mask.all() else mask & (np.arange(len(mask)) != np.flatnonzero(mask)[0])


def test_each_error_of_the_trainer_fails_its_own_check(
    plant: FilledPlant, sound: CandidateRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = lambda ids, mask: (ids, mask)
    for number, change in enumerate((same, muted)):
        assert set(trainer_checks(plant, sound, shard_with(plant, tmp_path / str(number), change)).values()) == {True}
    others = {
        "trainer_tokens": [(begun_late, ""), (split_otherwise, ""), (half_muted, "")],
        "tokenizer": [(same, "0" * 64)],
    }
    for name, changes in others.items():
        for number, (change, sha256) in enumerate(changes):
            found = trainer_checks(plant, sound, shard_with(plant, tmp_path / f"{name}{number}", change, sha256))
            assert {name for name, ok in found.items() if not ok} == {name}, found
    tokens, mask = DocumentStream.read_piece_tokens, DocumentStream.read_target_mask
    for attribute, slipped in {
        "read_piece_tokens": lambda self, piece: tokens(self, piece)[::-1],
        "read_target_mask": lambda self, piece: ~np.broadcast_to(mask(self, piece), (piece.positions,)),
    }.items():
        with monkeypatch.context() as patched:
            patched.setattr(DocumentStream, attribute, slipped)
            found = trainer_checks(plant, sound, plant.shard)
        assert {name for name, ok in found.items() if not ok} == {"packing"}, (attribute, found)


def test_exports_of_older_workspaces_get_the_newer_template_without_bos(plant: FilledPlant, tmp_path: Path) -> None:
    """Their tokenizer's folder stays as it is; what is exported from now on refuses roles that spell special tokens."""
    older = Path(shutil.copytree(plant.workspace.tokenizer, tmp_path / "tokenizer"))
    (older / "chat_template.jinja").write_text(OLDER_TEMPLATES[0])
    in_json("tokenizer_config.json", chat_template=OLDER_TEMPLATES[0], bos_token=None, add_bos_token=False)(older)
    in_json("special_tokens_map.json", bos_token="left out")(older)
    in_json("tokenizer.json", post_processor=None)(older)
    tokenizer = type(plant.tokenizer).load(older)
    tokenizer.copy_to(tmp_path / "new")
    tokenizer.copy_to(tmp_path / "again", keep_old_template=True)
    for name, template in {"new": TEMPLATE_WITHOUT_CALLS_AND_BOS, "again": OLDER_TEMPLATES[0]}.items():
        assert (tmp_path / name / "chat_template.jinja").read_text() == template
        assert json.loads((tmp_path / name / "tokenizer_config.json").read_text())["chat_template"] == template
    ids, _ = tokenizer.encode_text("one")
    assert tokenizer.bos_token is None and ids.tolist() == [*tokenizer.encode("one"), 0]
    assert tokenizer.encode_chat_prompt([{"role": "user", "content": "one"}])[0] == tokenizer.special["<|im_start|>"]
    from transformers import AutoTokenizer

    (tmp_path / "new" / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert theirs("one")["input_ids"] == tokenizer.encode_text_prompt("one").tolist() == tokenizer.encode("one")
    assert theirs.bos_token_id is None
