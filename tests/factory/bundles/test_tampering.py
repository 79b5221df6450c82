"""Each kind of tampering with a bundle is named by its own check, even if the attacker wrote a new manifest and a new signature."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from factory.bundles import signing
from factory.bundles.checking import check_parity_fixture
from factory.bundles.files import layout
from factory.bundles.files.folder import BundleError, BundleFolder
from factory.bundles.files.manifest import build_manifest
from factory.bundles.verifying import CHECKS, run_check, verify_bundle
from tests.support.messages import codes, refused, says, tree

Change = Callable[[Path], None]


def failing(bundle: Path) -> set[str]:
    """The checks of the files that fail; the fixture, which takes a process of its own, has tests of its own."""
    folder = BundleFolder.open(bundle)
    return {name for name in CHECKS if name != "fixture" and not run_check(name, folder).ok}


def reseal(bundle: Path, key: Path) -> None:
    """What someone with a key can do: a manifest and a signature of what is there now."""
    (bundle / layout.SIGNATURE).unlink(missing_ok=True)
    made = build_manifest("release 2", BundleFolder.open(bundle).file_hashes)
    (bundle / layout.MANIFEST).write_text(json.dumps(made))
    signing.sign_folder(bundle, key)


def edited(path: str, change: Callable[[Any], object]) -> Change:
    """Changes the JSON of a file, which keeps the format that it is written in."""

    def apply(bundle: Path) -> None:
        value = json.loads((bundle / path).read_text())
        change(value)
        (bundle / path).write_text(json.dumps(value, separators=(",", ":")))

    return apply


def flipped(path: str, at: int) -> Change:
    def apply(bundle: Path) -> None:
        data = bytearray((bundle / path).read_bytes())
        data[at] ^= 1
        (bundle / path).write_bytes(data)

    return apply


def replaced(path: str, old: str, new: str) -> Change:
    def apply(bundle: Path) -> None:
        text = (bundle / path).read_text()
        assert old in text
        (bundle / path).write_text(text.replace(old, new, 1))

    return apply


def first_item(change: Callable[[dict[str, Any]], object], path: str = layout.ITEMS) -> Change:
    def apply(bundle: Path) -> None:
        first, rest = (bundle / path).read_text().split("\n", 1)
        row = json.loads(first)
        change(row)
        (bundle / path).write_text(json.dumps(row) + "\n" + rest)

    return apply


def rehashed_evidence(change: Callable[[Any], object]) -> Change:
    """With the hash that is recorded in it made anew."""
    from factory.gates.release.recorded_verdict import compute_evidence_sha256

    def both(value: Any) -> None:
        change(value)
        value["sha256"] = compute_evidence_sha256(value)

    return edited(layout.EVIDENCE, both)


def segments(statement: Any) -> list[Any]:
    return list(statement["predicate"]["buildDefinition"]["internalParameters"]["segments"])


def another(key: str, value: Any) -> Callable[[Any], object]:
    return lambda row: row.update({key: value})


# what is done → the file, the checks that then fail although manifest and signature were made anew
TAMPERED: dict[str, tuple[Change, str, set[str]]] = {
    "one byte of the weights": (flipped("model/model.safetensors", -1), "model/model.safetensors", {"export", "provenance", "spdx"}),
    "the tokenizer": (replaced("model/tokenizer.json", '"merges"', '"merges" '), "model/tokenizer.json", {"export", "provenance", "spdx"}),
    "the chat template": (flipped("model/chat_template.jinja", 5),
        "model/chat_template.jinja", {"export", "provenance", "spdx"}),
    "the generation config": (edited("model/generation_config.json", another("temperature", 1.0)), "model/generation_config.json",
        {"export", "provenance", "spdx"}),
    "the card": (replaced(layout.CARD, "PSF-2.0", "MIT"), layout.CARD, {"card"}),
    "an item's result": (first_item(another("value", 1.0)), layout.ITEMS, {"evidence", "provenance", "spdx"}),
    "an item of another document": (first_item(another("item", "x")), layout.ITEMS, {"evidence", "held_out", "provenance", "spdx"}),
    "an answer to a task": (first_item(lambda row: row.update(value=1.0 - row["value"]), layout.TASK_ITEMS), layout.TASK_ITEMS,
        {"evidence", "spdx"}),
    "a task that is no name": (first_item(another("measured_in", []), layout.TASK_ITEMS), layout.TASK_ITEMS, {"evidence", "spdx"}),
    "a task's gain": (rehashed_evidence(lambda e: next(iter(e["tasks"]["gains"].values())).update(gain=0.9)), layout.EVIDENCE,
        {"evidence", "verdict", "provenance", "spdx"}),
    "a gain": (rehashed_evidence(lambda e: e["target"].update(gain=0.9)), layout.EVIDENCE, {"evidence", "verdict", "provenance", "spdx"}),
    "how often it was tried": (rehashed_evidence(another("look", 9)), layout.EVIDENCE, {"verdict", "provenance", "spdx"}),
    "the evidence's own hash": (edited(layout.EVIDENCE, another("sha256", "0" * 64)), layout.EVIDENCE, {"evidence", "provenance", "spdx"}),
    "a check that failed": (rehashed_evidence(lambda e: e["checks"].update(logits=[False, "apart"])), layout.EVIDENCE,
        {"evidence", "verdict", "provenance", "spdx"}),
    "the verdict's outcome": (edited(layout.VERDICT, another("outcome", "hold")), layout.VERDICT, {"verdict", "card", "provenance", "spdx"}),
    "a reason": (edited(layout.VERDICT, lambda v: v["reasons"].append("Very good.")), layout.VERDICT, {"verdict", "card", "provenance", "spdx"}),
    "what was judged": (edited(layout.VERDICT, another("subject_sha256", "0" * 64)), layout.VERDICT, {"export", "provenance", "spdx"}),
    "a threshold of the policy": (edited(layout.POLICY, lambda p: p["guards"].update(alpha=0.4)), layout.POLICY,
        {"policy", "verdict", "provenance", "spdx"}),
    "a measurement": (edited(layout.MEASUREMENTS, lambda m: m["candidate"]["bpb"].update(code=1.0)), layout.MEASUREMENTS,
        {"evidence", "card", "spdx"}),
    "a held-out document": (edited(layout.HELD_OUT, lambda h: h["items"].pop()), layout.HELD_OUT, {"held_out", "spdx"}),
    "a held-out document's hash": (edited(layout.HELD_OUT, lambda h: h["items"][0].__setitem__(3, "0" * 64)), layout.HELD_OUT,
        {"held_out", "spdx"}),
    "a held-out text": (edited(layout.HELD_OUT, another("text", "what is asked")), layout.HELD_OUT, {"held_out", "spdx"}),
    "a licence": (edited(layout.LICENCES, lambda v: v["release_allowed"].update({"PSF-2.0": False})), layout.LICENCES,
        {"licences", "card", "spdx"}),
    "a licence of the weights": (edited(layout.LICENCES, another("model", "MIT")), layout.LICENCES, {"card", "spdx"}),
    "a licence in Croissant": (replaced(layout.CROISSANT, "licenses/PSF-2.0", "licenses/CC0-1.0"), layout.CROISSANT, {"croissant"}),
    "a hash in SPDX": (edited(layout.SPDX, lambda v: v["@graph"].pop()), layout.SPDX, {"spdx"}),
    "the commit": (replaced(layout.PROVENANCE, '"code_commit": "0"', '"code_commit": "1"'), layout.PROVENANCE, {"card", "spdx"}),
    "where training began": (edited(layout.PROVENANCE, lambda v: segments(v)[0].update(parent=7)), layout.PROVENANCE, {"provenance", "spdx"}),
    "the data plan": (edited(layout.PROVENANCE, lambda v: segments(v)[-1].update(data_plan="x")), layout.PROVENANCE, {"provenance", "spdx"}),
    "a subject": (edited(layout.PROVENANCE, lambda v: v["subject"].pop()), layout.PROVENANCE, {"provenance", "spdx"}),
    "a token shard": (replaced(layout.SHARDS, '"documents": 565', '"documents": 564'), layout.SHARDS, {"card", "croissant", "spdx", "data"}),
    "a document's licence": (replaced(layout.DOCUMENTS, "PSF-2.0", "CC-BY-NC-4.0"), layout.DOCUMENTS, {"croissant", "spdx", "data"}),
    "an anomaly": (edited(layout.ANOMALIES, lambda v: v["quarantined"].append({})), layout.ANOMALIES, {"card", "spdx"}),
    "another fixture": (edited(layout.FIXTURE, another("texts", [])), layout.FIXTURE, {"provenance", "spdx"}),
    "an added file": (lambda bundle: (bundle / "more.txt").write_text("x") and None, "more.txt", {"spdx"}),
    "an added file of git": (lambda bundle: (bundle / ".gitattributes").write_text("x") and None, ".gitattributes", {"spdx"}),
    "a renamed file": (lambda bundle: (bundle / layout.DOCUMENTS).rename(bundle / "data/other.jsonl") and None, "data/other.jsonl",
        {"croissant", "spdx", "data"}),
    "a missing file": (lambda bundle: (bundle / layout.ANOMALIES).unlink(), layout.ANOMALIES, {"card", "croissant", "spdx"}),
}  # fmt: skip


def test_an_unchanged_bundle_verifies(bundle: Path, own_key: Path, published_key: Path) -> None:
    assert failing(bundle) == set()
    reseal(bundle, own_key)
    assert failing(bundle) == set()
    signing.check_signature(bundle, published_key)


@pytest.mark.parametrize("what", TAMPERED)
def test_tampering_is_named_by_its_own_check(what: str, bundle: Path, own_key: Path, published_key: Path) -> None:
    change, path, expected = TAMPERED[what]
    change(bundle)
    files = run_check("files", BundleFolder.open(bundle))
    assert not files.ok and path in files.detail
    with refused("signing.other_signature", BundleError):
        signing.check_signature(bundle, published_key)
    reseal(bundle, own_key)
    assert failing(bundle) == expected


def test_a_foreign_signature_over_a_new_manifest_is_refused(
    bundle: Path, own_key: Path, published_key: Path, tmp_path: Path
) -> None:
    foreign = signing.ensure_private_key(tmp_path)
    TAMPERED["an added file"][0](bundle)
    reseal(bundle, foreign)
    assert run_check("files", BundleFolder.open(bundle)).ok
    for key in (published_key, bundle / layout.PUBLIC_KEY):
        with refused("signing.other_signature", BundleError):
            signing.check_signature(bundle, key)
    (bundle / layout.PUBLIC_KEY).write_bytes(signing.derive_public_key(foreign))
    reseal(bundle, foreign)
    signing.check_signature(bundle, bundle / layout.PUBLIC_KEY)  # passes, so a verifier must pin the key
    with refused("signing.other_signature", BundleError):
        signing.check_signature(bundle, published_key)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[" * 100_000, b'{"dsseEnvelope": {"payload": 1}}', b"\xff\xfe"])
def test_a_damaged_signature_is_named(bundle: Path, damage: bytes, published_key: Path) -> None:
    (bundle / layout.SIGNATURE).write_bytes(damage)
    with refused("signing.other_signature", BundleError):
        signing.check_signature(bundle, published_key)


@pytest.mark.parametrize("pem", [b"", b"no key", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_a_damaged_public_key_is_named(bundle: Path, pem: bytes) -> None:
    (bundle / layout.PUBLIC_KEY).write_bytes(pem)
    with refused("signing.no_public_key", BundleError, path=layout.PUBLIC_KEY):
        signing.compute_key_fingerprint(pem, layout.PUBLIC_KEY)
    assert "signing_key.pem" in run_check("files", BundleFolder.open(bundle)).detail


def test_a_changed_weight_contradicts_the_fixture(bundle: Path) -> None:
    flipped("model/model.safetensors", -1)(bundle)  # the exponent of one weight
    assert "logprobs" in check_parity_fixture(BundleFolder.open(bundle))[0]


def test_a_changed_tokenizer_contradicts_the_fixture(bundle: Path) -> None:
    path = bundle / "model" / "tokenizer.json"
    value = json.loads(path.read_text())
    value["model"]["merges"].pop(0)
    path.write_text(json.dumps(value))
    assert check_parity_fixture(BundleFolder.open(bundle))[0].startswith("texts/1/ids has ")


def test_a_damaged_tokenizer_is_named(bundle: Path) -> None:
    (bundle / "model" / "tokenizer.json").write_text("{}")
    with refused("checking.fixture_failed", BundleError, folder=layout.MODEL) as found:
        check_parity_fixture(BundleFolder.open(bundle))
    assert "tokenizer.json" in str(found.value)


def test_a_changed_fixture_contradicts_the_weights(bundle: Path) -> None:
    edited(layout.FIXTURE, lambda f: f["greedy"][0]["logprobs"].__setitem__(0, -0.5))(bundle)
    assert "greedy/0/logprobs/0 is -0.5" in check_parity_fixture(BundleFolder.open(bundle))[0]


# -- hostile folders ---------------------------------------------------------------------------------------------------
HOSTILE: dict[str, Change] = {
    "a link": lambda bundle: (bundle / "more").symlink_to("/etc/passwd"),
    "a link to a folder": lambda bundle: (bundle / "more").symlink_to("/", target_is_directory=True),
    "a pipe": lambda bundle: os.mkfifo(bundle / "pipe"),
    "depth": lambda bundle: (bundle / "/".join("abcdefghijkl")).mkdir(parents=True),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_folder_that_is_not_safe_to_read_is_not_read(bundle: Path, what: str) -> None:
    HOSTILE[what](bundle)
    found = verify_bundle(bundle)
    assert not found.is_verified and [c.name for c in found.checks if c.ok is False] == ["files"]
    assert {c.ok for c in found.checks[1:]} == {None}


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../b", "./README.md", "", "model//config.json", "nul\0"]
)
def test_a_manifest_with_a_path_outside_the_bundle_is_refused(bundle: Path, name: str) -> None:
    edited(layout.MANIFEST, lambda m: m["files"].update({name: {"sha256": "0" * 64, "bytes": 1}}))(bundle)
    found = run_check("files", BundleFolder.open(bundle))
    assert not found.ok and {"manifest.outside", "manifest.missing"} & set(codes(tree(found.detail)))


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"a": NaN}', "finite"),
        ('{"a": [1, {"b": 1e999}]}', "a/1/b is not a finite number"),
        ('{"a": ' + "[" * 60 + "]" * 60 + "}", "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        ("[]", "expected a JSON object"),
        ('{"a": ' + "9" * 4000 + "}", "digits"),
        ('{"a": "\\ud800"}', "cannot be read"),
        ("", "cannot be read"),
    ],
)
@pytest.mark.parametrize("path", [layout.EVIDENCE, layout.MANIFEST])
def test_hostile_json_is_named(bundle: Path, path: str, text: str, words: str) -> None:
    (bundle / path).write_text(text)
    found = run_check("evidence" if path == layout.EVIDENCE else "files", BundleFolder.open(bundle))
    assert not found.ok and path in found.detail and words in found.detail


def test_a_huge_file_is_not_read(bundle: Path) -> None:
    for name, limit in ((layout.EVIDENCE, layout.JSON_BYTES), (layout.ITEMS, layout.LINE_BYTES)):
        with open(bundle / name, "wb") as file:
            file.truncate(limit + 1)
    folder = BundleFolder.open(bundle)
    assert says(
        run_check("evidence", folder).detail,
        ("bundles.too_large", {"file": layout.EVIDENCE, "limit": layout.JSON_BYTES}),
    )
    with refused("bundles.too_large", BundleError, file=f"{layout.ITEMS}, line 1", limit=layout.LINE_BYTES):
        list(folder.read_rows(layout.ITEMS))
    with refused("bundles.too_large", BundleError, file=layout.SHARDS, limit=10):
        list(folder.read_rows(layout.SHARDS, 10))


ODD = st.sampled_from([None, True, -1, 0, 1e308, 10**17, "", "x" * 300, "\x1b[31m", [], {}, [[]], {"a": {}}, [None]])


@given(data=st.data())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_change_of_a_value_makes_a_check_crash(bundle: Path, data: st.DataObject) -> None:
    """A value anywhere in any JSON file is another one: every check answers."""
    names = [name for name in BundleFolder.open(bundle).paths if name.endswith((".json", ".jsonl"))]
    path = bundle / data.draw(st.sampled_from(sorted(names)))
    before = path.read_text()
    head, tail = before.split("\n", 1) if path.suffix == ".jsonl" else (before, "")
    value = json.loads(head)
    holder: Any = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if isinstance(holder[key], dict | list) and holder[key] and data.draw(st.integers(0, 4)):
            holder = holder[key]
            continue
        holder[key] = data.draw(ODD)
        break
    try:
        path.write_text(json.dumps(value) + ("\n" + tail if path.suffix == ".jsonl" else ""))
        folder = BundleFolder.open(bundle)
        for name in CHECKS:
            if name != "fixture":
                assert run_check(name, folder).detail.isprintable()
    finally:
        path.write_text(before)
