"""Copies of held-out documents in token shards are found, wherever they are and however short they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from factory.core.workspace import Workspace
from factory.evals import contamination
from factory.evals.contamination import check_contamination, check_shared_ngrams, hash_ngrams
from factory.evals.policy import EvalPolicy
from factory.evals.probes.checks import ProbeCheck
from factory.ingest.tokenizer import train_tokenizer
from factory.ledger.ledger import Ledger, documents, held_out, shards
from tests.support.messages import says, the, tree
from tests.support.text.library import library
from trainer.contract.data.token_shard import TokenizedDocument, TokenShard, write_token_shard

SIZE, LIMIT = 24, 0.6
DRAWN = np.random.default_rng(0)


def text(length: int) -> np.ndarray:
    """So many ids between BOS and the end token, which are both 0 here."""
    return np.concatenate([[0], DRAWN.integers(3, 500, length - 2), [0]])


def shard_of(folder: Path, *texts: np.ndarray) -> TokenShard:
    rows = [
        TokenizedDocument(f"s:{n}", str(n), "docs", "", "MIT", ids.astype(np.uint32), np.ones(len(ids), bool))
        for n, ids in enumerate(texts)
    ]
    return write_token_shard(folder, iter(rows), vocab_size=512, tokenizer_sha256="0" * 64)


def naive(tokens: np.ndarray, size: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + size].tolist()) for i in range(len(tokens) - size + 1)}


@pytest.mark.parametrize("size", [1, 2, 24, 192])
def test_ngrams_have_equal_hashes_exactly_if_they_are_equal(size: int) -> None:
    tokens = DRAWN.integers(0, 3, 4000)
    runs = [tuple(tokens[i : i + size].tolist()) for i in range(len(tokens) - size + 1)]
    hashes = hash_ngrams(tokens, size).tolist()
    assert len(hashes) == len(runs) and len(set(hashes)) == len(naive(tokens, size))
    assert len(set(zip(runs, hashes, strict=True))) == len(set(runs))
    assert hash_ngrams(tokens[:-7].astype(np.uint16), size).tolist() == hashes[: len(hashes) - 7]


@pytest.mark.parametrize("length", [3, 5, SIZE - 1, SIZE, SIZE + 1, 10 * SIZE])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_copy_of_any_length_is_found(length: int, place: str, tmp_path: Path) -> None:
    held = {"h:1": text(200), "h:2": text(length), "h:3": text(SIZE - 2)}
    others = [text(150) for _ in range(4)]
    at = {"first": 0, "middle": 2, "last": 4}[place]
    shard = shard_of(tmp_path, *others[:at], held["h:2"], *others[at:])
    check = check_shared_ngrams(held, [shard_of(tmp_path, *others), shard], SIZE, LIMIT)
    assert check.ok is False
    assert says(check.detail, ("contamination.copies", {"count": 1, "first": "h:2", "copy": f"s:{at}"}))
    assert check_shared_ngrams(held, [shard_of(tmp_path, *others)], SIZE, LIMIT).ok


def test_a_long_part_of_a_document_is_found_across_blocks_and_a_short_part_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contamination, "BLOCK", 100)
    whole = text(300)
    runs = len(whole) - SIZE + 1
    for part, ok in ((whole[20:290], False), (whole[100:220], True)):
        framed = np.concatenate([text(70)[:-1], part, text(40)[1:]])
        shared = len(naive(whole, SIZE) & naive(framed, SIZE)) / runs
        check = check_shared_ngrams({"h:1": whole}, [shard_of(tmp_path, text(333), framed)], SIZE, LIMIT)
        found = the(tree(check.detail), "contamination.largest_share").data
        assert check.ok is ok and found["share"] == pytest.approx(shared, abs=0.005)
        assert says(check.detail, ("contamination.over", {"count": 1, "first": "h:1"})) is not ok


def checks(workspace: Workspace, ledger: Ledger, held: list[str], trained: list[str]) -> list[ProbeCheck]:
    """Of a ledger that knows nothing amiss: the hashes it has of the documents all differ."""
    tokenizer = train_tokenizer((module.text for module in library().values()), 512, workspace.tokenizer)
    of = [(f"{'ab' * 8}:{n}", what, n >= len(held)) for n, what in enumerate([*held, *trained])]
    rows = [
        {
            "key": key, "id": key, "shard": "ab" * 32, "row": n, "domain": "docs", "fate": "train" if is_trained else "held_out",
            "content_sha256": f"{n:064d}", "releasable": True, "tokens": 1, "supervised_tokens": 1,
        }
        for n, (key, _, is_trained) in enumerate(of)
    ]  # fmt: skip
    with ledger.begin() as tx:
        tx.execute(
            shards.insert().values(sha256="ab" * 32, name="s", path="", bytes=1, state="ingested", ingested_at=0.0)
        )
        tx.execute(documents.insert(), rows)
        tx.execute(
            held_out.insert(),
            [
                {"key": k, "domain": "docs", "group_key": k, "sealed": n % 2 == 0, "content": {"text": t}}
                for n, (k, t, is_trained) in enumerate(of)
                if not is_trained
            ],
        )  # fmt: skip
    encoded = [tokenizer.encode_text(what)[0] for what in trained]
    return check_contamination(ledger, tokenizer, [shard_of(workspace.shards, *encoded)], EvalPolicy())


def test_copies_of_held_out_documents_that_are_not_scored_are_found_too(workspace: Workspace, ledger: Ledger) -> None:
    text = library()["argparse"].text
    held = [text[start : start + 300] for start in range(0, 300 * 200, 300)]  # 60 and 20 of a domain are scored
    honest = [library()["ast"].text[start : start + 300] for start in range(0, 9000, 300)]
    assert len(held) > EvalPolicy().documents_per_domain + EvalPolicy().dev_documents_per_domain
    by_hash, by_tokens = checks(workspace, ledger, held, [*honest, *held])
    assert by_hash.ok and by_tokens.ok is False
    assert says(by_tokens.detail, ("contamination.copies", {"count": len(set(held))}))


def test_training_data_without_copies_passes(workspace: Workspace, ledger: Ledger) -> None:
    held = [module.text[:3000] for module in library().values()][:20]
    found = checks(workspace, ledger, held, [module.text for module in library().values()][20:])
    assert [check.ok for check in found] == [True, True]
    assert says(found[1].detail, ("contamination.largest_share", {"documents": 20}))
