"""Checks that trainer, evaluator and servers see the same model, and that it was not trained on held-out text.

trainer     ids and loss masks of the token shards, encoded again by the frozen tokenizer; the packed rows
checkpoint  weights and recipe, converted again (``export_parity``)
evaluator   ``Tokenizer`` and ``ReferenceModel``
server      transformers on the export in its own process (``server_probe``): AutoTokenizer with chat template, logits, generation
engine      the serving engine on the export, asked over HTTP (``probes.engine``), and vLLM if it is installed
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from factory.core.errors import InputError
from factory.evals.contamination import check_contamination
from factory.evals.export_parity import (
    ForeignTokenFiles,
    check_against_checkpoint,
    check_export_files,
    read_recorded_export,
)
from factory.evals.policy import EvalPolicy
from factory.evals.probes.chat_checks import AGAIN, CHAT_CHECKS, ProbeRequest, check_chats
from factory.evals.probes.checks import CHECKS as CHECKS
from factory.evals.probes.checks import OF_ENGINE, ProbeCheck, join_sentences
from factory.evals.probes.engine import Fixture, make_engine_fixture
from factory.evals.probes.engine_process import (
    NATIVE,
    VLLM,
    VLLM_PROGRAM,
    find_vllm_obstacle,
    make_engine_detail,
    start_engine,
)
from factory.evals.probes.server import ProbeAnswer, run_transformers_probe
from factory.evals.reference_model import ReferenceModel
from factory.evals.suite import Suite, make_shuffling_sort_key
from factory.evals.tasks import ScoredText
from factory.evals.token_bytes import TokenBytes
from factory.ingest.shapes.chats import make_turn
from factory.ingest.tokenizer import IM_END, IM_START, Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.rows import CandidateRow
from kernels.contract.message import Message
from trainer.contract.data.data_order import DataOrder
from trainer.contract.data.data_plan import DataPlan
from trainer.contract.data.packing import STRATEGIES
from trainer.contract.data.token_shard import TokenShard
from trainer.contract.errors import TrainerError
from trainer.contract.recipe import BatchRecipe

LOGITS_TOLERANCE = 1e-4  # relative to the largest logit, fp32
NEW_TOKENS = 24
PACKED_ROWS = 4


@dataclass(frozen=True)
class ParityCase:
    """A candidate and everything that its checks compare it with."""

    candidate: CandidateRow
    tokenizer: Tokenizer
    tokenizer_folder: Path
    token_bytes: TokenBytes
    model: ReferenceModel
    suite: Suite
    texts: Sequence[ScoredText]
    shards: Sequence[TokenShard]
    ledger: Ledger
    policy: EvalPolicy

    @property
    def export(self) -> Path:
        return Path(self.candidate.export_path)


def check_parity(case: ParityCase) -> list[ProbeCheck]:
    """Return all checks except 'export' and 'finite_loss'. A failed check raises no error."""
    count = case.policy.parity_documents
    by_hash = sorted(case.suite.documents, key=lambda document: make_shuffling_sort_key("parity", document.key))
    # Left out: documents that spell a special token. Programs that match special tokens in text give them other ids.
    spells = case.tokenizer.spells_special_token
    texts = [d.content["text"][:2000] for d in by_hash if d.messages is None and not spells(d.content["text"])][:count]
    chats = [d.messages for d in by_hash if d.messages and not any(spells(m["content"]) for m in d.messages)][:count]
    longest = max(case.texts, key=lambda text: (len(text.tokens), text.document.key))
    ids = longest.tokens[: case.model.spec.context].tolist()
    prompt = ids[: max(1, min(16, case.model.spec.context - NEW_TOKENS))]
    stop = [*case.tokenizer.stop_ids]
    asked = ProbeRequest([*texts, *_training_texts(case, count)], chats)
    with start_engine(NATIVE, case.export) as native:  # the engine starts while transformers runs
        served = run_transformers_probe(
            asked.to_json() | {
                "export": str(case.export), "logits_of": ids, "generate": prompt, "stop_ids": stop, "max_new_tokens": NEW_TOKENS,
                "memory_mib": case.policy.probe_memory_mib,
            },
            case.policy.probe_seconds,
        )  # fmt: skip
        files = _files(case, stop, served)
        greedy = any(check.name == "generation_config" and check.ok for check in files)
        fixture = make_engine_fixture(case.tokenizer, case.model, case.model.spec.context, greedy)
        engines = [native.run_checks(fixture, case.policy.engine_seconds)]
    if case.policy.vllm == "auto" and VLLM_PROGRAM.exists():
        engines.append(_vllm(case, fixture))
    return [
        _tokenizer(case),
        _trainer_tokens(case),
        _packing(case),
        *check_against_checkpoint(case.ledger, case.candidate, case.tokenizer.vocab_size),
        *files,
        *_server(case.tokenizer, asked, stop, served),
        _round_trip(case.tokenizer, asked, served),
        *check_contamination(case.ledger, case.tokenizer, case.shards, case.policy),
        _logits(case.model, ids, served),
        _smoke(served),
        *map(_together, zip(*engines, strict=True)),
    ]


def _vllm(case: ParityCase, fixture: Fixture) -> list[ProbeCheck]:
    """Return vLLM's checks. If vLLM cannot run this model on this machine, the checks pass with a note, because the export is not at fault."""
    if lacks := find_vllm_obstacle(case.model.spec):
        return [
            ProbeCheck(
                name,
                True,
                make_engine_detail(
                    "vllm", Message("parity.vllm_skipped", "The check was skipped. {reason}", reason=lacks)
                ),
            )
            for name in OF_ENGINE
        ]
    with start_engine(VLLM, case.export) as vllm:
        return vllm.run_checks(fixture, case.policy.vllm_seconds)


