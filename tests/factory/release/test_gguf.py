"""A release is converted to a GGUF file: transformers gets the same ids and logits from it, and the package ``gguf`` reads every weight."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import factory.cli  # noqa: F401 (registers every command)
from factory.cli.app import app
from factory.core.errors import InputError
from factory.core.exports import hash_export_folder
from factory.core.progress import SILENT
from factory.core.workspace import Workspace
from factory.evals.export_folder import list_file_shapes
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow
from factory.release.gguf.gguf_type import GgufType
from factory.release.gguf.tensors import plan_gguf_tensors
from factory.release.gguf.writing import GgufFile, write_export_gguf, write_release_gguf
from tests.support.messages import refused
from tests.support.models.facts import EXPORTED_CASES
from tests.support.models.small_models import Case, save_model
from tests.support.plants.release_scene import add_candidate
from tests.support.serving.served import add_release, make_export, tokenizer
from tests.support.trainer.families import FAMILIES, ODD
from tests.support.trainer.segments import recipe_with
from tests.support.trainer.small_models import make_model
from trainer.contract.checkpoint import format as checkpoints
from trainer.contract.checkpoint.export import convert_tensors, make_generation_config, make_hf_config

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")

FIT = FAMILIES | {"nope": ("SmolLM3ForCausalLM", {"model__qk_norm": False, "model__nope_every": 4, "model__layers": 5})}
TEXTS = (
    "def add(a, b):\n    return a + b\n\n\n",
    "  leading  blanks\t\ttabs \n\n  \r\n 12345 3.14159 x86 \u00a0\u2003 end  ",
    "Don't WE'LL I'm it'S naïve 日本語 🙂 ½² ١٢٣",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "",
    "\n",
)
# llama.cpp's names of a layer's tensors, from docs/gguf.md of ggml, written here again.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def exported(folder: Path, changes: dict[str, Any], dtype: str = "fp32") -> Path:
    """Make the trainer's export of a model of the family, with changed norms and biases, and a tokenizer."""
    recipe = recipe_with(**(ODD | changes), export_dtype=dtype)
    tensors = dict(make_model(recipe).state_dict())
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith("router_bias"):
            tensors[name] = tensor + 0.3 * torch.randn_like(tensor)
    folder.mkdir()
    made = checkpoints.iterate_safetensors_bytes(dict(convert_tensors(tensors, recipe)), {"format": "pt"})
    (folder / "model.safetensors").write_bytes(b"".join(made))
    config = make_hf_config(recipe.model, {"fp32": "float32", "bf16": "bfloat16"}[dtype])
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(make_generation_config()))
    tokenizer().copy_to(folder)
    return folder


def write(export: Path, kind: GgufType | None = None) -> GgufFile:
    return write_export_gguf(export, export.with_suffix(".gguf"), {"general.name": "a model"}, SILENT, kind)


def stored(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(file).tensors}


def field(file: Path, key: str) -> Any:
    found = gguf.GGUFReader(file).get_field(key)
    return None if found is None else found.contents()


