"""The decoder: grouped-query attention with RoPE, SwiGLU or experts, RMSNorm before each sub-layer, tied embeddings.

Attention stays within a document, and positions restart in each document, unless the recipe sets ``across_documents``. The expensive
operations are ``ops`` of the kernel registry. Weights are fp32 and are cast to ``dtype`` where they are used. If *tensor* ranks split a row,
each of them has S of its T positions.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from kernels.contract.registry import Ops
from kernels.qk_norm_rope import apply_rope
from models.spec import ModelSpec
from trainer.contract.checkpoint.region import Region
from trainer.model import fp8
from trainer.parallel.ranks import get_local_part
from trainer.parallel.tensor_ranks import TensorRanks

SPLIT_BY_ROWS = ("q", "k", "v", "gate", "up", "shared_gate", "shared_up")  # their outputs are heads or hidden units
SPLIT_BY_COLUMNS = ("attention_out", "down", "shared_down")
DRAWING = 8  # threads that draw weights, each with one parameter in memory
WRITE_TO_RESIDUAL = ("attention_out", "down", "shared_down", "experts_down")


class Block(nn.Module):
    """One layer: x_BSD → (x_BSD, extras). ``extras`` of an expert layer: [1 + E], the router's Σ z² and the number of tokens at each expert;
    None for a dense layer."""

    def __init__(self, shape: ModelSpec, layer: int, ops: Ops, dtype: torch.dtype, tensor: TensorRanks) -> None:
        super().__init__()
        self.shape, self.ops, self.dtype, self.tensor = shape, ops, dtype, tensor
        self.has_rope = shape.nope_every is None or (layer + 1) % shape.nope_every != 0
        self.recompute = self.joined = self.fp8 = False
        self.multiply: Callable[[Tensor, Tensor], Tensor] = (
            F.linear
        )  # called by name: a profile has each product's own line
        D, K = shape.d_model, shape.head_dim
        empty = lambda *size: nn.Parameter(torch.empty(*size))
        self.attention_norm = empty(D)
        self.q = empty(shape.heads * K, D)
        self.k = empty(shape.kv_heads * K, D)
        self.v = empty(shape.kv_heads * K, D)
        if shape.qk_norm:
            self.q_norm = empty(K)
            self.k_norm = empty(K)
        self.attention_out = empty(D, shape.heads * K)
        self.mlp_norm = empty(D)
        experts = self.experts = shape.experts if shape.is_expert_layer(layer) else None
        if experts is None:
            self.gate = empty(shape.d_ff, D)
            self.up = empty(shape.d_ff, D)
            self.down = empty(D, shape.d_ff)
            return
        from trainer.model import experts as mixture  # it imports torch's compiler, which takes a second

        self.mixture = mixture
        self.router = empty(experts.count, D)
        self.experts_gate = empty(experts.count, experts.d_ff, D)
        self.experts_up = empty(experts.count, experts.d_ff, D)
        self.experts_down = empty(experts.count, D, experts.d_ff)
        self.router_bias: Tensor
        self.register_buffer("router_bias", torch.zeros(experts.count))
        if experts.shared:
            self.shared_gate = empty(experts.shared * experts.d_ff, D)
            self.shared_up = empty(experts.shared * experts.d_ff, D)
            self.shared_down = empty(D, experts.shared * experts.d_ff)

    def forward(
        self, x_BSD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, documents_BT: Tensor, prepared_documents: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        """``prepared_documents``: the documents as prepared for attention (``Ops.prepare_attention``); None: the op prepares them itself."""
        prepared_documents = documents_BT if prepared_documents is None else prepared_documents
        if self.recompute and torch.is_grad_enabled():
            return recompute(self.run, x_BSD, cos_BTK, sin_BTK, documents_BT, prepared_documents, use_reentrant=False)  # type: ignore[no-any-return]
        return self.run(x_BSD, cos_BTK, sin_BTK, documents_BT, prepared_documents)

    def run(
        self, x_BSD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, documents_BT: Tensor, prepared_documents: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The computation of the layer. ``Decoder.compile`` compiles this method and not ``forward``, which FSDP's hooks surround."""
        tensor, eps = self.tensor, self.shape.norm_eps
        h_BTD = tensor.gather(self.ops.rms_norm(x_BSD, self.weight(self.attention_norm), eps))
        y_BSD = tensor.scatter(self.attend(h_BTD, cos_BTK, sin_BTK, prepared_documents))
        x_BSD, h_BSD = self.ops.add_rms_norm(x_BSD, y_BSD, self.weight(self.mlp_norm), eps)
        h_BTD = tensor.gather(h_BSD)
        if self.experts is None:
            return x_BSD + tensor.scatter(self.apply_mlp(h_BTD, self.gate, self.up, self.down)), None
        y_BTD, extras = self.apply_experts(h_BTD, documents_BT)
        return x_BSD + tensor.scatter(y_BTD), extras

    def attend(self, h_BTD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, prepared_documents: Any) -> Tensor:
        shape, weight = self.shape, self.weight
        B, T, _ = h_BTD.shape
        q_BTHK, k_BTGK, v_BTGK = (
            x_BTX.view(B, T, -1, shape.head_dim) for x_BTX in self._products(h_BTD, (self.q, self.k, self.v))
        )
        if shape.qk_norm:
            q_BTHK = self.ops.qk_norm_rope(q_BTHK, weight(self.q_norm), cos_BTK, sin_BTK, shape.norm_eps)
            k_BTGK = self.ops.qk_norm_rope(k_BTGK, weight(self.k_norm), cos_BTK, sin_BTK, shape.norm_eps)
        elif self.has_rope:
            q_BTHK, k_BTGK = apply_rope(q_BTHK, cos_BTK, sin_BTK), apply_rope(k_BTGK, cos_BTK, sin_BTK)
        o_BTHK = self.ops.attention(q_BTHK, k_BTGK, v_BTGK, prepared_documents)
        return self.multiply(o_BTHK.reshape(B, T, -1), weight(self.attention_out))

    def apply_mlp(self, h_BTD: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate_BTF, up_BTF = self._products(h_BTD, (gate, up))
        return self.multiply(self.ops.swiglu(gate_BTF, up_BTF), self.weight(down))

    def apply_experts(self, h_BTD: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
        assert self.experts is not None
        weight = self.weight
        h_ND, holds_N = h_BTD.flatten(0, 1), documents_BT.flatten() >= 0
        routing = self.mixture.route_tokens(h_ND, weight(self.router), self.router_bias, self.experts.per_token)
        gate, up, down = (weight(m).transpose(1, 2) for m in (self.experts_gate, self.experts_up, self.experts_down))
        y_BTD = self.mixture.compute_expert_outputs(h_ND, routing, gate, up, down, self.ops).view_as(h_BTD)
        if self.experts.shared:
            y_BTD = y_BTD + self.apply_mlp(h_BTD, self.shared_gate, self.shared_up, self.shared_down)
        # every tensor rank routes every token; the division makes the sum over ranks count each token once
        return y_BTD, torch.cat(
            (routing.z_loss(holds_N)[None], routing.count_tokens_per_expert(holds_N))
        ) / self.tensor.size

    def _products(self, h_BTD: Tensor, matrices: Sequence[Tensor]) -> Sequence[Tensor]:
        """h matrixᵀ for each of the matrices. With ``join_matrices`` it is one product with the joined matrices."""
        weights = [self.weight(matrix) for matrix in matrices]
        if self.joined:
            joined_BTX = self.multiply(h_BTD, torch.cat(weights))
            return joined_BTX.split([len(weight) for weight in weights], dim=-1)
        return (
            fp8.apply_several_fp8_linears(h_BTD, weights)
            if self.fp8
            else [F.linear(h_BTD, weight) for weight in weights]
        )

    def weight(self, parameter: Tensor) -> Tensor:
        """This rank's part of a parameter, in the dtype of the layer's products."""
        return self.tensor.weight(parameter).to(self.dtype)


class Decoder(nn.Module):
    """The model: tokens, positions, documents [B, T] → hidden states. ``loss`` and ``logits`` apply the head, which is the tied embedding."""

    def __init__(
        self,
        shape: ModelSpec,
        ops: Ops,
        dtype: torch.dtype = torch.float32,
        tensor: TensorRanks | None = None,
        embedding_grad_share: float = 1.0,
    ) -> None:
        super().__init__()
        self.shape, self.ops, self.dtype = shape, ops, dtype
        self.tensor = tensor or TensorRanks()
        self.embedding_grad_share = embedding_grad_share
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model))
        self.blocks = nn.ModuleList(Block(shape, layer, ops, dtype, self.tensor) for layer in range(shape.layers))
        self.final_norm = nn.Parameter(torch.empty(shape.d_model))

    @staticmethod
    def find_split_dimension(name: str) -> int | None:
        """The dimension along which *tensor* ranks split a parameter; None: each rank has all of it."""
        key = name.rpartition(".")[2]
        if key in SPLIT_BY_ROWS:
            return 0
        if key in (*SPLIT_BY_COLUMNS, "experts_gate", "experts_up"):
            return 1
        return 2 if key == "experts_down" else None

    def initialise(self, seed: int) -> None:
        """Draw the weights: normal with std 1/sqrt(fan-in), times 1/sqrt(2 layers) for matrices that write to the residual stream (GPT-2 §2.3).

        The embedding has std 0.02. Norms are one. Each rank draws each whole parameter on the CPU, from the seed and the parameter's name, and
        keeps its region. Therefore a seed gives the same model for any number of ranks. A core draws 0.1 G values a second, so several threads
        draw.
        """

        def draw(named: tuple[str, nn.Parameter]) -> None:
            name, parameter = named
            with torch.no_grad():
                get_local_part(parameter).copy_(
                    Region.from_tensor(parameter).view_in_whole_tensor(self._drawn(name, parameter.shape, seed))
                )

        with ThreadPoolExecutor(min(DRAWING, os.cpu_count() or 1)) as threads:
            list(threads.map(draw, self.named_parameters()))
        for name, buffer in self.named_buffers():
            assert name.endswith("router_bias"), name
            buffer.zero_()

    def _drawn(self, name: str, size: torch.Size, seed: int) -> Tensor:
        if len(size) == 1:
            return torch.ones(size)
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        std = 0.02 if name == "embedding" else size[-1] ** -0.5
        if name.endswith(WRITE_TO_RESIDUAL):
            std /= math.sqrt(2 * self.shape.layers)
        return torch.randn(size, generator=generator) * std

    def compile(self, batch_sizes: int = 1) -> None:  # type: ignore[override]
        """Compile the blocks. Blocks of one kind share a graph. The loss head is not compiled here: ``kernels.yaml`` decides how it runs.

        ``batch_sizes``: the number of different batch sizes of the run. By default torch compiles eight graphs and then runs uncompiled code,
        which rounds differently. Therefore the limit is raised.
        """
        kinds = len({(block.has_rope, block.experts is None) for block in self.blocks})
        pieces = (
            8 if self.shape.experts is not None else 1
        )  # number of graphs into which the compiler splits a layer of experts
        # with and without gradients, with two and four times the stretches, and a margin
        limit = 8 * kinds * pieces * batch_sizes
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
        accumulated = torch._dynamo.config.accumulated_recompile_limit
        torch._dynamo.config.accumulated_recompile_limit = max(accumulated, 8 * limit)
        for block in self.blocks:
            block.run = torch.compile(block.run, dynamic=False)  # type: ignore[assignment,arg-type]

    def join_matrices(self) -> None:
        """Multiply with q, k, v as one joined matrix, and with gate and up as another. Only for one rank, because FSDP would free the joined copies.
        Only for a CPU: a GPU's products are large enough, and the parts of a joined product are strided. Copying these parts took 8 % of the
        kernels' time on an H200 for a model of 1 B weights."""
        for block in self.blocks:
            block.joined = True  # type: ignore[assignment]

    def use_fp8(self) -> None:
        """Compute the products of attention, dense MLPs and shared experts in fp8. Routers, routed experts and the head stay in bf16."""
        for block in self.blocks:
            block.fp8, block.multiply = True, fp8.apply_fp8_linear  # type: ignore[assignment]

    def use_recomputation(self) -> None:
        """Use activation checkpointing: keep only each block's input, and compute the block again in the backward pass."""
        for block in self.blocks:
            block.recompute = True  # type: ignore[assignment]

    def forward(
        self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor, stretches: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """(hidden states [B, S, D] before the final norm, in ``dtype``; the extras of the expert layers).

        ``stretches``: an upper bound of the number of stretches (runs of one document) in all rows (``Batch.micro_batches``). With 0 attention
        counts them if it needs them, which waits for the device.
        """
        if self.shape.across_documents:  # one text, whose positions continue, as when the model is served
            documents_BT = documents_BT.clamp(max=0)
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        embedding = self.tensor.weight(self.embedding)
        x_BSD = self.ops.embedding(self.tensor.take_own_positions(tokens_BT), embedding).to(self.dtype)
        if self.embedding_grad_share != 1:  # GLM-130B, arXiv 2210.02414 §3.3
            x_BSD = x_BSD.detach() + (x_BSD - x_BSD.detach()) * self.embedding_grad_share  # adds zero, in any dtype
        cos_BTK, sin_BTK = make_rope_tables(positions_BT, self.shape, self.dtype)
        prepared_documents = self.ops.prepare_attention(documents_BT, stretches)
        every_extras = []
        for block in self.blocks:
            x_BSD, extras = block(x_BSD, cos_BTK, sin_BTK, documents_BT, prepared_documents)
            if extras is not None:
                every_extras.append(extras)
        return x_BSD, every_extras

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor,
        z_loss: float,
        router_z_share: float = 0.0,
        stretches: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss, nll_BS, load [expert layers, E] or None).

        loss: Σ weights · (nll + z_loss · logsumexp²) + router_z_share · Σ router z², an fp32 scalar. nll_BS: fp32, detached, for this
        rank's positions (``tensor.part``). load: the number of tokens at each expert.
        """
        x_BSD, extras = self(tokens_BT, positions_BT, documents_BT, stretches)
        targets_BS, weights_BS = self.tensor.take_own_positions(targets_BT), self.tensor.take_own_positions(weights_BT)
        loss, nll_N = self.ops.linear_cross_entropy(
            self._head_input(x_BSD).flatten(0, 1),
            self.tensor.weight(self.embedding).to(self.dtype),
            targets_BS.flatten(),
            weights_BS.flatten(),
            z_loss,
        )
        nll_BS = nll_N.view(targets_BS.shape)
        if not extras:
            return loss, nll_BS, None
        every = torch.stack(extras)
        return loss + router_z_share * every[:, 0].sum(), nll_BS, every[:, 1:].detach()

    def logits(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """The logits [B, S, V], for tests and for comparing an export. Training never has all of them in memory."""
        x_BSD, _ = self(tokens_BT, positions_BT, documents_BT)
        return F.linear(self._head_input(x_BSD), self.tensor.weight(self.embedding).to(self.dtype))

    def _head_input(self, x_BSD: Tensor) -> Tensor:
        h_BSD = self.ops.rms_norm(x_BSD, self.tensor.weight(self.final_norm).to(self.dtype), self.shape.norm_eps)
        share = self.shape.mup_width_ratio  # muP: logits keep their size as the width grows
        return h_BSD if share == 1 else h_BSD * share


def make_rope_tables(positions_BT: Tensor, shape: ModelSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin, each [B, T, K] in ``dtype``, computed in fp32. The two halves of K are equal (arXiv 2104.09864)."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions_BT.device).float() / shape.head_dim
    positions = torch.arange(shape.context, device=positions_BT.device).float()
    angles_PK = positions.unsqueeze(-1) * (shape.rope_theta**-exponents).repeat(2)
    cos_PK, sin_PK = angles_PK.cos().to(dtype), angles_PK.sin().to(dtype)
    return F.embedding(positions_BT, cos_PK), F.embedding(positions_BT, sin_PK)