def _together(checks: Sequence[ProbeCheck]) -> ProbeCheck:
    """Return one check for the same check of several engines. It passes if all of them passed."""
    worst = min(checks, key=lambda check: (check.ok is not False, check.ok is True))
    return (
        worst
        if worst.ok is not True
        else ProbeCheck(worst.name, True, join_sentences([check.detail for check in checks]))
    )


def _files(case: ParityCase, stop: list[int], served: ProbeAnswer) -> list[ProbeCheck]:
    made = read_recorded_export(case.ledger, case.candidate.id)
    named = case.tokenizer.named_ids
    ids = served.answer.get("tokenizer_ids", named)  # unknown without an answer; check 'server_text' gives the reason
    foreign = None if case.tokenizer.is_own else ForeignTokenFiles(case.tokenizer)
    return check_export_files(case.export, made.config if made else None, ids, stop, case.tokenizer.bos_token, foreign)


# -- trainer against evaluator -----------------------------------------------------------------------------------------
def _tokenizer(case: ParityCase) -> ProbeCheck:
    named = {"the workspace": case.tokenizer.sha256, "the export": _hash_of_export(case)}
    named |= {f"token shard {shard.id[:8]}": shard.manifest["tokenizer_sha256"] for shard in case.shards}
    others = {who: sha for who, sha in named.items() if sha != case.tokenizer.sha256}
    if not others:
        same = Message(
            "parity.same_tokenizer", "Workspace, export and {shards:,|token shard|token shards} have the same tokenizer ({sha256:.12})",
            shards=len(case.shards), sha256=case.tokenizer.sha256,
        )  # fmt: skip
        return ProbeCheck("tokenizer", True, same)
    other = Message(
        "parity.other_tokenizer", "The workspace has the tokenizer {sha256:.12}, but {others}",
        sha256=case.tokenizer.sha256, others=[f"{who} has {sha[:12]}" for who, sha in list(others.items())[:3]],
    )  # fmt: skip
    return ProbeCheck("tokenizer", False, join_sentences([other, AGAIN]))


def _hash_of_export(case: ParityCase) -> str:
    path = case.export / "tokenizer.json"
    if not path.exists():
        return "missing"
    if case.tokenizer.is_own:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    try:
        return Tokenizer.load(case.export).sha256
    except InputError:
        return "unreadable"


def _sampled(case: ParityCase, count: int) -> list[tuple[str, str, TokenShard, int, int]]:
    """Return (rank, key, shard, start, length) of ``count`` training documents. All candidates of a data plan get the same documents."""
    listed = []
    for shard in case.shards:
        columns = [shard.documents.column(name).to_pylist() for name in ("key", "start", "length")]
        listed += [
            (make_shuffling_sort_key("parity", key), key, shard, start, length)
            for key, start, length in zip(*columns, strict=True)
        ]
    return sorted(listed, key=lambda entry: entry[0])[:count]


def _trainer_tokens(case: ParityCase) -> ProbeCheck:
    sample = _sampled(case, 2 * case.policy.parity_documents)
    wrong, tokens = [], 0
    for _, key, shard, start, length in sample:
        ids, mask = shard.tokens[start : start + length].astype(np.int64), shard.read_loss_mask(start, start + length)
        tokens += length
        if not _encodes_again(case, ids, mask):
            wrong.append(key)
    if wrong or not sample:
        return ProbeCheck(
            "trainer_tokens",
            False,
            Message(
                "parity.other_documents", "{wrong:,} of {documents:,} training documents get other ids when they are encoded again. First: {first}",
                wrong=len(wrong), documents=len(sample), first=wrong[:1],
            ),
        )  # fmt: skip
    return ProbeCheck(
        "trainer_tokens",
        True,
        Message(
            "parity.same_documents", "{documents:,} training documents ({tokens:,} tokens) get the same ids and loss mask when encoded again",
            documents=len(sample), tokens=tokens,
        ),
    )  # fmt: skip


