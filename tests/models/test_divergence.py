"""The proof can fail: names and shapes that fit, with one fact of the model changed, and the report names the block where the change begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.divergence import TOLERANCE
from models.files.model_folder import ModelSource, open_model_folder
from models.spec import ExpertsSpec, RopeScaling
from tests.support.models.proof import Subject
from tests.support.models.small_models import CASES, make_tokens
from trainer.tools.divergence import LOSS_BOUND, compare_with_transformers, load_decoder, main, measure_losses

LINEAR = RopeScaling(kind="linear", factor=3.0)
EVERYWHERE, FIRST_EXPERTS = "blocks.0", "blocks.1"
# (case, what is changed, the place where it must show). Facts of all layers show in the first.
MUTATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("llama-tied", {"rope_theta": 1e4}, EVERYWHERE),
    ("llama-tied", {"norm_eps": 1e-2}, EVERYWHERE),
    ("llama-tied", {"heads": 8, "kv_heads": 4, "head_dim": 8}, EVERYWHERE),
    ("llama-tied", {"attention_scale": 0.2}, EVERYWHERE),
    ("llama-tied", {"embedding_scale": 2.0}, "embedding"),
    ("llama-tied", {"activation": "gelu"}, EVERYWHERE),
    ("llama-scaled", {"rope_scaling": None}, EVERYWHERE),
    ("llama-linear", {"rope_scaling": LINEAR}, EVERYWHERE),
    ("qwen2-windows", {"windows": None}, "blocks.2"),
    ("qwen2-windows", {"windows": [None, 9, 9, 9]}, "blocks.1"),
    ("qwen2-windows", {"windows": [None, None, 10, 10]}, "blocks.2"),
    ("qwen2-yarn", {"rope_scaling": LINEAR}, EVERYWHERE),
    ("qwen3-plain", {"rope_theta": 1e4}, EVERYWHERE),
    ("qwen3_moe-plain", {"experts": {"scores": "sigmoid"}}, FIRST_EXPERTS),
    ("qwen3_moe-plain", {"experts": {"normalise": False}}, FIRST_EXPERTS),
    ("qwen3_moe-plain", {"experts": {"per_token": 2}}, FIRST_EXPERTS),
    ("smollm3-plain", {"nope_every": None}, "blocks.1"),
    ("smollm3-plain", {"nope_every": 4}, "blocks.1"),
    ("olmo2-plain", {"norm_eps": 1e-2}, EVERYWHERE),
    ("mistral-windows", {"windows": [8]}, EVERYWHERE),
    ("gemma2-plain", {"norm_plus_one": False}, EVERYWHERE),
    ("gemma2-plain", {"embedding_scale": None}, "embedding"),
    ("gemma2-plain", {"attention_softcap": None}, EVERYWHERE),
    ("gemma2-plain", {"logit_softcap": None}, "logits"),
    ("gemma2-plain", {"attention_scale": None}, EVERYWHERE),
    ("gemma2-plain", {"activation": "gelu"}, EVERYWHERE),
    ("gemma2-plain", {"windows": [None, 9]}, EVERYWHERE),
    ("gemma3_text-scaled", {"window_rope_theta": 1e4}, EVERYWHERE),
    ("gemma3_text-scaled", {"rope_theta": 1e3, "window_rope_theta": 1e6}, EVERYWHERE),
    ("gemma3_text-scaled", {"rope_scaling": None}, "blocks.2"),
    ("glm4_moe-plain", {"rope_share": 1.0}, EVERYWHERE),
    ("glm4_moe-plain", {"experts": {"scale": 1.0}}, FIRST_EXPERTS),
    ("glm4_moe-plain", {"experts": {"groups": 1, "groups_per_token": 1}}, FIRST_EXPERTS),
    ("deepseek_v3-plain", {"attention_scale": None}, EVERYWHERE),
    ("deepseek_v3-plain", {"rope_scaling": None}, EVERYWHERE),
    ("deepseek_v3-plain", {"experts": {"normalise": False}}, FIRST_EXPERTS),
    ("glm4_moe-yarn", {"rope_scaling": None}, EVERYWHERE),
    ("olmo3-windows", {"window_rope_theta": 1e4}, EVERYWHERE),
    ("olmo3-windows", {"rope_scaling": None}, "blocks.3"),
    ("exaone4-windows", {"nope_every": None}, "blocks.1"),
    ("exaone4-windows", {"windows": None}, EVERYWHERE),
    ("nanochat-plain", {"embedding_norm": False}, "embedding"),
    ("nanochat-plain", {"activation": "gelu"}, EVERYWHERE),
    ("nanochat-plain", {"logit_softcap": None}, "logits"),
    ("gpt_oss-plain", {"experts": {"clamp": None}}, EVERYWHERE),
    ("gpt_oss-plain", {"experts": {"clamp_alpha": 1.0}}, EVERYWHERE),
    ("gpt_oss-plain", {"windows": None}, EVERYWHERE),
    ("gpt_oss-plain", {"rope_scaling": None}, EVERYWHERE),
    ("mixtral-plain", {"experts": {"per_token": 1}}, EVERYWHERE),
    ("olmoe-plain", {"experts": {"normalise": True}}, EVERYWHERE),
    ("phi3-windows", {"rope_share": 1.0}, EVERYWHERE),
]  # fmt: skip


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    needed = {name for name, *_ in MUTATIONS}
    return {str(case): Subject(case, tmp_path_factory.mktemp(str(case))) for case in CASES if str(case) in needed}


@pytest.mark.parametrize(("name", "change", "place"), MUTATIONS, ids=lambda value: str(value)[:50])
def test_a_changed_fact_shows_in_the_first_block_that_has_it(
    subjects: dict[str, Subject], name: str, change: dict[str, Any], place: str
) -> None:
    subject = subjects[name]
    spec = subject.source.spec
    if "experts" in change:
        assert spec.experts is not None
        experts: ExpertsSpec = spec.experts.model_copy(update=change["experts"])
        change = {"experts": experts}
    changed = spec.model_copy(update=change)
    assert changed != spec
    report = compare_with_transformers(subject.theirs, load_decoder(subject.source, changed), make_tokens())
    assert report.first is not None and report.first.place == place, report.places
    assert report.first.relative > 5 * TOLERANCE, "not a matter of rounding"


@pytest.mark.parametrize("name", ["glm4_moe-plain", "deepseek_v3-plain"])
def test_rows_in_another_order_show_in_the_first_block(subjects: dict[str, Subject], name: str) -> None:
    """The order of rows that an adapter forgets: all shapes fit."""
    subject = subjects[name]
    family = subject.source.family
    forgetful = replace(family, order_rows=lambda spec, key: None)
    source = replace(subject.source, family=forgetful)
    report = compare_with_transformers(subject.theirs, load_decoder(source), make_tokens())
    assert report.first is not None and report.first.place == EVERYWHERE and report.first.relative > 5 * TOLERANCE


def test_norms_that_stand_at_another_place_show_in_the_first_block(subjects: dict[str, Subject]) -> None:
    """OLMo 2's names as a careless adapter would read them: its norms after a half as norms before it."""
    subject = subjects["olmo2-plain"]
    family = subject.source.family
    names = {**family.names(subject.source.spec)}
    names["attention_norm"], names["mlp_norm"] = names["attention_post_norm"], names["mlp_post_norm"]
    spec = subject.source.spec.model_copy(update={"norms": "pre"})
    source = replace(subject.source, family=replace(family, names=lambda spec: names), spec=spec)
    report = compare_with_transformers(subject.theirs, load_decoder(source), make_tokens())
    assert report.first is not None and report.first.place == EVERYWHERE and report.first.relative > 5 * TOLERANCE


