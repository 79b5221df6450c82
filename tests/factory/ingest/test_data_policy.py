"""The data policy ``data.yaml``: the shipped file, the defaults, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from factory.core.errors import ConfigError
from factory.core.workspace import find_checkout_root
from factory.ingest.rules.policy import DataPolicy


def load(tmp_path: Path, text: str) -> DataPolicy:
    path = tmp_path / "data.yaml"
    path.write_text(text)
    return DataPolicy.load(path)


def test_the_shipped_policy_loads_and_knows_its_domains() -> None:
    policy = DataPolicy.load(find_checkout_root() / "policies" / "data.yaml")
    assert policy.tokenizer.vocab_size == 4096
    assert policy.find_domain_rules("code").must_parse and not policy.find_domain_rules("poems").must_parse
    assert policy.find_domain_rules("poems") == policy.domains["default"]
    assert policy.licences.find_licence("PSF-2.0").release and not policy.licences.find_licence("unheard of").release
    assert not policy.licences.find_licence("proprietary").train


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decontaminaton: {}", "unknown key 'decontaminaton'; did you mean 'decontamination'?"),
        ("limits: {max_row: 3}", "unknown key 'limits.max_row'; did you mean 'max_rows'?"),
        ("domains: {code: {min_char: 3}}", "unknown key 'domains.code.min_char'; did you mean 'min_chars'?"),
        ("held_out: {share: 2}", "held_out.share"),
        ("domains: {a: {group: host}}", "domains.a.group"),
        ("domains: {code: {pii: [faces]}}", "domains.code.pii.0"),
        ("- a list", "but its type is list"),
        ("a: [", "cannot be read as YAML"),
    ],
)
def test_an_invalid_policy_is_an_error_that_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match="data.yaml") as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


def test_an_empty_policy_has_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "") == DataPolicy()