def expected(export: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors that the file must have, computed independently."""
    config = json.loads((export / "config.json").read_text())
    weights = {name: tensor.float().numpy() for name, tensor in load_file(export / "model.safetensors").items()}
    glm = config["model_type"] == "glm4_moe"
    after = {"post_attention_layernorm": "post_attention_norm" if glm else "ffn_norm"}
    found = {f"{WHOLE[name]}.weight": weights[f"{name}.weight"] for name in WHOLE if f"{name}.weight" in weights}
    for layer in range(config["num_hidden_layers"]):
        of_layer = f"model.layers.{layer}."
        for name, theirs in (LAYER | after).items():
            if (tensor := weights.get(f"{of_layer}{name}.weight")) is None:
                continue
            if config["model_type"] in ("llama", "smollm3") and name in ("self_attn.q_proj", "self_attn.k_proj"):
                d = config["head_dim"]
                # Row 2i of a head in the file is row i of the export, row 2i + 1 is row i + d/2.
                rows = [h * d + i // 2 + (i % 2) * (d // 2) for h in range(len(tensor) // d) for i in range(d)]
                tensor = tensor[rows]
            found[f"blk.{layer}.{theirs}.weight"] = tensor
        if f"{of_layer}mlp.experts.0.up_proj.weight" in weights:
            found[f"blk.{layer}.exp_probs_b.bias"] = weights[f"{of_layer}mlp.gate.e_score_correction_bias"]
            for word in ("gate", "up", "down"):
                each = [
                    weights[f"{of_layer}mlp.experts.{number}.{word}_proj.weight"]
                    for number in range(config["n_routed_experts"])
                ]
                found[f"blk.{layer}.ffn_{word}_exps.weight"] = np.stack(each)
    return found


@pytest.mark.parametrize("family", FIT)
def test_a_gguf_file_has_every_weight_and_key_of_the_export(tmp_path: Path, family: str) -> None:
    export = exported(tmp_path / "export", FIT[family][1])
    before = hash_export_folder(export)
    made = write(export)
    assert made.kind == GgufType.F32 and hash_export_folder(export) == before
    found, wanted = stored(made.file), expected(export)
    assert found.keys() == wanted.keys() and made.tensors == len(found)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    config = json.loads((export / "config.json").read_text())
    kind = made.architecture
    assert field(made.file, "general.architecture") == kind
    keys = {
        "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim", "rope.dimension_count": "head_dim",
        "rope.freq_base": "rope_theta", "vocab_size": "vocab_size", "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "first_k_dense_replace",
    }  # fmt: skip
    for theirs, ours in keys.items():
        assert field(made.file, f"{kind}.{theirs}") == config.get(ours), theirs
    assert field(made.file, f"{kind}.attention.layer_norm_rms_epsilon") == pytest.approx(config["rms_norm_eps"])


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # the architectures that transformers can read
@pytest.mark.parametrize("kind", [GgufType.F32, GgufType.F16])
def test_transformers_reads_the_same_ids_and_logits(tmp_path: Path, family: str, kind: GgufType) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    export = make_export(tmp_path / "export", 3, family)
    made = write(export, kind)
    # transformers ignores attention.key_length; Qwen3's head_dim would be the default, 128.
    config = AutoConfig.from_pretrained(export) if family == "qwen3" else None
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=made.file.name, dtype=torch.float32, **({"config": config} if config else {})
    )
    ours = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    tokens = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, wanted = theirs(tokens).logits, ours(tokens).logits
    assert float((logits - wanted).abs().max()) < (1e-6 if kind == GgufType.F32 else 5e-3) * float(wanted.abs().max())
    reading = AutoTokenizer.from_pretrained(tmp_path, gguf_file=made.file.name)
    of_export = AutoTokenizer.from_pretrained(export)
    for text in TEXTS:
        assert reading(text)["input_ids"] == of_export(text)["input_ids"]
        assert (
            reading(text, add_special_tokens=False)["input_ids"]
            == of_export(text, add_special_tokens=False)["input_ids"]
        )
    chat = [{"role": "user", "content": "What is a <|im_end|>?"}]
    rendered = reading.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert rendered == tokenizer().encode_chat_prompt([{"role": "user", "content": "What is a <| im_end|>?"}]).tolist()
    assert reading.chat_template == of_export.chat_template == tokenizer().chat_template
    assert (reading.bos_token, reading.eos_token, reading.pad_token) == ("<|endoftext|>", "<|im_end|>", "<|endoftext|>")


# The small models of each family that llama.cpp can compute, changed where it has a constant. For the others: the keys in the way.
SMOLLM3 = {"no_rope_layer_interval": 4}
SCALE = {"query_pre_attn_scalar": 16}
GEMMA3 = {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6, "num_hidden_layers": 6}
CONVERTED: dict[str, dict[str, Any] | set[str]] = {
    "llama-tied": {},
    "llama-scaled": {},
    "llama-linear": {},
    "llama-dynamic": {},
    "qwen2-windows": {"windows"},
    "qwen2-yarn": {},
    "qwen3-plain": {},
    "qwen3-windows": {"windows", "qkv_bias", "attention_out_bias"},
    "qwen3_moe-plain": {"mlp_only_layers": []},
    "qwen3_moe-windows": {"windows", "qkv_bias", "attention_out_bias", "experts.normalise"},
    "smollm3-plain": SMOLLM3,
    "smollm3-windows": {"windows", "nope_every", "qkv_bias", "attention_out_bias", "mlp_bias"},
    "olmo2-plain": {},
    "olmo2-tied": {"attention_bias": False, "rope_scaling": None},
    "mistral-windows": {"windows"},
    "mistral-tied": {},
    "gemma2-plain": SCALE,
    "gemma2-biases": {"attention_softcap", "qkv_bias", "attention_out_bias"},
    "gemma3_text-scaled": SCALE | GEMMA3,
    "gemma3_text-biases": {"windows", "qkv_bias", "attention_out_bias", "logit_softcap"},
    "glm4_moe-plain": {"n_group": 1, "topk_group": 1},
    "glm4_moe-tied": {},
    "glm4_moe-yarn": {"n_group": 1, "topk_group": 1},
    "deepseek_v3-plain": {"deepseek_v3"},
    "deepseek_v3-queries": {"deepseek_v3"},
    "olmo3-windows": {"olmo3"},
    "olmo3-tied": {"olmo3"},
    "exaone4-windows": {"exaone4"},
    "exaone4-tied": {"exaone4"},
    "seed_oss-plain": {"seed_oss"},
    "seed_oss-biases": {"seed_oss"},
    "mixtral-plain": {"mixtral"},
    "mixtral-windows": {"mixtral"},
    "olmoe-plain": {"olmoe"},
    "olmoe-tied": {"olmoe"},
    "nanochat-plain": {"nanochat"},
    "nanochat-biases": {"nanochat"},
    "phi3-windows": {"phi3"},
    "phi3-tied": {"phi3"},
    "gpt_oss-plain": {"gpt_oss"},
    "gpt_oss-tied": {"gpt_oss"},
}
# transformers reads no GGUF file of these architectures, and Mistral's as Llama's only with Llama's config
UNREAD = {"smollm3", "olmo2", "glm4_moe", "mistral"}
OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
AFTER = {
    "gemma2": OF_GEMMA,
    "gemma3_text": OF_GEMMA,
    "olmo2": OF_GEMMA,
    "glm4_moe": {"post_attention_layernorm": "post_attention_norm"},
}


def name_of(family: str, theirs: str) -> str:
    """llama.cpp's name of a tensor of the files, without the experts."""
    name, kind = theirs.rsplit(".", 1)
    if name.endswith("e_score_correction_bias") or kind == "e_score_correction_bias":
        return f"blk.{theirs.split('.')[2]}.exp_probs_b.bias"
    if name in WHOLE:
        return f"{WHOLE[name]}.{kind}"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{(LAYER | {'post_attention_layernorm': 'ffn_norm'} | AFTER.get(family, {}))[rest]}.{kind}"


def test_each_small_model_is_converted_or_refused() -> None:
    assert {str(case) for case in EXPORTED_CASES} == CONVERTED.keys()


@pytest.mark.parametrize("case", EXPORTED_CASES, ids=str)
def test_each_family_is_converted_as_llama_cpp_computes_it_or_refused(case: Case, tmp_path: Path) -> None:
    changes = CONVERTED[str(case)]
    keys = {**case.keys, "vocab_size": 512, **(changes if isinstance(changes, dict) else {})}
    model = replace(case, keys=keys).make_model()
    export = save_model(model, tmp_path / "export", 60_000)
    tokenizer().copy_to(export)
    if isinstance(changes, set):
        with pytest.raises(InputError) as error:
            write(export)
        if changes == {case.family}:
            assert error.value.code == "gguf.no_architecture" and error.value.data["model_type"] == case.family
        else:
            assert error.value.code == "gguf.cannot_hold"
            assert {one.data["key"] for one in error.value.data["obstacles"]} == changes
        return
    made = write(export)
    found, weights = stored(made.file), {}
    for file in export.glob("*.safetensors"):
        weights |= {name: tensor.float().numpy() for name, tensor in load_file(file).items()}
    wanted: dict[str, np.ndarray[Any, Any]] = {}
    experts: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    config = json.loads((export / "config.json").read_text())
    for theirs, tensor in weights.items():
        if ".experts." in theirs:
            _, _, layer, _, _, number, word, _ = theirs.split(".")
            stack = f"blk.{layer}.ffn_{word.removesuffix('_proj')}_exps.weight"
            experts.setdefault(stack, {})[int(number)] = tensor
            continue
        if case.family in ("llama", "mistral", "smollm3") and (".q_proj." in theirs or ".k_proj." in theirs):
            d = config["head_dim"]
            tensor = tensor[[h * d + i // 2 + (i % 2) * (d // 2) for h in range(len(tensor) // d) for i in range(d)]]
        if case.family.startswith("gemma") and "norm" in theirs:
            tensor = tensor + 1
        wanted[name_of(case.family, theirs)] = tensor
    wanted |= {name: np.stack([parts[number] for number in sorted(parts)]) for name, parts in experts.items()}
    if case.family == "olmo2" and config["tie_word_embeddings"]:
        wanted["output.weight"] = wanted["token_embd.weight"]
    if (rope := config["rope_parameters"]).get("rope_type") == "llama3":
        wave = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
        original = rope["original_max_position_embeddings"]
        smooth = (original / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        smooth = smooth.clip(0, 1)
        wanted["rope_freqs.weight"] = 1 / ((1 - smooth) / rope["factor"] + smooth)
        assert len(set(wanted["rope_freqs.weight"].round(4))) > 2
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6 if "rope" in name else 0, err_msg=name)
    kind = made.architecture
    if rope.get("rope_type") in ("linear", "yarn"):
        assert field(made.file, f"{kind}.rope.scaling.type") == rope["rope_type"]
        assert field(made.file, f"{kind}.rope.scaling.factor") == rope["factor"]
    if case.family.startswith("gemma"):
        assert field(made.file, f"{kind}.attention.sliding_window") == config["sliding_window"]
    if case.family == "glm4_moe":
        turning = config["head_dim"] * rope["partial_rotary_factor"]
        assert field(made.file, f"{kind}.rope.dimension_count") == turning
        assert field(made.file, f"{kind}.expert_weights_norm") is config["norm_topk_prob"]
        assert field(made.file, f"{kind}.expert_weights_scale") == config["routed_scaling_factor"]
    if case.family not in UNREAD:
        from transformers import AutoConfig, AutoModelForCausalLM

        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=made.file.name, dtype=torch.float32, config=AutoConfig.from_pretrained(export)
        )
        tokens = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            torch.testing.assert_close(theirs(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)


def test_weights_keep_the_exports_type_or_are_rounded_to_the_given_one(tmp_path: Path) -> None:
    export = exported(tmp_path / "export", FAMILIES["experts"][1], "bf16")
    wanted = expected(export)
    types = {}
    for kind in (None, *GgufType):
        made = write_export_gguf(export, tmp_path / f"{kind}.gguf", {}, SILENT, kind)
        types[kind] = {t.name: t.tensor_type.name for t in gguf.GGUFReader(made.file).tensors}
        for name, tensor in stored(made.file).items():
            error = np.abs(tensor - wanted[name]).max()
            if types[kind][name] == "Q8_0":  # half a step, plus the rounding of the scale to fp16
                assert error <= 0.51 * np.abs(wanted[name]).max() / 127
            elif types[kind][name] == "F16":
                assert error <= 2**-11 * np.abs(wanted[name]).max()
            else:
                assert error == 0, (kind, name)
    assert types[None] == types[GgufType.BF16]
    for found in types.values():
        assert {found[name] for name in found if "norm" in name or "probs" in name or "gate_inp" in name} == {"F32"}
    assert types[GgufType.BF16]["blk.1.ffn_up_exps.weight"] == "BF16"
    eighth = types[GgufType.Q8_0]
    assert eighth["blk.1.ffn_up_exps.weight"] == "Q8_0" and eighth["blk.1.ffn_down_exps.weight"] == "F16", "rows of 48"


def test_a_tokenizer_without_bos_and_a_padded_vocabulary_are_converted(tmp_path: Path) -> None:
    export = make_export(tmp_path / "export", vocab_size=520)
    path = export / "tokenizer.json"
    data = json.loads(path.read_text())
    known = len(data["model"]["vocab"])
    data["post_processor"] = None
    data["added_tokens"].append(data["added_tokens"][0] | {"id": known, "content": "<think>", "special": False})
    path.write_text(json.dumps(data))
    named = export / "tokenizer_config.json"
    named.write_text(json.dumps(json.loads(named.read_text()) | {"add_bos_token": False}))
    made = write(export)
    kinds, tokens = field(made.file, "tokenizer.ggml.token_type"), field(made.file, "tokenizer.ggml.tokens")
    assert kinds == [3] * 3 + [1] * (known - 3) + [4] + [5] * (520 - known - 1)
    assert len(tokens) == len(set(tokens)) == 520 and tokens[known] == "<think>"
    assert field(made.file, "tokenizer.ggml.add_bos_token") is False
    assert field(made.file, "tokenizer.ggml.pre") == "qwen2" and field(made.file, "tokenizer.ggml.model") == "gpt2"


def test_a_model_that_llama_cpp_would_read_differently_is_refused_without_a_file(tmp_path: Path) -> None:
    def is_refused(export: Path, code: str, kind: GgufType | None = None, **data: Any) -> None:
        with refused(code, InputError, **data):
            write(export, kind)
        assert [path for path in export.parent.iterdir() if "gguf" in path.name] == []

    nope = exported(tmp_path / "nope", FAMILIES["nope"][1])
    is_refused(nope, "gguf.cannot_hold", model_type="smollm3")
    other = make_export(tmp_path / "other")
    path = other / "tokenizer.json"
    data = json.loads(path.read_text())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}{1,3}|\S+|\s+"
    path.write_text(json.dumps(data))
    is_refused(other, "gguf.other_tokenizer", file=path)
    large = make_export(tmp_path / "large")
    weights = load_file(large / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = -70_000
    save_file(weights, large / "model.safetensors", {"format": "pt"})
    tensor = "model.layers.1.mlp.up_proj.weight"
    is_refused(large, "gguf.large_weight", GgufType.F16, tensor=tensor, weight=70_000.0, type="F16")
    write_export_gguf(large, tmp_path / "large.bf16.gguf", {}, SILENT, GgufType.BF16)


def test_the_command_writes_a_gguf_file_and_overwrites_no_file(
    workspace: Workspace, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_release(workspace, ledger, make_export(workspace.exports / "segment-00001"))
    row, out = ReleaseRow.get(ledger, 1), tmp_path / "new" / "release-1.gguf"
    out.parent.mkdir()
    (left := out.parent / ".release-1.gguf.0123456789ab.part").write_bytes(b"of one that was killed")
    words = ["releases", "gguf", "1", "--into", str(out), "-w", str(workspace.root), "--licence", "Apache-2.0"]
    said = CliRunner().invoke(app, [*words, "--type", "f16", "--json"], catch_exceptions=False)
    found = json.loads(said.stdout)
    assert found == {
        "release": 1, "file": str(out), "type": "f16", "architecture": "qwen3", "tensors": 24, "bytes": out.stat().st_size,
    }  # fmt: skip
    assert hash_export_folder(Path(row.export_path)) == row.export_sha256 and not left.exists()
    assert field(out, "factory.export_sha256") == row.export_sha256 and field(out, "factory.release") == 1
    assert field(out, "general.version") == "1" and field(out, "general.name") == "factory-lm release 1"
    assert field(out, "general.license") == "Apache-2.0"
    before = out.read_bytes()
    for change, code in (
        ([], "gguf.file_exists"),
        (["--into", str(Path(row.export_path) / "release.gguf")], "gguf.inside_export"),
        (["--into", str(Path(row.export_path) / "gguf" / "release.gguf")], "gguf.inside_export"),
        (["--into", str(tmp_path / "other"), "--license", " "], "gguf.bad_licence"),
        (["--into", str(tmp_path / "other"), "--license", "<b>"], "gguf.bad_licence"),
    ):
        with refused(code, InputError):
            CliRunner().invoke(app, [*words, *change], catch_exceptions=False)
    with monkeypatch.context() as patch, refused("gguf.no_package", InputError):
        patch.setitem(sys.modules, "gguf", None)
        write_release_gguf(ledger, 1, tmp_path / "other", SILENT)
    (Path(row.export_path) / "config.json").write_text("{}")
    with refused("checks.changed_export", InputError):
        write_release_gguf(ledger, 1, tmp_path / "other", SILENT)
    assert out.read_bytes() == before and list(tmp_path.glob("other*")) == []
    assert add_candidate(workspace, ledger) == 2
    with refused("rows.unknown_key", InputError, noun="release", key=2, known=["1"]):
        write_release_gguf(ledger, 2, tmp_path / "other", SILENT)


def test_layers_for_multi_token_prediction_are_left_out_of_a_gguf_file() -> None:
    """llama.cpp computes the model without them, and the file says that it has none (``nextn_predict_layers``)."""
    spec = recipe_with(**FAMILIES["experts"][1]).model.model_copy(update={"family": "glm4_moe"})
    more = spec.model_copy(update={"multi_token_layers": 1})
    assert len(list_file_shapes(more)) > len(list_file_shapes(spec))
    assert plan_gguf_tensors(more) == plan_gguf_tensors(spec)
