"""The judge's own model has the logits of transformers, and refuses hostile exports."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from factory.evals.export_folder import ExportError
from factory.evals.reference_model import ReferenceModel
from models.adapters import FAMILIES as FAMILIES_OF_MODELS
from models.tensors import is_multi_token
from tests.support.factory.exports import CONTEXT, FAMILIES, VOCAB, save_export, tiny_model
from tests.support.messages import says
from tests.support.models.facts import EXPORTED_CASES, make_native_weights, make_spec
from tests.support.models.multi_token import PublishedLayers
from tests.support.models.small_models import CASES, Case, make_tokens, save_model

OTHERS = {"tie_word_embeddings": False, "num_key_value_heads": 4, "rope_theta": 500.0, "rms_norm_eps": 1e-2}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, changes) for family in FAMILIES for changes in ({}, OTHERS)),
        ("smollm3", {"no_rope_layers": [1, 1, 0], "num_hidden_layers": 3}),
        ("glm4_moe", {"use_qk_norm": True, "n_shared_experts": 2, "num_hidden_layers": 3, "first_k_dense_replace": 2}),
        ("glm4_moe", {"first_k_dense_replace": 0, "num_experts_per_tok": 1, "n_shared_experts": 0}),
        ("glm4_moe", {"num_experts_per_tok": 6}),
        ("glm4_moe", {"n_group": 2, "topk_group": 1}),
        ("glm4_moe", {"norm_topk_prob": False}),
        ("glm4_moe", {"routed_scaling_factor": 2.5}),
        ("glm4_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    theirs = tiny_model(3, family, **changes)
    ours = ReferenceModel.load(save_export(theirs, tmp_path))
    tokens = torch.randint(VOCAB, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(tokens).logits
    torch.testing.assert_close(ours.logits(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", EXPORTED_CASES, ids=str)
def test_logits_of_each_family_equal_transformers(case: Case, tmp_path: Path) -> None:
    theirs = case.make_model()
    tokens = make_tokens(3, 50)
    with torch.inference_mode():
        expected = theirs(tokens).logits
    found = ReferenceModel.load(save_model(theirs, tmp_path / "whole")).logits(tokens)
    error = float((found - expected).abs().max())
    print(f"{case}: largest error of a logit {error:.1e} of {float(expected.abs().max()):.1f}")
    assert error < 1e-5 * max(1.0, float(expected.abs().max()))
    shards = save_model(theirs, tmp_path / "shards", 20_000)
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert torch.equal(ReferenceModel.load(shards).logits(tokens), found)


def test_layers_for_multi_token_prediction_take_no_part_in_the_logits(tmp_path: Path) -> None:
    """They are read and checked all the same: a server that drafts tokens computes them."""
    case = next(case for case in CASES if case.multi_token_layers)
    theirs = case.make_model()
    folder = save_model(theirs, tmp_path / "export")
    PublishedLayers(theirs, case.multi_token_layers).save(theirs, folder)
    tokens = make_tokens(2, 50)
    with torch.inference_mode():
        expected = theirs(tokens).logits
    judge = ReferenceModel.load(folder)
    torch.testing.assert_close(judge.logits(tokens), expected, atol=1e-4, rtol=1e-4)
    assert judge.spec.multi_token_layers == case.multi_token_layers and not any(map(is_multi_token, judge.weights))
    stored, last = load_file(folder / "model.safetensors"), f"model.layers.{judge.spec.layers}"
    for name, code in (
        (f"{last}.shared_head.head.weight", "export_folder.other_copy"),
        (f"{last}.embed_tokens.weight", "export_folder.other_copy"),
        (f"{last}.eh_proj.weight", "models.not_finite"),
        (f"{last}.hnorm.weight", "export_folder.missing_tensors"),
    ):
        spoilt = {key: tensor.clone() for key, tensor in stored.items()}
        if code == "export_folder.missing_tensors":
            del spoilt[name]
        else:
            spoilt[name].view(-1)[0] = float("nan") if code == "models.not_finite" else 2.0
        save_file(spoilt, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ExportError) as refused:
            ReferenceModel.load(folder)
        assert refused.value.message.code == code


def test_every_family_is_compared_with_transformers() -> None:
    assert {case.family for case in EXPORTED_CASES} == set(FAMILIES_OF_MODELS) >= set(FAMILIES)


def test_sinks_take_the_share_of_attention_that_transformers_gives_them() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    spec = make_spec("sinks")
    weights = make_native_weights(spec)
    model, sinks = ReferenceModel(spec, weights), weights["blocks.0.sinks"]
    q, k, v = (torch.randn(2, heads, 9, spec.head_dim) for heads in (spec.heads, spec.kv_heads, spec.kv_heads))
    hidden_TT = torch.zeros(9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    module = SimpleNamespace(num_key_value_groups=spec.heads // spec.kv_heads, sinks=sinks, training=False)
    wanted, _ = eager_attention_forward(module, q, k, v, hidden_TT, spec.head_dim**-0.5)  # type: ignore[arg-type]
    found = model._attend(q, k, v, "blocks.0.", hidden_TT.expand(2, 1, 9, 9))
    torch.testing.assert_close(found.transpose(1, 2), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fact", ["ALiBi", "ALiBi of six heads"])
def test_alibi_lowers_scores_as_bloom_does(fact: str) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    spec = make_spec(fact)
    model = ReferenceModel(spec, make_native_weights(spec))
    q, k, v = (torch.randn(1, heads, 9, spec.head_dim) for heads in (spec.heads, spec.kv_heads, spec.kv_heads))
    position = torch.arange(9)[None]
    found = model._attend(q, k, v, "blocks.0.", model._place(position, position).biases[None])
    alibi_H1T = build_alibi_tensor(torch.ones(1, 9), spec.heads, torch.float32)
    k, v = (x.repeat_interleave(spec.heads // spec.kv_heads, 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * spec.head_dim**-0.5 + alibi_H1T[None]
    wanted = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("fact", "name"), [("GELU", "gelu"), ("ReLU² without gate", "relu2")])
def test_activations_are_those_of_transformers(fact: str, name: str) -> None:
    from transformers.activations import ACT2FN

    spec = make_spec(fact)
    w = make_native_weights(spec)
    x, block = torch.randn(5, spec.d_model), "blocks.1."
    linear = lambda x, key: x @ w[block + key].T + w.get(f"{block}{key}_bias", 0)
    inner = ACT2FN[name](linear(x, "gate")) * linear(x, "up") if spec.gated else ACT2FN[name](linear(x, "up"))
    torch.testing.assert_close(ReferenceModel(spec, w)._mlp(x, block), linear(inner, "down"), atol=1e-5, rtol=1e-5)


def test_nll_is_the_cross_entropy_of_the_scored_tokens(tmp_path: Path) -> None:
    model = ReferenceModel.load(save_export(tiny_model(), tmp_path))
    tokens = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    scored = torch.zeros(2, 20, dtype=torch.bool)
    scored[0, 5:9] = scored[1, 1:] = True
    expected = -model.logits(tokens).log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    nll = model.nll(tokens, scored)
    torch.testing.assert_close(nll[:, 1:], expected * scored[:, 1:], atol=1e-5, rtol=1e-5)
    assert nll[0, :5].eq(0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_greedy_generation_equals_one_by_one_and_stops(tmp_path: Path, family: str) -> None:
    model = ReferenceModel.load(save_export(tiny_model(5, family), tmp_path))
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


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shard(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    write_index(folder, weight_map)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "absurd width": lambda f: spoil_config(f, hidden_size=10**9),
    "absurd layers": lambda f: spoil_config(f, num_hidden_layers=10**30),
    "more than memory": lambda f: spoil_config(f, hidden_size=1 << 16, vocab_size=1 << 20),
    "not a number": lambda f: spoil_config(f, rms_norm_eps=float("nan")),
    "a truth as a number": lambda f: spoil_config(f, num_hidden_layers=True),
    "remote code": lambda f: spoil_config(f, auto_map={"AutoModel": "evil.Model"}),
    "a number as a truth": lambda f: spoil_config(f, attention_bias=0),
    "another class": lambda f: spoil_config(f, architectures=["LlamaForCausalLM"]),
    "another model": lambda f: spoil_config(f, architectures=["MistralForCausalLM"], model_type="mistral"),
    "no class": lambda f: spoil_config(f, architectures=None),
    "no model": lambda f: spoil_config(f, architectures=[None], model_type="strange"),
    "no model type": lambda f: spoil_config(f, architectures=[None], model_type=None),
    "a key nobody knows": lambda f: spoil_config(f, attn_implementation="kernels-community/evil"),
    "a kernel to fetch": lambda f: spoil_config(f, _attn_implementation="kernels-community/evil"),
    "a tree in an idle key": lambda f: spoil_config(f, dtype={"a": {"b": 1}}),
    "half the rope": lambda f: spoil_config(f, partial_rotary_factor=0.5),
    "half the rope, hidden": lambda f: spoil_config(
        f, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "a window": lambda f: spoil_config(f, layer_types=["full_attention", "sliding_attention"]),
    "layers without rope": lambda f: spoil_config(f, no_rope_layers=[1, 0]),
    "experts in a dense model": lambda f: spoil_config(f, n_routed_experts=4),
    "scaled rope without a factor": lambda f: spoil_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    "scaled rope without its context": lambda f: spoil_config(
        f,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4,
            "low_freq_factor": 4,
            "high_freq_factor": 1,
        },
    ),
    "rope of one": lambda f: spoil_config(f, rope_parameters={"rope_type": "yarn", "rope_theta": 1.0, "factor": 4}),
    "rope is a list": lambda f: spoil_config(f, rope_parameters=[1]),
    "config is a list": lambda f: (f / "config.json").write_text("[]"),
    "config is too deep": lambda f: (f / "config.json").write_text("[" * 200_000),
    "a pickle": lambda f: (f / "pytorch_model.bin").write_bytes(b"\x80\x04."),
    "a script": lambda f: (f / "modeling.py").write_text("import os"),
    "a link": lambda f: (f / "more.json").symlink_to("/etc/passwd"),
    "truncated": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "more weights": lambda f: (f / "more.safetensors").write_bytes((f / "model.safetensors").read_bytes()),
    "an index beside the weights": lambda f: write_index(f, {"model.norm.weight": "model.safetensors"}),
    "an index of another folder": lambda f: shard(f, {"model.norm.weight": "../model.safetensors"}),
    "an index without a tensor": lambda f: shard(f, {"model.norm.weight": "part.safetensors"}),
    "an index of a missing file": lambda f: shard(f, {"model.norm.weight": "other.safetensors"}),
    "an index of no names": lambda f: shard(f, {"model.norm.weight": ["part.safetensors"]}),
    "missing": lambda f: spoil_weights(f, "missing"),
    "extra": lambda f: spoil_weights(f, "extra"),
    "nan": lambda f: spoil_weights(f, "nan"),
    "shape": lambda f: spoil_weights(f, "shape"),
    "dtype": lambda f: spoil_weights(f, "dtype"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_export(tiny_model(), tmp_path_factory.mktemp("export"))


HOSTILE_EXPERTS: dict[str, tuple[dict[str, Any], str | tuple[str, dict[str, Any]]]] = {
    "absurd count": ({"n_routed_experts": 10**9}, "n_routed_experts"),
    "more names than memory": ({"n_routed_experts": 4096, "num_hidden_layers": 512},
        ("models.too_many_experts", {"layers": 512, "experts": 4096, "limit": 65536})),
    "more than there are": ({"num_experts_per_tok": 7},
        "model.experts.per_token (7)"),
    "none": ({"num_experts_per_tok": 0}, "num_experts_per_tok"),
    "a truth": ({"num_experts_per_tok": True}, "num_experts_per_tok"),
    "as many shared as you like": ({"n_shared_experts": 10**6}, "n_shared_experts"),
    "no shared": ({"n_shared_experts": None}, "n_shared_experts"),
    "no dense ones": ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
    "more dense ones than layers": ({"first_k_dense_replace": 3}, "model.experts.dense_layers (3)"),
    "wide": ({"moe_intermediate_size": 1 << 30}, "moe_intermediate_size"),
    "groups that divide no count": ({"n_group": 4}, "model.experts.groups (4)"),
    "more groups than there are": ({"n_group": 2, "topk_group": 3}, "model.experts.groups_per_token (3)"),
    "scaled by no number": ({"routed_scaling_factor": "1.0"}, "routed_scaling_factor"),
    "another norm": ({"use_qk_norm": True},
        ("export_folder.missing_tensors", {"count": 4, "first": "model.layers.0.self_attn.k_norm.weight"})),
    "predictions": ({"num_nextn_predict_layers": 16}, ("export_folder.too_small", {})),
    "as many predictions as you like": ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers"),
    "half the rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "layers without rope": ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_export(tiny_model(family="glm4_moe"), tmp_path_factory.mktemp("export"))


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many calls are made within."""
    calls, before = [0], sys.getprofile()

    def count(frame: FrameType, event: str, argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize("harm", HOSTILE_EXPERTS)
def test_hostile_configs_of_experts_are_refused_without_much_work(
    sound_experts: Path, tmp_path: Path, harm: str
) -> None:
    for path in sound_experts.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with counted() as sound:
        ReferenceModel.load(tmp_path)
    changes, expected = HOSTILE_EXPERTS[harm]
    spoil_config(tmp_path, **changes)
    with counted() as hostile, pytest.raises(ExportError) as refused:
        ReferenceModel.load(tmp_path)
    assert says(refused.value.message, expected)
    assert str(tmp_path) in str(refused.value) and hostile[0] < 2 * sound[0], "it does not count a billion experts"


@pytest.mark.parametrize("value", [[1], [1, 2], [1, True], [1, 0.0], "10", [1, 0, 1], [[1], [0]], {"0": 1}], ids=str)
def test_no_rope_layers_must_be_one_zero_or_one_per_layer(tmp_path: Path, value: object) -> None:
    save_export(tiny_model(family="smollm3"), tmp_path)
    ReferenceModel.load(tmp_path)
    spoil_config(tmp_path, no_rope_layers=value)
    with pytest.raises(ExportError, match="no_rope_layers"):
        ReferenceModel.load(tmp_path)


@pytest.mark.parametrize("harm", HOSTILE)
def test_hostile_export_is_refused_with_a_reason(sound: Path, tmp_path: Path, harm: str) -> None:
    for path in sound.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    ReferenceModel.load(tmp_path)
    HOSTILE[harm](tmp_path)
    with pytest.raises(ExportError) as refused:
        ReferenceModel.load(tmp_path)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.gpu
def test_the_gpu_gives_the_same_numbers_as_the_cpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    export = save_export(tiny_model(), tmp_path)
    here, there = ReferenceModel.load(export), ReferenceModel.load(export).move_to("cuda")
    tokens_BT = torch.randint(VOCAB, (4, CONTEXT), generator=torch.Generator().manual_seed(0))
    scored_BT = torch.arange(CONTEXT).expand(4, -1) > 9
    for ours, theirs in zip(here.score_tokens(tokens_BT, scored_BT), there.score_tokens(tokens_BT, scored_BT)):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    prompts = [[5, 6, 7], [9] * 20]
    assert here.generate(prompts, 12, {0}) == there.generate(prompts, 12, {0})
