"""The release gate evaluates and judges candidates with real exports, a real ledger and the real probe of the server."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch

from factory.core.errors import DamagedExportError, InputError
from factory.evals.evaluator import evaluate_candidate, load_current_suite
from factory.evals.parity import CHECKS
from factory.evals.policy import EvalPolicy
from factory.evals.tasks import encode_documents
from factory.evals.token_bytes import TokenBytes
from factory.gates.release.gate import judge_candidate
from factory.ingest.rules.held_out_split import goes_to_sealed_half_on_tie
from factory.ledger.ledger import documents, eval_items, evaluations, held_out, record_event, releases, verdicts
from factory.ledger.rows import CandidateRow, Subject, VerdictRow, find_champion
from kernels.contract.message import Message
from tests.support.factory.exports import (
    SHARD,
    FilledPlant,
    measured_alone,
    plant_of_one_thread,
    save_export,
    tiny_model,
    trained,
)
from tests.support.gates.reasons import expect, tells
from tests.support.messages import codes
from tests.support.paths import ROOT
from tests.support.plants.released_plant import evaluated, released_plant
from trainer.contract.data.token_shard import TokenizedDocument, write_token_shard


@pytest.fixture(scope="module")
def plant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FilledPlant]:
    with plant_of_one_thread(tmp_path_factory.mktemp("plant")) as made:
        yield made


@pytest.fixture(scope="module")
def weak(plant: FilledPlant) -> int:
    return plant.add_candidate(
        save_export(trained(tiny_model(), plant.shard, 15), plant.workspace.exports / "weak", plant.tokenizer)
    )


@pytest.fixture(scope="module")
def better(plant: FilledPlant, weak: int) -> int:
    export = save_export(trained(tiny_model(), plant.shard, 60), plant.workspace.exports / "better", plant.tokenizer)
    return measured_alone(plant, plant.add_candidate(export))


def verdict_of(plant: FilledPlant, number: int) -> dict:
    row = plant.ledger.select_first(sa.select(verdicts).where(verdicts.c.id == number))
    assert row is not None
    return row


def with_champion(plant: FilledPlant, candidate: int) -> None:
    """Make a judged candidate champion, whatever its verdict."""
    if find_champion(plant.ledger) is None:
        verdict = judge_candidate(plant, candidate)
        with plant.ledger.begin() as tx:
            tx.execute(
                releases.insert().values(
                    number=1, candidate=candidate, verdict=verdict, state="published", created_at=0.0
                )
            )
            record_event(tx, "promoted", "release:1")


def summary_of(plant: FilledPlant, candidate: int) -> dict:
    row = plant.ledger.select_first(sa.select(evaluations.c.summary).where(evaluations.c.candidate == candidate))
    assert row is not None
    return row["summary"]


@pytest.mark.slow("a whole evaluation, twice")
def test_evaluate_writes_items_and_summary_once(plant: FilledPlant, weak: int) -> None:
    number = evaluate_candidate(plant, weak)
    assert evaluate_candidate(plant, weak) == number
    summary = summary_of(plant, weak)
    assert set(summary["bpb"]) == set(summary["baselines"]) == set(summary["noise_floor"]) == {"code", "docs", "chat"}
    assert {name for name, check in summary["parity"].items() if not check["ok"]} == set(), summary["parity"]
    assert set(summary["parity"]) == set(CHECKS)
    assert all(1 < row["trigram"] < row["bigram"] < 5 for row in summary["baselines"].values())
    items = plant.ledger.select_rows(sa.select(eval_items).where(eval_items.c.evaluation == number))
    assert {item["task"] for item in items} == {"bpb", "dev", "cloze", "chat"} and len(summary["samples"]) == 12
    bits = sum(i["value"] for i in items if i["task"] == "bpb" and i["domain"] == "code") / 0.6931471805599453
    assert summary["bpb"]["code"] == pytest.approx(bits / summary["bytes"]["code"])
    held = [d for d in plant.documents if d.held and d.domain == "docs" and goes_to_sealed_half_on_tie(d.source)]
    whole = sum(len(d.content["text"].encode()) for d in held)
    assert summary["bytes"]["docs"] == whole  # the first token too, from BOS


def test_a_first_candidate_worse_than_trigrams_is_rejected_with_the_reason(plant: FilledPlant, weak: int) -> None:
    number = judge_candidate(plant, weak)
    verdict = verdict_of(plant, number)
    assert verdict["outcome"] == "reject" and verdict["against"] is None
    assert tells(verdict["reasons"], expect("release.above_trigram", least=0.0)), verdict["reasons"]
    assert judge_candidate(plant, weak) == number


def test_better_model_is_promoted_over_the_champion_on_the_same_items(
    plant: FilledPlant, weak: int, better: int
) -> None:
    first = judge_candidate(plant, weak)
    with_champion(plant, weak)
    best = find_champion(plant.ledger)
    assert best and best.candidate == weak
    number = judge_candidate(plant, better)
    verdict = verdict_of(plant, number)
    assert verdict["outcome"] == "promote", verdict["reasons"]
    assert tells(verdict["reasons"][:1], expect("release.better", champion=f"candidate {weak}"))
    assert verdict["evidence"]["guards"]["code"]["gain"] > 0
    assert verdict["subject_sha256"] == verdict_of(plant, number)["subject_sha256"] != ""
    assert judge_candidate(plant, better) == number
    assert judge_candidate(plant, weak) == first  # released: keeps its verdict
    ours, theirs = summary_of(plant, better), summary_of(plant, weak)
    assert ours["baselines"] == theirs["baselines"] and ours["baselines_key"] == theirs["baselines_key"]


def test_a_candidate_that_was_trained_on_the_sealed_half_is_held(
    plant: FilledPlant, weak: int, better: int, tmp_path: Path
) -> None:
    """The candidate is better than all others on the sealed half, but not on documents that it did not see."""
    exam = [d for d in plant.documents if d.held and goes_to_sealed_half_on_tie(d.source)]
    encode = lambda d: (
        plant.tokenizer.encode_text(d.content["text"])
        if "text" in d.content
        else plant.tokenizer.encode_messages(d.content["messages"])
    )
    seen = write_token_shard(
        tmp_path,
        (TokenizedDocument(d.key, d.key, d.domain, d.source, "", *encode(d)) for d in exam),
        vocab_size=plant.tokenizer.vocab_size,
        tokenizer_sha256=plant.tokenizer.sha256,
    )
    from transformers import Qwen3ForCausalLM

    model = trained(Qwen3ForCausalLM.from_pretrained(plant.workspace.exports / "better").eval(), seen, 120)
    cheat = plant.add_candidate(save_export(model, plant.workspace.exports / "cheat", plant.tokenizer))
    with_champion(plant, weak)
    verdict = verdict_of(plant, judge_candidate(plant, measured_alone(plant, cheat)))
    assert verdict["outcome"] == "hold"
    assert tells(verdict["reasons"][:1], expect("release.to_do", remedy="release.remedy_memorised"))
    assert tells(verdict["reasons"][1:2], expect("release.sealed_seen")), verdict["reasons"]
    honest = verdict_of(plant, judge_candidate(plant, better))["evidence"]
    assert abs(honest["halves_gap"]["gain"]) < verdict["evidence"]["halves_gap"]["gain"] / 3


def test_a_sealed_half_that_was_read_too_often_is_not_read_again(plant: FilledPlant, weak: int, better: int) -> None:
    with_champion(plant, weak)
    judge_candidate(plant, better)
    fresh = plant.add_candidate(plant.workspace.exports / "better")
    policy = plant.workspace.root / "policies" / "gates" / "release.yaml"
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text("sealed_looks_max: 2\n")
    try:
        verdict = verdict_of(plant, judge_candidate(plant, fresh))
        known = verdict_of(plant, judge_candidate(plant, better))
    finally:
        policy.unlink()
    assert verdict["outcome"] == "hold" and len(verdict["reasons"]) == 2
    assert tells(verdict["reasons"][:1], expect("release.to_do", remedy="release.remedy_bring_shards"))
    assert tells(verdict["reasons"][1:], expect("release.sealed_spent", most=2.0))
    assert not plant.ledger.select_rows(sa.select(evaluations.c.id).where(evaluations.c.candidate == fresh))
    assert known["evidence"]["target"] is None or known["outcome"] == "hold", (
        "a recorded one is judged by the same rule"
    )


def test_hostile_or_changed_export_is_rejected_and_nothing_crashes(plant: FilledPlant, better: int) -> None:
    broken = tiny_model(2)
    with torch.no_grad():
        broken.model.embed_tokens.weight[7, 7] = float("nan")
    nan = plant.add_candidate(save_export(broken, plant.workspace.exports / "nan", plant.tokenizer))
    huge = tiny_model(3)
    with torch.no_grad():  # finite weights, no finite loss
        huge.model.norm.weight.fill_(3e38)
    overflow = plant.add_candidate(save_export(huge, plant.workspace.exports / "overflow", plant.tokenizer))
    hollow = Path(shutil.copytree(plant.workspace.exports / "better", plant.workspace.exports / "hollow"))
    config = json.loads((hollow / "config.json").read_text())
    (hollow / "config.json").write_text(json.dumps(config | {"vocab_size": 1 << 20}))
    asks = plant.add_candidate(hollow)
    for candidate, words in (
        (nan, "NaN"),
        (overflow, "cloze items is not finite. First: "),
        (asks, "are too few for the "),
    ):
        verdict = verdict_of(plant, judge_candidate(plant, candidate))
        assert verdict["outcome"] == "reject"
        assert words in str(Message.from_json(verdict["reasons"][0])), verdict["reasons"]


def spoil_one(plant: FilledPlant, folder: Path) -> tuple[Path, str]:
    """An export of finite weights that has no finite loss on one held-out document, and that document's key."""
    suite = load_current_suite(plant)
    policy = EvalPolicy.load(plant.workspace.policy_path("evals.yaml"))
    every = [*suite.documents, *suite.dev]
    texts = encode_documents(every, plant.tokenizer, TokenBytes.load(plant.workspace.tokenizer), policy.document_bytes)
    held_by = Counter(token for text in texts for token in set(text.tokens[:-1].tolist()))
    text, token = next((t, n) for t in texts for n in t.tokens[:-1].tolist() if held_by[n] == 1)
    model = tiny_model(4)
    with torch.no_grad():  # a dimension that this token alone has, of which the first MLP makes an infinity
        first = model.model.layers[0]
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[token, 0] = 1
        first.self_attn.o_proj.weight[0] = 0
        first.mlp.up_proj.weight[:, 0] = 3e38
    return save_export(model, folder, plant.tokenizer), text.document.key


