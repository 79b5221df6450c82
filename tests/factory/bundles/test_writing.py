"""The content of a bundle, and the cases in which none is written and nothing of it is left."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from factory.bundles.checking import check_licences
from factory.bundles.files import layout
from factory.bundles.files.folder import BundleFolder
from factory.bundles.shards import list_shard_rows, read_releasable_documents
from factory.bundles.signing import compute_key_fingerprint
from factory.bundles.verifying import CHECKS
from factory.bundles.writing import BundleOptions, WrittenBundle, copy_training_traces, write_release_bundle
from factory.core.errors import InputError
from factory.gates.release.trained_licences import count_tokens_by_licence
from factory.ingest.document import format_release_as_author
from factory.ingest.rules.policy import LicencePermissions, LicenceRules
from factory.ledger.ledger import checkpoints, documents, releases, segments, verdicts
from factory.ledger.plant import Plant
from factory.ledger.rows import ReleaseRow
from factory.show.pages.provenance import list_release_documents, read_release_provenance
from tests.support.factory.command import command_here, factory
from tests.support.factory.exports import SHARD, FilledPlant
from tests.support.messages import codes, says


@contextmanager
def put_aside(path: Path, text: str) -> Iterator[None]:
    """A file of the shared plant with another content."""
    before = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    yield
    path.unlink() if before is None else path.write_bytes(before)


@contextmanager
def changed(plant: FilledPlant, table: sa.Table, where: Any, **values: Any) -> Iterator[None]:
    """A row of the shared plant with other values."""
    with plant.ledger.begin() as tx:
        before = dict(tx.execute(sa.select(*(table.c[name] for name in values)).where(where)).mappings().one())
        tx.execute(table.update().where(where).values(values))
    yield
    with plant.ledger.begin() as tx:
        tx.execute(table.update().where(where).values(before))


def refuses(
    plant: FilledPlant, out: Path, expected: str | tuple[str, dict[str, Any]], number: int = 2, **options: Any
) -> None:
    """The bundle is not written, with this error, and nothing is left."""
    there = sorted(out.parent.iterdir())
    with pytest.raises(InputError) as found:
        write_release_bundle(plant, number, BundleOptions(out=out, **options))
    assert says(found.value.message, expected), found.value
    assert sorted(out.parent.iterdir()) == there


def test_no_bundle_is_written_of_a_release_that_may_not_be_shared(released: FilledPlant, tmp_path: Path) -> None:
    out, root = tmp_path / "out", released.workspace.root
    refuses(released, out, "1, 2", number=7)
    refuses(released, out, ("writing.no_licence", {"licence": "MIT\nmodel: x"}), licence="MIT\nmodel: x")
    data = root / "policies" / "data.yaml"
    with put_aside(data, "licences: {known: {PSF-2.0: {train: true, release: false}}}\n"):
        refuses(
            released, out, ("release_files.not_releasable", {"release": 2, "share": 1.0, "named": ["PSF-2.0 (100%)"]})
        )
    with put_aside(released.workspace.exports / "candidate-2" / "generation_config.json", "{}"):
        refuses(released, out, "candidate-2")
    with changed(released, releases, releases.c.number == 2, state="aliased"):
        refuses(released, out, ("writing.not_published", {"release": 2, "state": "aliased"}))
    with changed(released, segments, segments.c.id == 2, state="rewound"):
        refuses(released, out, ("writing.rewound", {"release": 2, "segment": 2}))
    with changed(released, verdicts, verdicts.c.subject == "candidate:2", policy_sha256="0" * 64):
        refuses(released, out, ("release_files.no_policy", {"policy_sha256": "0" * 64}))
    out.mkdir()
    refuses(released, out, ("writing.exists", {"folder": out}))
    out.rmdir()
    out.symlink_to(tmp_path / "nowhere")
    refuses(released, out, ("writing.exists", {"folder": out}))


def test_documents_of_a_damaged_shard_are_not_put_into_a_bundle(released: FilledPlant, tmp_path: Path) -> None:
    tokens = released.shard.path / "tokens.bin"
    before = tokens.read_bytes()
    tokens.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    (tmp_path / ".out.0123456789ab.part").mkdir()  # of a bundle whose writing was killed
    with pytest.raises(InputError, match=r"tokens.bin is damaged.*check --repair"):
        write_release_bundle(
            Plant(released.workspace, released.ledger), 2, BundleOptions(out=tmp_path / "out", data=True)
        )
    tokens.write_bytes(before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("verifies a bundle for each change")
def test_evidence_that_was_changed_in_the_ledger_is_not_bundled(released: FilledPlant, tmp_path: Path) -> None:
    row = released.ledger.select_first(sa.select(verdicts.c.evidence).where(verdicts.c.subject == "candidate:2"))
    assert row
    with changed(released, verdicts, verdicts.c.subject == "candidate:2", evidence=row["evidence"] | {"look": 3}):
        refuses(released, tmp_path / "out", ("writing.not_verified", {"release": 2, "checks": ["evidence", "verdict"]}))


def test_a_missing_or_invalid_or_readable_signing_key_is_refused(
    released: FilledPlant, made: WrittenBundle, tmp_path: Path
) -> None:
    keys = released.workspace.root / "keys"
    assert stat.S_IMODE((keys / "bundle-signing.pem").stat().st_mode) == 0o600
    assert sorted(path.name for path in keys.iterdir()) == ["bundle-signing.pem", "bundle-signing.pub.pem"]
    assert (keys / "bundle-signing.pub.pem").read_bytes() == (made.folder / layout.PUBLIC_KEY).read_bytes()
    words = tmp_path / "words.pem"
    words.write_text("no key")
    refuses(released, tmp_path / "out", ("signing.no_private_key", {"path": words}), key=words)
    refuses(released, tmp_path / "out", ("signing.no_private_key", {}), key=tmp_path / "absent.pem")
    (keys / "bundle-signing.pem").chmod(0o644)
    refuses(released, tmp_path / "out", ("signing.readable_key", {"path": keys / "bundle-signing.pem"}))
    (keys / "bundle-signing.pem").chmod(0o600)


def test_no_held_out_text_is_in_a_bundle(released: FilledPlant, made: WrittenBundle) -> None:
    held = [d for d in released.documents if d.held]
    texts = [d.content.get("text") or d.content["messages"][1]["content"] for d in held]
    whole = b"".join(path.read_bytes() for path in made.folder.rglob("*") if path.is_file())
    assert len(texts) > 50 and "what a model wrote" not in whole.decode(errors="replace")
    spelled = [json.dumps(text, ensure_ascii=False)[1:-1].encode() for text in texts]
    assert [text for text in spelled if text in whole] == []


def test_a_bundle_has_the_documents_that_the_release_was_trained_on(released: FilledPlant, made: WrittenBundle) -> None:
    trained = {d.key: d for d in released.documents if not d.held}
    rows = [json.loads(line) for line in (made.folder / layout.DOCUMENTS).read_text().splitlines()]
    assert len(rows) == len(trained)
    for row in rows:
        document = trained[row["id"]]
        assert {key: row[key] for key in ("text", "messages") if key in row} == document.content
        assert (row["domain"], row["source"], row["license"]) == (document.domain, document.source, "PSF-2.0")


def test_documents_whose_licence_forbids_release_are_counted_but_not_included(released: FilledPlant) -> None:
    first = next(d.key for d in released.documents if not d.held)
    rules = LicenceRules(known={"PSF-2.0": LicencePermissions(train=True, release=True)})
    with changed(released, documents, documents.c.key == first, license="proprietary"):
        rows = list_shard_rows(released.ledger, 2, rules, with_documents=True)
        assert {(r["license"], r["releasable"], r["included"], r["documents"]) for r in rows} == {
            ("proprietary", False, False, 1),
            ("PSF-2.0", True, True, len([d for d in released.documents if not d.held]) - 1),
        }
        found = read_releasable_documents(released.workspace.root, released.ledger, released.tokenizer, 2, rules)
        assert first not in {row["id"] for row in found}
    with changed(released, documents, documents.c.key == first, fate="quarantined"):
        found = read_releasable_documents(released.workspace.root, released.ledger, released.tokenizer, 2, rules)
        assert first not in {row["id"] for row in found}


def test_a_text_of_several_licences_is_bundled_under_the_strictest(released: FilledPlant) -> None:
    ledger = released.ledger
    first, second = [d.key for d in released.documents if not d.held][:2]
    copies = {first: "proprietary", second: "MIT"}
    with ledger.begin() as tx:
        for number, (key, licence) in enumerate(copies.items()):
            values = {"key": f"copy:{number}", "id": "copy", "shard": SHARD, "row": 9000 + number, "domain": "code"}
            dropped = {"fate": "dropped", "rule": "near_duplicate", "matched": key, "releasable": False}
            tx.execute(documents.insert().values(**values, **dropped, license=licence))
    rules = LicenceRules(known=dict.fromkeys(("PSF-2.0", "MIT"), LicencePermissions(train=True, release=True)))
    try:
        whole = sum(count_tokens_by_licence(ledger, 2).values())
        tokens = count_tokens_by_licence(ledger, 2, rules)
        rows = {row["license"]: row for row in list_shard_rows(ledger, 2, rules, with_documents=True)}
        found = [*read_releasable_documents(released.workspace.root, ledger, released.tokenizer, 2, rules)]
        said = command_here("provenance", "--release", "2", home=released.workspace).stdout
    finally:
        with ledger.begin() as tx:
            tx.execute(documents.delete().where(documents.c.id == "copy"))
    assert tokens == {"PSF-2.0": whole - 1, "proprietary": 1}
    assert "LICENCE CONFLICTS: 2 documents" in said
    assert {name: row["supervised_tokens"] for name, row in rows.items()} == tokens
    assert rows["proprietary"]["documents"] == 1 and not rows["proprietary"]["included"]
    assert rows["PSF-2.0"]["documents"] == len(found) and first not in {row["id"] for row in found}
    assert next(row for row in found if row["id"] == second)["license"] == "PSF-2.0"
    assert count_tokens_by_licence(ledger, 2, rules) == {"PSF-2.0": whole}


def test_documents_removed_after_training_are_counted_but_not_included(released: FilledPlant) -> None:
    first = next(d.key for d in released.documents if not d.held)
    rules = LicenceRules(known={"PSF-2.0": LicencePermissions(train=True, release=True)})
    with changed(released, documents, documents.c.key == first, fate="removed"):
        (row,) = list_shard_rows(released.ledger, 2, rules, with_documents=True)
        assert row["supervised_tokens"] == sum(count_tokens_by_licence(released.ledger, 2).values())
        found = [*read_releasable_documents(released.workspace.root, released.ledger, released.tokenizer, 2, rules)]
        assert len(found) == row["documents"] - row["quarantined"] == row["documents"] - 1


@pytest.mark.slow("a bundle is written and verified")
def test_a_bundle_names_the_share_of_text_that_models_wrote(released: FilledPlant, tmp_path: Path) -> None:
    first, second = [d.key for d in released.documents if not d.held][:2]
    release = ReleaseRow.get(released.ledger, 1)
    ours = format_release_as_author(1, release.export_sha256)
    with (
        changed(released, documents, documents.c.key == first, detail=f"synthetic, by {ours}; replaced: 1 email"),
        changed(released, documents, documents.c.key == second, detail="synthetic, by judge-1 at https://x/v1"),
    ):
        folder = write_release_bundle(
            Plant(released.workspace, released.ledger), 2, BundleOptions(tmp_path / "out", data=True)
        ).folder
        card = (folder / layout.CARD).read_text()
        found = read_release_provenance(released.ledger, 2)
        said = command_here("provenance", "--release", "2", home=released.workspace).stdout
        listed = [*list_release_documents(released.ledger, 2)]
        wrote = read_release_provenance(released.ledger, 1)["wrote"]
    total = len([d for d in released.documents if not d.held])  # a token each
    share = f"{1 / total:.1%}"
    assert f"Models wrote {2 / total:.1%} of" in card
    assert f"| {ours} | 1 | {share} |" in card and f"| judge-1 at https://x/v1 | 1 | {share} |" in card
    made = {
        row["id"]: row.get("synthetic_by")
        for row in map(json.loads, (folder / layout.DOCUMENTS).read_text().splitlines())
    }
    assert (
        made[first] == ours
        and made[second] == "judge-1 at https://x/v1"
        and set(made.values()) == {None, *map(made.get, (first, second))}
    )
    described = json.loads((folder / layout.CROISSANT).read_text())
    assert "synthetic_tokens" in json.dumps(described) and "synthetic_by" in json.dumps(described)
    assert {row["maker"]: row["release"] for row in found["synthetic"]} == {ours: 1, "judge-1 at https://x/v1": None}
    assert f"synthetic, by {ours} (our release 1): 1 supervised" in said and f", {share}, in 1 document" in said
    assert f"OUR OWN RELEASES WROTE {share} of" in said
    assert {row["key"]: row["synthetic_by"] for row in listed if row["synthetic_by"]} == {
        first: ours,
        second: made[second],
    }
    assert wrote == {"documents": 1, "releases": [1, 2]}  # both plans of this plant are the same
    # who tampers with the share is found out
    licences = json.loads((folder / layout.LICENCES).read_text())
    licences["synthetic"].pop(ours)
    (folder / layout.LICENCES).write_text(json.dumps(licences))
    assert check_licences(BundleFolder.open(folder)) == ["synthetic is 1, expected 2"]
    licences["synthetic"] = {"x": -1}
    (folder / layout.LICENCES).write_text(json.dumps(licences))
    assert codes(check_licences(BundleFolder.open(folder))) == ["checking.no_synthetic_counts"]


def test_traces_contain_the_remaining_files_and_follow_no_link(released: FilledPlant, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "segment", tmp_path / "checkpoint"
    folder.mkdir()
    (checkpoint / "inner").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (checkpoint / "inner" / "weights").write_bytes(b"w")
    (checkpoint / "link").symlink_to("/etc/passwd")
    with (
        changed(released, segments, segments.c.id == 2, folder=str(folder)),
        changed(released, checkpoints, checkpoints.c.segment == 2, path=str(checkpoint)),
    ):
        copy_training_traces(released.workspace.root, released.ledger, 2, tmp_path / "traces")
    found = {str(p.relative_to(tmp_path / "traces")) for p in (tmp_path / "traces").rglob("*") if not p.is_dir()}
    assert found == {"segment-00002/metrics.jsonl", "segment-00002/checkpoint-000000001/inner/weights"}


@pytest.mark.slow("a release by command, and its bundle")
def test_the_command_bundles_a_first_release_once(released: FilledPlant, made: WrittenBundle, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--bundle", "1", "--out", str(out), "--licence", "Apache-2.0", "--traces"]
    done = factory("release", *words, "--workspace", str(released.workspace.root))
    assert done.returncode == 0 and f"The bundle of release 1 is in {out}" in done.stdout, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert "This is a first release" in (out / layout.CARD).read_text() and not (out / layout.DOCUMENTS).exists()
    assert "license: apache-2.0" in (out / layout.CARD).read_text()
    done = factory("release", *words, "--workspace", str(released.workspace.root))
    assert done.returncode == 2 and "error[writing.exists]" in done.stderr and done.stderr.count("\n") == 1


def test_factory_verify_needs_only_the_bundle_and_writes_nothing(
    bundle: Path, published_key: Path, tmp_path: Path
) -> None:
    bundle.chmod(0o555)
    done = factory("verify", str(bundle), "--public-key", str(published_key), "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["ok"] and found["pinned"] and found["judge"]["same"], done.stdout
    assert {check["name"]: check["ok"] for check in found["checks"]} == dict.fromkeys(["signature", *CHECKS], True)
    assert found["signer"] == compute_key_fingerprint(published_key.read_bytes(), "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle"]


def test_factory_verify_names_failed_checks_and_a_missing_folder(
    made: WrittenBundle, bundle: Path, tmp_path: Path
) -> None:
    (bundle / layout.CARD).write_text("Best model ever.\n")
    done = factory("verify", str(bundle))
    assert done.returncode == 1 and done.stdout.endswith("files, signature, card\n"), done.stderr
    done = factory("verify", str(tmp_path / "nowhere"))
    assert done.returncode == 1 and "nowhere does not exist" in done.stdout and not done.stderr


def test_the_files_of_format_1_keep_their_names() -> None:
    """Bundles of earlier versions have these files: another name needs another number of the format."""
    names = {value for name, value in vars(layout).items() if name.isupper() and isinstance(value, str)}
    assert layout.FORMAT == 1 and names == {
        "model", "fixture.json", "evidence/policy.json", "evidence/evidence.json", "evidence/verdict.json", "evidence/items.jsonl",
        "evidence/task_items.jsonl", "evidence/measurements.json", "evidence/held_out.json", "evidence/licences.json",
        "evidence/anomalies.json", "data/token_shards.jsonl", "data/documents.jsonl", "traces", "provenance.json", "signing_key.pem",
        "README.md", "croissant.json", "spdx.json", "manifest.json", "model.sig", "candidate", "champion",
    }  # fmt: skip