def test_the_tool_names_the_block_and_exits_with_1(
    subjects: dict[str, Subject], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder: Path = subjects["qwen2-windows"].exported
    assert main([str(folder)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(["embedding", *range(4), "logits", "verdict"])

    def open_without_windows(folder: Path) -> ModelSource:
        source = open_model_folder(folder)
        return replace(source, spec=source.spec.model_copy(update={"windows": None}))

    monkeypatch.setattr("trainer.tools.divergence.open_model_folder", open_without_windows)
    assert main([str(folder)]) == 1 and "blocks.2" in capsys.readouterr().out.splitlines()[-1]
    assert main([str(folder / "missing")]) == 2 and "error[models.no_folder]" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-windows"])
def test_the_losses_of_both_programs_on_a_text_agree_unless_a_fact_is_changed(
    subjects: dict[str, Subject], name: str
) -> None:
    subject, tokens_BT = subjects[name], make_tokens()
    theirs, ours = measure_losses(subject.theirs, load_decoder(subject.source), tokens_BT)
    with torch.no_grad():  # transformers' own loss
        own = subject.theirs(tokens_BT, labels=tokens_BT).loss.item()
    assert abs(theirs - own) <= LOSS_BOUND and abs(ours - own) <= LOSS_BOUND
    changed = subject.source.spec.model_copy(update={"embedding_scale": 20.0})
    assert (
        abs(measure_losses(subject.theirs, load_decoder(subject.source, changed), tokens_BT)[1] - own) > 10 * LOSS_BOUND
    )
