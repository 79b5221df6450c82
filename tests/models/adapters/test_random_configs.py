"""Random config.json files of every family: transformers' class computes the same logits, or the file is refused by key and value.

``python -m tests.models.adapters.test_random_configs 300 [FAMILY …]`` tries more of them and prints what it saw.
"""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from kernels.contract.registry import bind_ops
from models.adapters import FAMILIES, convert_to_native
from models.adapters.config_reader import ModelFilesError
from models.adapters.family import drop_training_keys
from tests.support.models.proof import list_file_tensors
from tests.support.models.small_models import randomise_weights
from trainer.model.transformer import Decoder

LAYERS, LENGTH, BOUND = 3, 24, 1e-4
FULL, WINDOW = "full_attention", "sliding_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "pad_token_id": None, "head_dim": 4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
SCALINGS: list[Any] = [
    None, {}, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, YARN, LLAMA3, {"rope_type": "default"},
    YARN | {"truncate": False}, YARN | {"attention_factor": 1.0}, YARN | {"beta_fast": 4.0, "beta_slow": 2.0},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}, {"rope_type": "default", "rope_theta": 3e3}, YARN | {"rope_theta": 2e3},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]},
    {FULL: {"rope_type": "default", "rope_theta": 2e3}, WINDOW: {"rope_type": "default", "rope_theta": 3e2}}, {FULL: YARN}, {WINDOW: YARN},
    {FULL: {"rope_type": "linear", "factor": 2.0}, WINDOW: {"rope_type": "linear", "factor": 2.0}},
]  # fmt: skip
ANY: dict[str, list[Any]] = {
    "num_key_value_heads": [1, 4, None], "head_dim": [8, None, 6], "tie_word_embeddings": [True, False, None], "rope_theta": [1e3, 5e5, None],
    "rope_scaling": SCALINGS, "rope_parameters": SCALINGS, "attention_bias": [True, False, None], "mlp_bias": [True, False, None],
    "sliding_window": [5, 24, None], "use_sliding_window": [True, False, None], "max_window_layers": [0, 1, 28],
    "layer_types": [None, [FULL] * LAYERS, [WINDOW] * LAYERS, [WINDOW, FULL, WINDOW], [FULL, WINDOW, FULL], [WINDOW, WINDOW, FULL],
                    [FULL, FULL, WINDOW]],
    "hidden_act": ["silu", "gelu", "gelu_pytorch_tanh", "relu2"], "partial_rotary_factor": [0.5, 1.0, None], "pretraining_tp": [1, 2],
    "rms_norm_eps": [1e-2, 1e-6], "clip_qkv": [None, 0.5], "hidden_size": [20, 24], "num_attention_heads": [2, 3],
    "sliding_window_pattern": [1, 2, 3, "LLG", None],
}  # fmt: skip
EXPERTS: dict[str, list[Any]] = {
    "num_experts_per_tok": [1, 2, 3], "norm_topk_prob": [True, False, None], "router_aux_loss_coef": [0.1],
    "output_router_logits": [True, False, None],
    "shared_expert_intermediate_size": [0, 8], "mlp_only_layers": [[], [0], [1], None], "decoder_sparse_step": [1, 2],
    "router_jitter_noise": [0.0, 0.1], "first_k_dense_replace": [0, 1, 2], "n_shared_experts": [1, 2, 0], "routed_scaling_factor": [1.0, 2.5],
}  # fmt: skip
GEMMA: dict[str, list[Any]] = {
    "attn_logit_softcapping": [None, 1.0], "final_logit_softcapping": [None, 2.0], "query_pre_attn_scalar": [4, 9],
    "hidden_activation": [None, "gelu"],
    "rope_local_base_freq": [1e2], "use_bidirectional_attention": [None, True], "hidden_act": ["gelu_pytorch_tanh", "silu"],
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 16}
DEEPSEEK = MIXTURE | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1,
                      "n_shared_experts": 1, "routed_scaling_factor": 1.5, "num_key_value_heads": 4}  # fmt: skip