def _packing(case: ParityCase) -> ProbeCheck:
    """Check that every packing strategy gives rows whose pieces have the same ids and loss mask as their documents."""
    listed = {shard.id: shard for shard in case.shards}
    domains = sorted({domain for shard in case.shards for domain in shard.documents.column("domain").to_pylist()})
    planned = [{"id": shard.id, "path": str(shard.path), "generation": 0} for shard in listed.values()]
    weights = dict.fromkeys(domains, 1.0)
    context, vocabulary = case.model.spec.context, case.model.spec.vocab_size
    places: dict[str, tuple[TokenShard, int, int]] = {}
    for shard in case.shards:
        columns = [shard.documents.column(name).to_pylist() for name in ("key", "start", "length")]
        places |= {key: (shard, start, length) for key, start, length in zip(*columns, strict=True)}
    pieces = 0
    try:
        plan = DataPlan.from_json({"token_shards": planned, "weights": weights, "max_epochs": 1})
        for strategy in STRATEGIES:
            batch = BatchRecipe.model_validate({"sequences": PACKED_ROWS, "packing": strategy})
            order = DataOrder(plan, context=context, batch=batch, vocab_size=vocabulary)
            for row in order.draw_next_rows():
                pieces += len(row)
                for piece in row:
                    stream = order.streams[piece.stream]
                    key = stream.look_up_document_key(piece.document)
                    shard, start, length = places[key]
                    first, after = start + piece.start, start + piece.start + piece.positions + 1
                    ids, mask = shard.tokens[first:after], shard.read_loss_mask(first + 1, after)
                    same = np.array_equal(stream.read_piece_tokens(piece), ids) and np.all(
                        stream.read_target_mask(piece) == mask
                    )
                    if not same or after > start + length or sum(part.positions for part in row) > context:
                        other = Message(
                            "parity.other_row",
                            "Packing strategy {strategy} gives a wrong row. Its ids or loss mask differ from document {document} at token {token}",
                            strategy=strategy, document=key, token=piece.start,
                        )  # fmt: skip
                        return ProbeCheck("packing", False, other)
    except (TrainerError, KeyError) as error:
        return ProbeCheck(
            "packing",
            False,
            Message("parity.not_packed", "The documents cannot be packed: {reason}", reason=str(error)),
        )
    packed = Message(
        "parity.packed", "With each of {strategies:,} packing strategies, all {pieces:,} pieces of documents keep their ids and loss mask",
        strategies=len(STRATEGIES), pieces=pieces,
    )  # fmt: skip
    return ProbeCheck("packing", True, packed)


def _training_texts(case: ParityCase, count: int) -> list[str]:
    """Texts of training documents, for the round trip."""
    found = []
    for _, _, shard, start, length in _sampled(case, 2 * count):
        ids = shard.tokens[start : start + length].astype(np.int64)
        with contextlib.suppress(UnicodeDecodeError, ValueError):
            if case.tokenizer.is_chat(ids, shard.read_loss_mask(start, start + length)):
                continue
            text = _text(case, ids[:-1])
            if not case.tokenizer.spells_special_token(text):
                found.append(text[:2000])
    return found[:count]