def test_one_document_without_a_finite_loss_is_named(plant: FilledPlant, better: int, tmp_path: Path) -> None:
    """The candidate is rejected. If the champion has no finite loss, nothing can be compared: the candidate is held."""
    export, key = spoil_one(plant, tmp_path / "one")
    spoiled = plant.add_candidate(export)
    verdict = verdict_of(plant, judge_candidate(plant, spoiled))
    assert verdict["outcome"] == "reject"
    assert tells(verdict["reasons"][:1], expect("release.check_failed", check="finite_loss"))
    assert key in Message.from_json(verdict["reasons"][0])
    before = plant.ledger.read("SELECT * FROM releases")
    with as_champion(plant, spoiled):
        held = verdict_of(plant, judge_candidate(plant, better))
        assert plant.ledger.read("SELECT COUNT(*) AS n FROM releases")[0]["n"] == 1
    assert held["outcome"] == "hold" and not tells(held["reasons"], expect("release.no_common_items"))
    expected = expect("release.champion_failed", champion=f"candidate {spoiled}", check="finite_loss")
    assert tells(held["reasons"][1:2], expected) and key in Message.from_json(held["reasons"][1])
    assert tells(held["reasons"][:1], expect("release.to_do", remedy="release.remedy_champion_failed"))
    assert plant.ledger.read("SELECT * FROM releases") == before