del DEEPSEEK["num_experts"]
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-6,
}
# Of each family: keys that a file always has, and keys that it may have.
SAID: dict[str, dict[str, Any]] = {
    "qwen3_moe": MIXTURE,
    "glm4_moe": DEEPSEEK,
    "deepseek_v3": DEEPSEEK | LATENT,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
}
ALSO: dict[str, dict[str, list[Any]]] = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS | {"use_qk_norm": [True, False]},
    "deepseek_v3": EXPERTS | {"rope_interleave": [True, False], "q_lora_rank": [None]},
    "mixtral": EXPERTS,
    "olmoe": EXPERTS,
    "smollm3": {"no_rope_layer_interval": [2, 3, 4], "no_rope_layers": [None, [1, 0, 1], [0, 0, 0], [1, 1, 1]]},
    "seed_oss": {"attention_out_bias": [True, False, None]},
    "nanochat": {"final_logit_softcapping": [None, 2.0], "hidden_act": ["relu2", "silu", None]},
    "phi3": {"original_max_position_embeddings": [8, None], "partial_rotary_factor": [0.5, 0.75, 1.0]},
    "gpt_oss": EXPERTS | {"swiglu_limit": [1.0, 0.2, None], "swiglu_alpha": [1.0, None], "experts_per_token": [2, 3]},
}


def draw_config(family: str, seed: int) -> dict[str, Any]:
    """A random config.json: the sizes, and some of the other keys."""
    random_ = random.Random(f"{family}/{seed}")
    keys = SIZES | SAID.get(family, {})
    pool = ANY | ALSO.get(family, {})
    for key in random_.sample(sorted(pool), random_.choice([0, 1, 1, 2, 2, 3, 4])):
        keys[key] = random_.choice(pool[key])
    for key in random_.sample(
        ["num_key_value_heads", "head_dim", "max_position_embeddings"], random_.choice([0, 0, 0, 1])
    ):
        keys.pop(key, None)
    return copy.deepcopy({"model_type": family} | keys)  # transformers writes into the mappings that it gets


def compare(family: str, seed: int) -> tuple[str, float]:
    """(what became of a random file, the largest difference of logits)."""
    import transformers

    keys, adapter = draw_config(family, seed), FAMILIES[family]
    try:
        spec = adapter.read_config(keys, "config.json")
    except ModelFilesError as error:
        # heads that do not divide, or a width that experts cannot have: the description names its own keys
        assert error.data.get("key") or error.code == "strict.wrong_value", (error.code, error.data)
        return "refused", 0.0
    try:
        given = {key: value for key, value in draw_config(family, seed).items() if key != "model_type"}
        config = transformers.AutoConfig.for_model(family, **given)
        config._attn_implementation = "eager"
        theirs = randomise_weights(getattr(transformers, adapter.class_name)(config), seed)
        tokens_BT = torch.randint(0, SIZES["vocab_size"], (2, LENGTH), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = theirs(tokens_BT, use_cache=False).logits
    except Exception as error:  # noqa: BLE001 - whatever a class of transformers raises at a value that it does not take
        return f"transformers: {type(error).__name__}", 0.0
    files = list_file_tensors(theirs, theirs.state_dict())
    ours = Decoder(spec, bind_ops({}), torch.float32)
    ours.load_state_dict(dict(convert_to_native(spec, adapter, files.__getitem__)))
    saved = adapter.read_config(json.loads(config.to_json_string()), "as transformers writes it")
    assert drop_training_keys(saved) == drop_training_keys(spec)
    with torch.no_grad():
        found = ours.logits(tokens_BT, torch.arange(LENGTH).expand_as(tokens_BT), torch.zeros_like(tokens_BT).int())
    return "equal", float((found - expected).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_config_is_computed_as_transformers_computes_it_or_refused(family: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(24):
        outcome, difference = compare(family, seed)
        assert difference <= BOUND, draw_config(family, seed)
        seen[outcome] += 1
    assert seen["equal"] >= 3 and seen["refused"] >= 3, seen


def main(arguments: list[str]) -> None:
    count, *families = arguments
    for family in families or FAMILIES:
        seen: Counter[str] = Counter()
        worst = 0.0
        for seed in range(int(count)):
            try:
                outcome, difference = compare(family, seed)
            except Exception as error:  # noqa: BLE001 - the report goes on
                outcome, difference = "failed", 0.0
                print(family, seed, type(error).__name__, str(error)[:300], draw_config(family, seed))
            if difference > BOUND:
                print(family, seed, difference, draw_config(family, seed))
            seen[outcome] += 1
            worst = max(worst, difference)
        print(family, dict(seen), f"worst {worst:.1e}", flush=True)


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    main(sys.argv[1:])