def _encodes_again(case: ParityCase, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> bool:
    tokenizer = case.tokenizer
    try:
        if not tokenizer.is_own:
            again = tokenizer.encode_document(tokenizer.decode_document(ids, mask))
        elif tokenizer.is_chat(ids, mask):
            again = tokenizer.encode_messages(_messages(case, ids, mask))
        else:
            again = tokenizer.encode_text(_text(case, ids[:-1]))
    except (UnicodeDecodeError, ValueError, InputError):
        return False
    return np.array_equal(again[0], ids) and np.array_equal(again[1], mask)


def _messages(case: ParityCase, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
    starts, stops = (np.flatnonzero(ids == case.tokenizer.special[name]) for name in (IM_START, IM_END))
    turns = [_text(case, ids[a + 1 : b]) for a, b in zip(starts, stops, strict=True)]
    parts = [turn.split("\n", 1) for turn in turns]
    return [make_turn(role, content, bool(mask[b])) for (role, content), b in zip(parts, stops, strict=True)]


def _text(case: ParityCase, ids: npt.NDArray[np.int64]) -> str:
    """Return the text of ids, from the bytes of each token. A tokenizer that normalises text, or adds blanks, has its own way back."""
    if not case.tokenizer.is_own:
        return case.tokenizer.decode(ids)
    return case.token_bytes.find_bytes_of_ids(ids)[0].tobytes().decode("utf-8")


def _round_trip(tokenizer: Tokenizer, asked: ProbeRequest, served: ProbeAnswer) -> ProbeCheck:
    """Check that encoding, decoding and encoding again gives the same text and ids, both here and at the server."""
    texts = asked.to_json()["texts"]
    encoded = [tokenizer.encode_text(text)[0] for text in texts]
    decoded = [tokenizer.decode(ids) for ids in encoded]
    again = [tokenizer.encode_text(text)[0] for text in decoded]
    keeps = tokenizer.is_lossless  # otherwise the text may change, but not the ids of the changed text
    wrong = sum(
        (keeps and a != b) or not np.array_equal(x, y)
        for a, b, x, y in zip(decoded, texts, again, encoded, strict=True)
    )
    if served.problem and (not served.out_of_time or not wrong):
        return _unserved("round_trip", served)
    there = zip(served.answer["decoded"], texts, served.answer["encoded_again"], served.answer["texts"], strict=True)
    wrong_there = sum((keeps and a != b) or x != y for a, b, x, y in there)
    detail = Message(
        "parity.round_trip",
        "{texts:,|text was|texts were} encoded and decoded. The factory's tokenizer changed {here:,} of them, and transformers changed "
        "{server:,}",
        texts=len(texts), here=wrong, server=wrong_there,
    )  # fmt: skip
    same = not wrong and not wrong_there
    return ProbeCheck("round_trip", same, detail if same else join_sentences([detail, AGAIN]))


# -- server against evaluator ------------------------------------------------------------------------------------------
def _unserved(name: str, served: ProbeAnswer) -> ProbeCheck:
    detail = Message("parity.not_served", "transformers gave no answer: {problem}", problem=served.problem)
    return ProbeCheck(name, None if served.out_of_time else False, detail)


def _server(tokenizer: Tokenizer, asked: ProbeRequest, stop: list[int], served: ProbeAnswer) -> list[ProbeCheck]:
    if served.problem:
        return [_unserved(name, served) for name in (*CHAT_CHECKS, "stop")]
    answer = served.answer
    missing, more = sorted(set(stop) - set(answer["eos_token_ids"])), sorted(set(answer["eos_token_ids"]) - set(stop))
    ran_on = [token for token, ids in answer["stopped"].items() if len(ids) != 3 or ids[-1] != int(token)]
    if missing or more or ran_on:
        detail = Message(
            "parity.other_stops",
            "eos_token_id of generation_config.json lacks the ids {missing!r} and has the extra ids {extra!r}. "
            "Generation went on after these end tokens: {ran_on!r}. The value of eos_token_id must be {expected!r}",
            missing=missing, extra=more, ran_on=ran_on, expected=stop,
        )  # fmt: skip
    else:
        detail = Message(
            "parity.stops",
            "Each end token of generation_config.json ends generation: {tokens}",
            tokens=sorted(answer["eos_token_ids"]),
        )
    return [*check_chats(tokenizer, asked, answer), ProbeCheck("stop", not (missing or more or ran_on), detail)]


def _logits(model: ReferenceModel, ids: list[int], served: ProbeAnswer) -> ProbeCheck:
    if served.logits_TV is None:
        return _unserved("logits", served)
    ours = model.logits(torch.tensor([ids]))[0].numpy()
    if ours.shape != served.logits_TV.shape:
        other = Message(
            "parity.other_logits", "The factory's logits have shape {here!r}, but the logits of transformers have shape {server!r}",
            here=list(ours.shape), server=list(served.logits_TV.shape),
        )  # fmt: skip
        return ProbeCheck("logits", False, other)
    scale, apart = max(1.0, float(np.abs(ours).max())), float(np.abs(ours - served.logits_TV).max())
    detail = Message(
        "parity.logits",
        "At {positions:,} positions of a held-out document, the logits of the factory and of transformers "
        "differ by at most {apart:.1e}. The largest logit is {scale:.1f}",
        positions=len(ids), apart=apart, scale=scale,
    )  # fmt: skip
    return ProbeCheck("logits", bool(apart <= LOGITS_TOLERANCE * scale), detail)  # NaN compares false


def _smoke(served: ProbeAnswer) -> ProbeCheck:
    if served.problem:
        return _unserved("smoke", served)
    count = len(served.answer["generated"])
    return ProbeCheck(
        "smoke",
        count > 0,
        Message("parity.generated", "transformers loaded the export and generated {tokens:,} tokens", tokens=count),
    )
