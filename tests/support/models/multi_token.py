"""Layers for multi-token prediction beside a small model of transformers, from the equations of DeepSeek-V3 (arXiv 2412.19437 §2.2).

A module has its parameters under the names of published files. Its block is transformers' layer. The equations are written for one document at a
time, with every position named, so that nothing can leak from another document. No code of the trainer is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.models.files import split_experts

FILE = "model-multi-token.safetensors"


class PublishedLayer(nn.Module):
    """One layer: M_k, its norms, TRM_k and the norm of the shared head."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        layer = model.model.layers[-1]
        norm = type(layer.input_layernorm)
        width, eps = model.config.hidden_size, model.config.rms_norm_eps
        self.enorm, self.hnorm = norm(width, eps=eps), norm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = type(layer)(model.config, number)
        self.shared_head = nn.Module()
        self.shared_head.norm = norm(width, eps=eps)


class PublishedLayers(nn.Module):
    """All layers for multi-token prediction of a model, with random weights."""

    def __init__(self, model: Any, count: int, seed: int = 7) -> None:
        super().__init__()
        self.first = model.config.num_hidden_layers
        self.layers = nn.ModuleList([PublishedLayer(model, self.first + depth) for depth in range(count)])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
                values = torch.randn(tensor.shape, generator=generator)
                one = float("norm" in name)
                tensor.copy_(one + values * (0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5))
        self.eval()

    def list_tensors(self, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The tensors by their names in published files, without the copies. ``tensors``: others in their place, such as gradients."""
        found = {}
        for name, tensor in split_experts(self.state_dict() if tensors is None else tensors).items():
            _, depth, key = name.split(".", 2)
            found[f"model.layers.{self.first + int(depth)}.{key.removeprefix('block.')}"] = tensor
        return found

    def save(self, model: Any, folder: Path, copies: bool = True) -> None:
        """Add the layers to a folder that transformers wrote, as one more shard, with their copies of embedding and head."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.list_tensors().items()}
        for depth in range(len(self.layers) if copies else 0):
            prefix = f"model.layers.{self.first + depth}."
            tensors[f"{prefix}embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
            tensors[f"{prefix}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
        index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if whole.exists():
            save_file(load_file(whole) | tensors, whole, {"format": "pt"})
            return
        save_file(tensors, folder / FILE, {"format": "pt"})
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(tensors, FILE)
        index.write_text(json.dumps(content))

    def compute_logits(self, model: Any, document: Tensor) -> list[Tensor]:
        """Of each layer k = 1, 2 …, the logits [T - k, V] of the token after t_{i+k}, for i = 1 … T - k. ``document``: t_1 … t_T, int64.

        Equations 21 to 23. The model's representation, and what a layer hands on, are after their norm; published matrices M_k have the token first.
        """
        T = len(document)
        h_TD = model.model(document[None], use_cache=False).last_hidden_state[0]
        logits = []
        for k, layer in enumerate(self.layers, start=1):
            if k >= T:
                break
            emb_TD = model.model.embed_tokens(document[k:])
            h_TD = layer.eh_proj(torch.cat([layer.enorm(emb_TD), layer.hnorm(h_TD[: T - k])], dim=-1))
            positions = torch.arange(T - k)[None]
            mask = torch.full((T - k, T - k), float("-inf")).triu(1)[None, None]
            h_TD = layer.block(
                h_TD[None],
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=model.model.rotary_emb(h_TD[None], positions),
            )[0]
            h_TD = layer.shared_head.norm(h_TD)
            logits.append(model.lm_head(h_TD))
        return logits

    def compute_losses(self, model: Any, documents: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Of each layer, Σ over the documents of -log P_k(t_i), over the tokens t_i (i from k + 2 on) that carry loss. ``documents``: (tokens, bool:
        which of them carry loss). Equation 24 without its 1 / T."""
        sums = [torch.zeros(()) for _ in self.layers]
        for tokens, carries in documents:
            for k, logits in enumerate(self.compute_logits(model, tokens), start=1):
                nll = F.cross_entropy(logits[:-1], tokens[k + 1 :], reduction="none")
                sums[k - 1] = sums[k - 1] + nll[carries[k + 1 :]].sum()
        return sums