@contextmanager
def as_champion(plant: FilledPlant, candidate: int) -> Iterator[None]:
    """While it lasts a candidate is the only release, whatever its verdict."""
    before = plant.ledger.select_rows(sa.select(releases))
    verdict = plant.ledger.read("SELECT MAX(id) AS id FROM verdicts WHERE subject = :s", s=f"candidate:{candidate}")[0][
        "id"
    ]
    with plant.ledger.begin() as tx:
        tx.execute(releases.delete())
        tx.execute(
            releases.insert().values(number=1, candidate=candidate, verdict=verdict, state="published", created_at=0.0)
        )
        record_event(tx, "promoted", "release:1")
    yield
    with plant.ledger.begin() as tx:
        tx.execute(releases.delete())
        if before:
            tx.execute(releases.insert(), before)
            record_event(tx, "promoted", f"release:{before[-1]['number']}")


def test_an_export_that_changed_is_named_and_nothing_is_recorded(plant: FilledPlant, weak: int, better: int) -> None:
    """The same holds for a champion's export: a stray file in it says nothing about the models."""
    for candidate, judged in ((better, better), (weak, better)):
        stray = Path(CandidateRow.get(plant.ledger, candidate).export_path) / "README.md"
        stray.write_text("# Ours")
        with plant.ledger.begin() as tx:
            tx.execute(eval_items.delete())
            tx.execute(evaluations.delete())
            tx.execute(releases.delete())
            verdict = tx.execute(
                verdicts.insert().values(
                    gate="release", subject=f"candidate:{weak}", policy_sha256="p", subject_sha256="e", outcome="promote", reasons=[], evidence={},
                    created_at=0.0,
                ).returning(verdicts.c.id)
            ).scalar_one()  # fmt: skip
            tx.execute(
                releases.insert().values(number=1, candidate=weak, verdict=verdict, state="published", created_at=0.0)
            )
            record_event(tx, "promoted", "release:1")
        if candidate != judged:
            measured_alone(plant, judged)
        with pytest.raises(DamagedExportError, match="changed since their hash") as caught:
            judge_candidate(plant, judged)
        assert caught.value.candidate == candidate and "factory check --repair" in str(caught.value)
        assert not plant.ledger.read("SELECT id FROM evaluations WHERE candidate = :c", c=candidate)
        stray.unlink()
        judge_candidate(plant, measured_alone(plant, judged))
        assert plant.ledger.read("SELECT id FROM evaluations WHERE candidate = :c", c=candidate)


