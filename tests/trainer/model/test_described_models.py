"""The trainer's decoder computes what transformers' classes compute with the same weights: logits, packed documents and gradients."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.registry import bind_ops
from models.adapters import FAMILIES, convert_to_native
from models.spec import ModelSpec
from models.tensors import list_tensor_shapes
from tests.support.models.small_models import CASES, CONTEXT, Case, make_tokens
from trainer.model.transformer import Decoder, make_rope_tables

LOGITS, GRADIENTS = 1e-5, 1e-4  # largest difference, as a share of the largest number
KERNELS = {"general_attention": "blocks", "softcapped_cross_entropy": "chunked"}  # of a CPU before tuning
LENGTHS = (23, 30, CONTEXT - 53)  # of the documents of a packed row
EXACT = [
    case for case in CASES if case.name != "dynamic"
]  # dynamic scaling: transformers rounds its frequencies again for each length


def read_spec(case: Case) -> ModelSpec:
    config = json.loads(case.make_config().to_json_string()) | {"architectures": [FAMILIES[case.family].class_name]}
    return FAMILIES[case.family].read_config(config, str(case)).without_multi_token  # transformers' class has none


def list_files_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors that transformers would write."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, model.state_dict()))


def convert(spec: ModelSpec, case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(convert_to_native(spec, FAMILIES[case.family], tensors.__getitem__))


def make_decoder(spec: ModelSpec, tensors: Mapping[str, Tensor], kernels: Mapping[str, str] = KERNELS) -> Decoder:
    decoder = Decoder(spec, bind_ops(kernels, "cpu", torch.float32, compile=False))
    decoder.load_state_dict(dict(tensors))
    return decoder


BY_NAME = {str(case): case for case in CASES}


@cache
def make_both(name: str) -> tuple[Any, Decoder]:
    case = BY_NAME[name]
    model, spec = case.make_model(), read_spec(case)
    model.get_input_embeddings().padding_idx = None  # else transformers gives this token no gradient
    return model, make_decoder(spec, convert(spec, case, list_files_tensors(model)))


def find_difference(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """The largest difference as a share of the largest expected number, or of ``least`` if that is more."""
    return float((found - expected).abs().max() / max(float(expected.abs().max()), least))


def pack(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """Positions and documents of one row."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    return positions, documents.int()


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_logits_of_a_row_equal_those_of_transformers(case: Case) -> None:
    model, decoder = make_both(str(case))
    tokens = make_tokens()
    positions = torch.arange(CONTEXT).expand_as(tokens)
    with torch.no_grad():
        expected = model(tokens).logits
        found = decoder.logits(tokens, positions, torch.zeros_like(tokens, dtype=torch.int32))
    assert find_difference(found, expected) < LOGITS


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_each_document_of_a_packed_row_has_the_logits_that_transformers_computes_for_it_alone(case: Case) -> None:
    model, decoder = make_both(str(case))
    tokens = make_tokens(rows=1)
    with torch.no_grad():
        found = decoder.logits(tokens, *pack())
        for part, of_document in zip(tokens.split(LENGTHS, dim=1), found.split(LENGTHS, dim=1), strict=True):
            assert find_difference(of_document, model(part).logits) < LOGITS


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_loss_and_gradients_of_packed_documents_equal_those_of_transformers(case: Case) -> None:
    """The gradients of transformers' model are converted as its weights are: each tensor of the files has one place in a native tensor."""
    model, decoder = make_both(str(case))
    tokens, (positions, documents) = make_tokens(rows=1), pack()
    targets = tokens.roll(-1, 1)
    weights = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    decoder.zero_grad()
    expected = torch.zeros(())
    for part, goal, weight in zip(*(x.split(LENGTHS, dim=1) for x in (tokens, targets, weights)), strict=True):
        nll = F.cross_entropy(model(part).logits[0], goal[0], reduction="none")
        expected = expected + (nll * weight[0]).sum()
    expected.backward()
    loss, nll_BT, _ = decoder.loss(tokens, targets, weights, positions, documents, z_loss=0.0)
    loss.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float((nll_BT * weights).sum()) == pytest.approx(float(expected), rel=1e-5)
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    state = {name: theirs.get(name, tensor) for name, tensor in model.state_dict().items()}
    if "lm_head.weight" in state and decoder.shape.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    from transformers.core_model_loading import revert_weight_conversion

    gradients = convert(decoder.shape, case, dict(revert_weight_conversion(model, state)))
    own = dict(decoder.named_parameters())
    assert own.keys() == list_tensor_shapes(decoder.shape).keys() - {name for name, _ in decoder.named_buffers()}
    # Some gradients are zero but for rounding: a bias of keys without position adds the same to all scores of a query.
    least = 1e-3 * max(float(gradients[name].abs().max()) for name in own)
    for name, parameter in own.items():
        assert parameter.grad is not None, name
        assert find_difference(parameter.grad, gradients[name], least) < GRADIENTS, name


