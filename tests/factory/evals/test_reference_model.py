"""The judge's own model against transformers, and against exports that mean harm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from factory.evals.export_folder import ExportError
from factory.evals.reference_model import ReferenceModel
from tests.factory.evals.plant import VOCAB, save_export, tiny_model


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "num_key_value_heads": 4, "rope_theta": 500.0}])
def test_logits_equal_transformers(tmp_path: Path, changes: dict) -> None:
    theirs = tiny_model(3, **changes)
    ours = ReferenceModel.load(save_export(theirs, tmp_path))
    tokens = torch.randint(VOCAB, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(tokens).logits
    torch.testing.assert_close(ours.logits(tokens), expected, atol=1e-4, rtol=1e-4)


def test_nll_is_the_cross_entropy_of_the_scored_tokens(tmp_path: Path) -> None:
    model = ReferenceModel.load(save_export(tiny_model(), tmp_path))
    tokens = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    scored = torch.zeros(2, 20, dtype=torch.bool)
    scored[0, 5:9] = scored[1, 1:] = True
    expected = -model.logits(tokens).log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    nll = model.nll(tokens, scored)
    torch.testing.assert_close(nll[:, 1:], expected * scored[:, 1:], atol=1e-5, rtol=1e-5)
    assert nll[0, :5].eq(0).all()


def test_batched_greedy_generation_equals_one_by_one_and_stops(tmp_path: Path) -> None:
    model = ReferenceModel.load(save_export(tiny_model(5), tmp_path))
    prompts = [[5, 6, 7], [9], [100, 3, 44, 120, 8, 9, 10]]
    alone = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
        alone.append(ids[len(prompt) :])
    assert [g.tokens for g in model.generate(prompts, 12, stop=())] == alone
    stop = alone[0][4]
    generated = model.generate(prompts, 12, stop={stop})[0]
    assert generated.ended and generated.tokens == alone[0][: alone[0].index(stop)]


def spoil_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def spoil_weights(folder: Path, change: str) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[name]
    elif change == "extra":
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    elif change == "nan":
        weights[name][3, 3] = float("nan")
    elif change == "shape":
        weights[name] = weights[name][:5].clone()
    elif change == "dtype":
        weights[name] = weights[name].to(torch.int64)
    save_file(weights, folder / "model.safetensors")


HOSTILE = {
    "absurd width": lambda f: spoil_config(f, hidden_size=10**9),
    "absurd layers": lambda f: spoil_config(f, num_hidden_layers=10**30),
    "more than memory": lambda f: spoil_config(f, hidden_size=1 << 16, vocab_size=1 << 20),
    "not a number": lambda f: spoil_config(f, rms_norm_eps=float("nan")),
    "a truth as a number": lambda f: spoil_config(f, num_hidden_layers=True),
    "remote code": lambda f: spoil_config(f, auto_map={"AutoModel": "evil.Model"}),
    "another model": lambda f: spoil_config(f, architectures=["LlamaForCausalLM"]),
    "scaled rope": lambda f: spoil_config(f, rope_parameters={"rope_type": "yarn", "factor": 4}),
    "config is a list": lambda f: (f / "config.json").write_text("[]"),
    "config is too deep": lambda f: (f / "config.json").write_text("[" * 200_000),
    "a pickle": lambda f: (f / "pytorch_model.bin").write_bytes(b"\x80\x04."),
    "a script": lambda f: (f / "modeling.py").write_text("import os"),
    "a link": lambda f: (f / "more.json").symlink_to("/etc/passwd"),
    "truncated": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "missing": lambda f: spoil_weights(f, "missing"),
    "extra": lambda f: spoil_weights(f, "extra"),
    "nan": lambda f: spoil_weights(f, "nan"),
    "shape": lambda f: spoil_weights(f, "shape"),
    "dtype": lambda f: spoil_weights(f, "dtype"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_export(tiny_model(), tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("harm", HOSTILE)
def test_hostile_export_is_refused_with_a_reason(sound: Path, tmp_path: Path, harm: str) -> None:
    for path in sound.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    ReferenceModel.load(tmp_path)
    HOSTILE[harm](tmp_path)
    with pytest.raises(ExportError) as refused:
        ReferenceModel.load(tmp_path)
    assert str(tmp_path) in str(refused.value)