def test_a_candidate_is_not_promoted_unless_licences_allow_the_release(
    plant: FilledPlant, weak: int, better: int
) -> None:
    """The current policy decides: after a person with the right allows the licence, the next verdict follows."""
    with_champion(plant, weak)
    allowed = verdict_of(plant, judge_candidate(plant, better))
    assert allowed["evidence"]["releasable"] == 1 and not tells(allowed["reasons"], expect("release.licences"))
    trained = next(d.key for d in plant.documents if not d.held)
    copy = {"key": "copy", "id": "copy", "shard": SHARD, "row": 9000, "domain": "docs", "fate": "dropped"}
    with plant.ledger.begin() as tx:  # a text that came under a stricter licence too
        row = copy | {"rule": "exact_duplicate", "matched": trained, "license": "CC-BY-NC-4.0"}
        tx.execute(documents.insert().values(row))
    flagged = verdict_of(plant, judge_candidate(plant, better))
    assert flagged["outcome"] != "promote" and tells(
        flagged["reasons"], expect("release.licences", named=["CC-BY-NC-4.0 0.2%"])
    )
    assert codes(flagged["reasons"]).count("release.licences_disputed") == 1 and flagged["evidence"][
        "disputed"
    ] == pytest.approx(flagged["evidence"]["not_releasable"]["CC-BY-NC-4.0"])
    with plant.ledger.begin() as tx:
        tx.execute(documents.delete().where(documents.c.key == "copy"))
        tx.execute(documents.update().where(documents.c.domain == "docs").values(license="CC-BY-NC-4.0"))
    verdict = verdict_of(plant, judge_candidate(plant, better))
    assert verdict["outcome"] == "hold" and tells(verdict["reasons"], expect("release.licences"))
    assert verdict["evidence"]["disputed"] == 0 and "release.licences_disputed" not in codes(verdict["reasons"])
    share = verdict["evidence"]["not_releasable"]["CC-BY-NC-4.0"]
    assert 0 < share < 1 and verdict["evidence"]["releasable"] == pytest.approx(1 - share)
    own = plant.workspace.root / "policies" / "data.yaml"
    text = (ROOT / "policies" / "data.yaml").read_text()
    own.write_text(
        text.replace("CC-BY-NC-4.0: {train: true, release: false}", "CC-BY-NC-4.0: {train: true, release: true}")
    )
    allowed = verdict_of(plant, judge_candidate(plant, better))
    own.unlink()
    assert allowed["evidence"]["releasable"] == 1 and not tells(allowed["reasons"], expect("release.licences"))


