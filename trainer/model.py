"""The decoder: RoPE, grouped-query attention with QK-norm, SwiGLU, RMSNorm before each sub-layer, tied embeddings.

Exactly the maths of ``Qwen3ForCausalLM``. Attention stays within a document and positions restart in each. The heavy
parts are ``ops`` from the kernel registry; weights are fp32 and cast to ``dtype`` where they are used.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.registry import Ops
from trainer.recipe import ModelRecipe


class Block(nn.Module):
    """One layer. x_BTD in, x_BTD out, both in ``dtype``."""

    def __init__(self, shape: ModelRecipe, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.ops, self.dtype = shape, ops, dtype
        D, K, F_ = shape.d_model, shape.head_dim, shape.d_ff
        self.attention_norm = nn.Parameter(torch.empty(D))
        self.qkv = nn.Parameter(torch.empty((shape.heads + 2 * shape.kv_heads) * K, D))
        self.q_norm = nn.Parameter(torch.empty(K))
        self.k_norm = nn.Parameter(torch.empty(K))
        self.attention_out = nn.Parameter(torch.empty(D, shape.heads * K))
        self.mlp_norm = nn.Parameter(torch.empty(D))
        self.gate_up = nn.Parameter(torch.empty(2 * F_, D))
        self.down = nn.Parameter(torch.empty(D, F_))

    def forward(self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, documents_BT: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attend(x_BTD, cos_BTK, sin_BTK, documents_BT)
        return x_BTD + self.transform(x_BTD)

    def attend(self, x_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, documents_BT: Tensor) -> Tensor:
        shape, ops, dtype = self.shape, self.ops, self.dtype
        B, T, _ = x_BTD.shape
        h_BTD = ops.rms_norm(x_BTD, self.attention_norm.to(dtype), shape.norm_eps)
        qkv = F.linear(h_BTD, self.qkv.to(dtype)).view(B, T, -1, shape.head_dim)
        q_BTHK, k_BTGK, v_BTGK = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
        q_BTHK = ops.qk_norm_rope(q_BTHK, self.q_norm.to(dtype), cos_BTK, sin_BTK, shape.norm_eps)
        k_BTGK = ops.qk_norm_rope(k_BTGK, self.k_norm.to(dtype), cos_BTK, sin_BTK, shape.norm_eps)
        o_BTHK = ops.attention(q_BTHK, k_BTGK, v_BTGK, documents_BT)
        return F.linear(o_BTHK.reshape(B, T, -1), self.attention_out.to(dtype))

    def transform(self, x_BTD: Tensor) -> Tensor:
        dtype = self.dtype
        h_BTD = self.ops.rms_norm(x_BTD, self.mlp_norm.to(dtype), self.shape.norm_eps)
        gate_BTF, up_BTF = F.linear(h_BTD, self.gate_up.to(dtype)).chunk(2, dim=-1)
        return F.linear(self.ops.swiglu(gate_BTF, up_BTF), self.down.to(dtype))


class Decoder(nn.Module):
    """tokens, positions, documents [B, T] → hidden states; ``loss`` goes on to the loss through the tied embedding."""

    def __init__(self, shape: ModelRecipe, ops: Ops, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape, self.ops, self.dtype = shape, ops, dtype
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model))
        self.blocks = nn.ModuleList(Block(shape, ops, dtype) for _ in range(shape.layers))
        self.final_norm = nn.Parameter(torch.empty(shape.d_model))

    def initialise(self, seed: int) -> None:
        """Normal with std 1/sqrt(fan-in), 1/sqrt(2 layers) of it for what writes to the residual stream (GPT-2 §2.3).

        Embeddings 0.02, norms one. Drawn on the CPU, parameter by parameter, so that a seed gives one model everywhere.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
                continue
            std = 0.02 if name == "embedding" else parameter.shape[1] ** -0.5
            if name.endswith(("attention_out", "down")):
                std /= math.sqrt(2 * self.shape.layers)
            drawn = torch.randn(parameter.shape, generator=generator) * std
            with torch.no_grad():
                parameter.copy_(drawn)

    def compile(self) -> None:  # type: ignore[override]
        """Compile the blocks; one graph serves all. How the loss head runs is the kernel policy's choice."""
        for block in self.blocks:
            block.compile(dynamic=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """Hidden states [B, T, D] before the final norm, in ``dtype``."""
        x_BTD = F.embedding(tokens_BT, self.embedding).to(self.dtype)
        cos_BTK, sin_BTK = rope_tables(positions_BT, self.shape.head_dim, self.shape.rope_theta, self.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_BTK, sin_BTK, documents_BT)
        return x_BTD

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        """(Σ weights · (nll + z_loss · logsumexp²): fp32 scalar, nll_BT: fp32, detached)."""
        x_BTD = self(tokens_BT, positions_BT, documents_BT)
        loss, nll_N = self._head(x_BTD.flatten(0, 1), targets_BT.flatten(), weights_BT.flatten(), z_loss)
        return loss, nll_N.view_as(targets_BT)

    def _head(self, x_ND: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        h_ND = self.ops.rms_norm(x_ND, self.final_norm.to(self.dtype), self.shape.norm_eps)
        return self.ops.linear_cross_entropy(h_ND, self.embedding.to(self.dtype), targets_N, weights_N, z_loss)

    def logits(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """[B, T, V], for tests and export parity; training never makes them whole."""
        h_BTD = self.ops.rms_norm(
            self(tokens_BT, positions_BT, documents_BT), self.final_norm.to(self.dtype), self.shape.norm_eps
        )
        return F.linear(h_BTD, self.embedding.to(self.dtype))


def rope_tables(positions_BT: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, K] in ``dtype``, worked out in fp32; the two halves of K are equal (arXiv 2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BT.device).float() / head_dim
    angles = positions_BT.float().unsqueeze(-1) * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
