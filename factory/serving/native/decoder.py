"""The decoders of ``export_config`` with a cache of keys and values, in fp32, on a CPU or a GPU.

The maths is the judge's (``factory.evals.reference_model``), written a second time: that one is what this one is held to, when a release is
swapped in and in the tests. A row's cache column is its position, so rows of any length share a batch without padding.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from factory.evals.export_config import ExpertsConfig, ExportConfig
from factory.evals.export_folder import read_config, read_weights


class CachedDecoder:
    """An export, loaded onto ``device``."""

    def __init__(self, config: ExportConfig, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        self.config, self.device = config, device
        self.weights = {name: weight.to(device) for name, weight in weights.items()}
        self.head_VD = self.weights["model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"]
        even_K2 = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        self.frequencies_K2 = (config.rope_theta ** (-even_K2 / config.head_dim)).to(device)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> CachedDecoder:
        """Raises: ExportError for anything but a sound export of a known architecture."""
        config = read_config(folder)
        return cls(config, read_weights(folder, config), device)

    def new_cache(self, rows: int, columns: int) -> torch.Tensor:
        """[layers, 2, rows, G, columns, K], zeros: stale columns are masked, and a masked NaN would still spoil its row."""
        c = self.config
        return torch.zeros(c.layers, 2, rows, c.kv_heads, columns, c.head_dim, device=self.device)

    @property
    def bytes_a_token(self) -> int:
        """Of the cache."""
        return 4 * self.config.layers * 2 * self.config.kv_heads * self.config.head_dim

    @torch.inference_mode()
    def logits(self, tokens_BT: torch.Tensor, start_B: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the last column of int64 tokens [B, T], which stand at columns ``start_B`` … of the rows of ``cache``
        [layers, 2, B, G, S, K]. Their keys and values are written there; all columns before them must have been."""
        column_BT = start_B[:, None] + torch.arange(tokens_BT.shape[1], device=self.device)
        seen = int(column_BT.max()) + 1
        mask_B1TS = (torch.arange(seen, device=self.device) <= column_BT[..., None])[:, None]
        angle_BTK = (column_BT[..., None].float() * self.frequencies_K2).repeat(1, 1, 2)
        turn = angle_BTK.cos()[:, None], angle_BTK.sin()[:, None]
        x_BTD = F.embedding(tokens_BT, self.weights["model.embed_tokens.weight"])
        for layer in range(self.config.layers):
            block = f"model.layers.{layer}"
            y_BTD = self._norm(x_BTD, f"{block}.input_layernorm")
            x_BTD = x_BTD + self._attention(y_BTD, layer, turn, mask_B1TS, column_BT, cache[layer])
            y_BTD = self._norm(x_BTD, f"{block}.post_attention_layernorm")
            experts = self.config.experts_at(layer)
            mlp = f"{block}.mlp"
            x_BTD = x_BTD + (self._swiglu(y_BTD, mlp) if experts is None else self._mixture(y_BTD, mlp, experts))
        return self._norm(x_BTD[:, -1], "model.norm") @ self.head_VD.T

    def _attention(
        self,
        x_BTD: torch.Tensor,
        layer: int,
        turn: tuple[torch.Tensor, torch.Tensor],
        mask_B1TS: torch.Tensor,
        column_BT: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        rows, length, _ = x_BTD.shape

        def heads(part: str, count: int) -> torch.Tensor:
            y = F.linear(x_BTD, self.weights[f"{name}.{part}_proj.weight"])
            return y.view(rows, length, count, config.head_dim).transpose(1, 2)

        q, k, v = heads("q", config.heads), heads("k", config.kv_heads), heads("v", config.kv_heads)
        if config.qk_norm:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        if config.rope_layers[layer]:
            q, k = _rotate(q, *turn), _rotate(k, *turn)
        row_B1 = torch.arange(rows, device=self.device)[:, None]
        cache[0][row_B1, :, column_BT] = k.transpose(1, 2)
        cache[1][row_B1, :, column_BT] = v.transpose(1, 2)
        seen = mask_B1TS.shape[-1]
        keys, values = cache[0, :, :, :seen], cache[1, :, :, :seen]
        o = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask_B1TS, enable_gqa=True)
        return F.linear(o.transpose(1, 2).flatten(2), self.weights[f"{name}.o_proj.weight"])

    def _swiglu(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def _mixture(self, x_BTD: torch.Tensor, name: str, experts: ExpertsConfig) -> torch.Tensor:
        """Each token to ``per_token`` experts, chosen by biased sigmoids and weighted by the plain ones (arXiv:2412.19437, §2.1.2)."""
        x_ND = x_BTD.flatten(0, 1)
        affinity_NE = F.linear(x_ND, self.weights[f"{name}.gate.weight"]).sigmoid()
        chosen_NP = (affinity_NE + self.weights[f"{name}.gate.e_score_correction_bias"]).topk(experts.per_token).indices
        weight_NP = affinity_NE.gather(1, chosen_NP)
        weight_NP = weight_NP / (weight_NP.sum(1, keepdim=True) + 1e-20)
        y_ND = self._swiglu(x_ND, f"{name}.shared_experts")
        for expert in chosen_NP.unique().tolist():
            token_M, place_M = (chosen_NP == expert).nonzero(as_tuple=True)
            out_MD = self._swiglu(x_ND[token_M], f"{name}.experts.{expert}")
            y_ND[token_M] += weight_NP[token_M, place_M, None] * out_MD
        return y_ND.view_as(x_BTD)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps)
        return x * scale * self.weights[f"{name}.weight"]


def _rotate(x_BHTK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_BHTK.chunk(2, -1)
    return x_BHTK * cos + torch.cat((-second, first), -1) * sin