def test_a_domain_that_is_trained_on_but_not_held_out_is_named(plant: FilledPlant, weak: int, better: int) -> None:
    with_champion(plant, weak)
    law = {
        "key": "law",
        "id": "law",
        "shard": SHARD,
        "row": 9001,
        "domain": "law",
        "fate": "train",
        "supervised_tokens": 9,
    }
    with plant.ledger.begin() as tx:
        tx.execute(documents.insert().values(law | {"token_shard": plant.shard.id}))
        tx.execute(
            documents.insert().values(law | {"key": "x", "domain": "elsewhere", "token_shard": "not in the plan"})
        )
    unguarded = lambda verdict: [
        one for one in map(Message.from_json, verdict["reasons"]) if one.code == "release.unguarded"
    ]
    verdict = verdict_of(plant, judge_candidate(plant, better))
    share = 9 / (9 + sum(not d.held for d in plant.documents))
    assert verdict["evidence"]["trained_on"]["law"] == pytest.approx(share) and share > 0.001
    assert sum(verdict["evidence"]["trained_on"].values()) == pytest.approx(1)
    (said,) = unguarded(verdict)
    assert said.data["named"] == [f"law {share:.1%}"] and said.data["shares"] == {"law": pytest.approx(share)}
    with plant.ledger.begin() as tx:
        tx.execute(documents.update().where(documents.c.key == "law").values(fate="removed"))
    after = verdict_of(plant, judge_candidate(plant, better))
    assert unguarded(after) == [] and after["outcome"] == verdict["outcome"]
    with plant.ledger.begin() as tx:
        tx.execute(documents.delete().where(documents.c.key.in_(["law", "x"])))


@pytest.mark.slow("whole evaluations")
def test_server_disagreement_and_contamination_are_found(plant: FilledPlant, better: int) -> None:
    folder = Path(shutil.copytree(plant.workspace.exports / "better", plant.workspace.exports / "disagrees"))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [0]}))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(
            (folder / name).read_text().replace("<|im_end|>\\n", "<|im_end|>").replace("<|im_end|>\\\\n", "<|im_end|>")
        )
    candidate = plant.add_candidate(folder)
    held = next(d for d in plant.documents if d.held and d.domain == "docs")
    leaked = next(d for d in plant.documents if not d.held and d.domain == "code")
    with plant.ledger.begin() as tx:
        same = tx.execute(sa.select(documents.c.content_sha256).where(documents.c.key == held.key)).scalar()
        tx.execute(documents.update().where(documents.c.key == leaked.key).values(content_sha256=same))
        # a document that was trained on, held out under a new name
        row = {
            "key": f"{SHARD[:16]}:9999",
            "id": "copy",
            "shard": SHARD,
            "row": 9999,
            "domain": "code",
            "fate": "held_out",
            "releasable": True,
            "tokens": 1,
        }
        tx.execute(documents.insert().values(**row, supervised_tokens=1, content_sha256="0" * 64))
        tx.execute(
            held_out.insert().values(
                key=row["key"],
                domain="code",
                group_key="copy",
                sealed=goes_to_sealed_half_on_tie("copy"),
                content=leaked.content,
            )
        )
    number = evaluate_candidate(plant, candidate)
    row = plant.ledger.select_first(sa.select(evaluations.c.summary).where(evaluations.c.id == number))
    checks = row["summary"]["parity"]
    failed = {name for name, check in checks.items() if check["ok"] is False}
    of_chats = {"server_chat", "whitespace", "system_message", "tools_printed", "engine_start"}
    assert failed == {*of_chats, "stop", "no_held_out_in_training", "no_shared_ngrams"}, checks
    assert "not the chat template" in checks["engine_start"]["detail"] and checks["engine_chat"]["ok"] is None


def test_an_unknown_candidate_is_an_error(plant: FilledPlant) -> None:
    with pytest.raises(InputError, match="no candidate 99. The ledger has: 1"):
        evaluate_candidate(plant, 99)


def test_a_candidate_gets_a_new_verdict_after_each_change_of_a_licence(tmp_path: Path) -> None:
    """A wrong licence that a person corrects does not hold a candidate for ever."""
    plant = released_plant(tmp_path)
    candidate = plant.add_candidate(
        save_export(tiny_model(3), plant.workspace.exports / "candidate-3", plant.tokenizer)
    )
    evaluated(plant, candidate, 2.0)
    found = []
    for licence in ("MIT", "CC-BY-NC-4.0", "MIT", "MIT"):
        with plant.ledger.begin() as tx:
            tx.execute(documents.update().values(license=licence))
        found.append(judge_candidate(plant, candidate))
        newest = VerdictRow.find_newest(plant.ledger, "release", Subject("candidate", candidate))
        assert newest is not None and newest.id == found[-1]
    licences = expect("release.licences")
    said = [tells(VerdictRow.get(plant.ledger, one).reasons, licences) for one in found]
    assert said == [False, True, False, False]
    assert found[2] not in found[:2] and found[3] == found[2], "what did not change is not recorded again"