# -- facts that no family has ------------------------------------------------------------------------------------------
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 16,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "d_ff": 24,
    "context": CONTEXT,
}
WITHOUT_A_FAMILY: dict[str, dict[str, Any]] = {
    "sinks": {"qk_norm": False, "attention_sinks": True, "windows": [7, None], "position": "alibi"},
    "relu2": {"qk_norm": False, "gated": False, "activation": "relu2", "mlp_bias": True, "norms": "post"},
    "gelu": {"activation": "gelu", "nope_every": 2, "attention_out_bias": True},
    "whole": {"qk_norm": "whole", "nope_every": 2, "norms": "sandwich", "gated": False, "activation": "gelu_tanh"},
}


def compute_by_hand(decoder: Decoder, tokens_T: Tensor) -> Tensor:
    """The logits of one document [T, V] in fp64, from the description alone."""
    spec = decoder.shape
    H, G, K, T = spec.heads, spec.kv_heads, spec.head_dim, len(tokens_T)
    rms = lambda x, w: x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w
    act = {"relu2": lambda x: x.relu() ** 2, "gelu": F.gelu, "silu": F.silu,
           "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))}[spec.activation]  # fmt: skip
    w = {name: parameter.detach().double() for name, parameter in decoder.named_parameters()}
    x = w["embedding"][tokens_T]
    place = torch.arange(T, dtype=torch.float64)
    distance = place[:, None] - place
    for layer in range(spec.layers):
        b = {name.split(".")[2]: value for name, value in w.items() if name.startswith(f"blocks.{layer}.")}
        one = spec.layer(layer)
        h = x if spec.norms == "post" else rms(x, b["attention_norm"])
        q, k, v = h @ b["q"].T, h @ b["k"].T, h @ b["v"].T
        if spec.qk_norm == "whole":
            q, k = rms(q, b["q_norm"]), rms(k, b["k_norm"])
        q, k, v = q.view(T, H, K), k.view(T, G, K), v.view(T, G, K)
        if spec.qk_norm is True:
            q, k = rms(q, b["q_norm"]), rms(k, b["k_norm"])
        if one.rope != "none":
            angle = place[:, None] * spec.rope_theta ** (-torch.arange(K // 2).double() / (K // 2))
            turn = torch.polar(torch.ones_like(angle), angle)[:, None]
            q, k = ((torch.complex(y[..., : K // 2], y[..., K // 2 :]) * turn) for y in (q, k))
            q, k = (torch.cat((y.real, y.imag), -1) for y in (q, k))
        out = []
        for head in range(H):
            score = q[:, head] @ k[:, head // (H // G)].T * K**-0.5
            if spec.position == "alibi":
                score = score - 2.0 ** (-8 * (head + 1) / H) * distance
            hidden = (distance < 0) | (distance >= (one.window or T))
            weight = score.masked_fill(hidden, -torch.inf).exp()
            extra = b["sinks"][head].exp() if spec.attention_sinks else 0.0
            out.append(weight / (weight.sum(-1, keepdim=True) + extra) @ v[:, head // (H // G)])
        y = torch.cat(out, -1) @ b["attention_out"].T + b.get("attention_out_bias", 0.0)
        x = x + (y if spec.norms == "pre" else rms(y, b["attention_post_norm"]))
        h = x if spec.norms == "post" else rms(x, b["mlp_norm"])
        up = h @ b["up"].T + b.get("up_bias", 0.0)
        y = (act(h @ b["gate"].T) * up if spec.gated else act(up)) @ b["down"].T + b.get("down_bias", 0.0)
        x = x + (y if spec.norms == "pre" else rms(y, b["mlp_post_norm"]))
    return rms(x, w["final_norm"]) @ w["embedding"].T


@pytest.mark.parametrize("changes", WITHOUT_A_FAMILY.values(), ids=WITHOUT_A_FAMILY)
@pytest.mark.parametrize("chosen", ["reference", "blocks"])
def test_facts_that_no_family_has_are_computed_as_their_formulas_say(changes: dict[str, Any], chosen: str) -> None:
    spec = ModelSpec(**SMALL, **changes)
    decoder = Decoder(spec, bind_ops({"general_attention": chosen}, "cpu", torch.float32, compile=False))
    decoder.initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        tokens = torch.randint(64, (1, CONTEXT), generator=generator)
        found = decoder.logits(tokens, *pack())
        by_block = decoder.embedding[tokens]
        position_BT, document_BT = pack()
        for block in decoder.blocks:
            cos, sin = make_rope_tables(position_BT, spec, torch.float32)
            by_block, _ = block(by_block, cos, sin, document_BT)
        alone = decoder.ops.rms_norm(by_block, decoder.final_norm, spec.norm_eps) @ decoder.embedding.T
    assert find_difference(alone, found) < LOGITS, "a block without prepared documents computes the same"
    for part, of_document in zip(tokens.split(LENGTHS, 1), found.split(LENGTHS, 1), strict=True):
        assert find_difference(of_document[0], compute_by_hand(decoder, part[0])) < LOGITS
