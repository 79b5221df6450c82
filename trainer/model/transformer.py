"""The decoder that a ``ModelSpec`` describes: embedding, blocks, the layers for multi-token prediction, and the head with its loss.

Attention stays within a document, and positions restart in each document, unless the recipe sets ``across_documents``. If *tensor* ranks split a
row, each of them has S of its T positions.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.contract.registry import Ops
from kernels.general_attention.visible_keys import VisibleKeys
from models.rope import compute_rope_frequencies
from models.spec import ModelSpec
from models.tensors import list_tensor_shapes
from trainer.contract.checkpoint.region import Region
from trainer.contract.lora import AdaptRecipe, B, is_lora_tensor
from trainer.model import fp8, multi_token
from trainer.model.attention import Visibility, make_own_slopes
from trainer.model.block import Block, Trained, allocate_tensors
from trainer.model.lora import set_dora_lengths
from trainer.model.multi_token import MultiTokenLayer, MultiTokenObjective, ShiftedBatch
from trainer.parallel.ranks import get_local_part
from trainer.parallel.tensor_ranks import TensorRanks

# The outputs of these matrices, and these vectors, are heads or hidden units.
SPLIT_BY_ROWS = (
    "q", "k", "v", "q_bias", "k_bias", "v_bias", "kv_up", "sinks", "gate", "up", "gate_bias", "up_bias", "shared_gate", "shared_up",
)  # fmt: skip
SPLIT_BY_COLUMNS = ("attention_out", "down", "shared_down")
DRAWING = 8  # threads that draw weights, each with one parameter in memory
WRITE_TO_RESIDUAL = ("attention_out", "down", "shared_down", "experts_down")


class Decoder(nn.Module):
    """The model: tokens, positions, documents [B, T] → hidden states. ``loss`` and ``logits`` apply the head, the embedding if it is tied.

    ``adapt`` and ``freeze``: the keys of a recipe that say which parameters get no gradient. ``frozen_dtype``: of those of them that are matrices.
    It is fp32 or ``dtype``, and no output depends on it, because the products take every matrix in ``dtype``.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        shape: ModelSpec,
        ops: Ops,
        dtype: torch.dtype = torch.float32,
        tensor: TensorRanks | None = None,
        embedding_grad_share: float = 1.0,
        adapt: AdaptRecipe | None = None,
        freeze: Sequence[str] = (),
        frozen_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shape, self.ops, self.dtype = shape, ops, dtype
        self.tensor = tensor or TensorRanks()
        self.embedding_grad_share = embedding_grad_share
        shapes = list_tensor_shapes(shape)
        ends = {name: size for name, size in shapes.items() if "." not in name}
        trained = Trained("", adapt, freeze, frozen_dtype)
        allocate_tensors(self, ends, trained)
        blocks = [
            Block(shape, layer, ops, dtype, self.tensor, trained._replace(prefix=f"blocks.{layer}."), adapt)
            for layer in range(shape.layers)
        ]
        self.blocks = nn.ModuleList(blocks)
        ahead = [
            MultiTokenLayer(shape, depth, ops, dtype, self.tensor, trained) for depth in range(shape.multi_token_layers)
        ]
        self.multi_token = nn.ModuleList(ahead)
        self.every_block: list[Block] = [*blocks, *ahead]
        names = {name for name, _ in (*self.named_parameters(), *self.named_buffers())}
        assert {name for name in names if not is_lora_tensor(name)} == shapes.keys()
        self.head_name = "embedding" if shape.tied else "head"
        # rounded as transformers rounds Gemma's, so that bf16 has its numbers
        self.embedding_scale = float(torch.tensor(shape.embedding_scale or 1.0, dtype=dtype, device="cpu"))
        self.rope_kinds = sorted({str(block.rope) for block in self.every_block} - {"none"}) or ["main"]
        self.visibilities: set[Visibility | None] = {block.visibility for block in self.every_block}
        self.apply_head_loss = self._apply_plain_head if shape.logit_softcap is None else self._apply_capped_head
        self.constants: dict[tuple[str, torch.device], Any] = {}  # frequencies and slopes on their device

    @staticmethod
    def find_split_dimension(name: str) -> int | None:
        """The dimension along which *tensor* ranks split a parameter; None: each rank has all of it."""
        key = name.rpartition(".")[2]
        if key in SPLIT_BY_ROWS:
            return 0
        if key in (*SPLIT_BY_COLUMNS, "experts_gate", "experts_up"):
            return 1
        return 2 if key == "experts_down" else None

    def initialise_lora(self, seed: int, weights: Mapping[str, Tensor]) -> None:
        """Draw LoRA's matrices for weights that were loaded, so that the function does not change. ``weights``: this rank's part, unrounded."""
        self._draw_parameters([named for named in self.named_parameters() if is_lora_tensor(named[0])], seed)
        set_dora_lengths(self.named_parameters(), weights)

    def initialise(self, seed: int) -> None:
        """Draw the weights: normal with std 1/sqrt(fan-in), times 1/sqrt(2 layers) for matrices that write to the residual stream (GPT-2 §2.3).

        The embedding has std 0.02. A head of its own has the std of the other matrices at the width of ``base_d_model`` (muP, arXiv 2203.03466
        table 8). Norms multiply by one, biases and sinks are zero. Each rank draws each whole parameter on the CPU, from the seed and the
        parameter's name, and keeps its region. Therefore a seed gives the same model for any number of ranks. A core draws 0.1 G values a
        second, so several threads draw.
        """
        parameters = dict(self.named_parameters())
        self._draw_parameters(list(parameters.items()), seed)
        set_dora_lengths(parameters.items(), {name: get_local_part(held) for name, held in parameters.items()})
        for name, buffer in self.named_buffers():
            assert name.endswith("router_bias"), name
            buffer.zero_()

    def _draw_parameters(self, parameters: Sequence[tuple[str, nn.Parameter]], seed: int) -> None:
        def draw(named: tuple[str, nn.Parameter]) -> None:
            name, parameter = named
            with torch.no_grad():
                get_local_part(parameter).copy_(
                    Region.from_tensor(parameter).view_in_whole_tensor(self._drawn(name, parameter.shape, seed))
                )

        with ThreadPoolExecutor(min(DRAWING, os.cpu_count() or 1)) as threads:
            list(threads.map(draw, parameters))

    def _drawn(self, name: str, size: torch.Size, seed: int) -> Tensor:
        part = name.rpartition(".")[2]
        if part.endswith(B):
            return torch.zeros(size)
        if len(size) == 1:
            norm = part.endswith("norm") and not self.shape.norm_plus_one
            return torch.ones(size) if norm else torch.zeros(size)
        key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        std = 0.02 if name == "embedding" else size[-1] ** -0.5
        if name == "head":
            std = (self.shape.base_d_model or self.shape.d_model) ** -0.5
        if part in WRITE_TO_RESIDUAL:
            std /= math.sqrt(2 * self.shape.layers)
        return torch.randn(size, generator=generator) * std

    def compile(self, batch_sizes: int = 1) -> None:  # type: ignore[override]
        """Compile the blocks. Blocks of one kind share a graph. The loss head is not compiled here: ``kernels.yaml`` decides how it runs.

        ``batch_sizes``: the number of different batch sizes of the run. By default torch compiles eight graphs and then runs uncompiled code,
        which rounds differently. Therefore the limit is raised.
        """
        kinds = len({(type(one), one.has_rope, one.visibility, one.experts is None) for one in self.every_block})
        pieces = (
            8 if self.shape.experts is not None else 1
        )  # number of graphs into which the compiler splits a layer of experts
        # with and without gradients, with two and four times the stretches, and a margin
        limit = 8 * kinds * pieces * batch_sizes
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
        accumulated = torch._dynamo.config.accumulated_recompile_limit
        torch._dynamo.config.accumulated_recompile_limit = max(accumulated, 8 * limit)
        for block in self.every_block:
            block.run = torch.compile(block.run, dynamic=False)  # type: ignore[assignment,arg-type]

    def join_matrices(self) -> None:
        """Multiply with q, k, v as one joined matrix, and with gate and up as another. Only for one rank, because FSDP would free the joined copies.
        Only for a CPU: a GPU's products are large enough, and the parts of a joined product are strided. Copying these parts took 8 % of the
        kernels' time on an H200 for a model of 1 B weights."""
        for block in self.every_block:
            block.joined = True
            block.join_frozen_matrices()

    def use_fp8(self) -> None:
        """Compute the products of attention, dense MLPs and shared experts in fp8. Routers, routed experts and the head stay in bf16."""
        for block in self.every_block:
            block.fp8, block.multiply = True, fp8.apply_fp8_linear

    def use_recomputation(self) -> None:
        """Use activation checkpointing: keep only each block's input, and compute the block again in the backward pass."""
        for block in self.every_block:
            block.recompute = True

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor,
        stretches: int = 0,
        shifted: Sequence[ShiftedBatch] = (),
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """(hidden states [B, S, D] before the final norm, in ``dtype``; the extras of the expert layers; the states [B, S, D] of the layers for
        multi-token prediction, after their norm).

        ``stretches``: an upper bound of the number of stretches (runs of one document) in all rows (``Batch.micro_batches``). With 0 attention
        counts them if it needs them, which waits for the device. ``shifted``: what each layer for multi-token prediction reads; empty: they are
        not computed, and there are no states of them.
        """
        if self.shape.across_documents:  # one text, whose positions continue, as when the model is served
            documents_BT = documents_BT.clamp(max=0)
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        x_BSD = self._embed(tokens_BT)
        tables = {kind: self._make_rope_tables(positions_BT, kind) for kind in self.rope_kinds}
        tables["none"] = tables[self.rope_kinds[0]]  # not read
        prepared = self._prepare_documents(documents_BT, stretches)
        every_extras = []
        for block in self.blocks:
            x_BSD, extras = block(x_BSD, *tables[block.rope], documents_BT, prepared[block.visibility])  # type: ignore[index]
            if extras is not None:
                every_extras.append(extras)
        states: list[Tensor] = []
        for layer, one in zip(self.multi_token, shifted):
            state_BSD = states[-1] if states else self._norm_output(x_BSD)
            token_BSD, seen = self._embed(one.tokens_BT), prepared[layer.visibility]  # type: ignore[index]
            state_BSD, extras = layer(token_BSD, state_BSD, *tables[layer.rope], one.documents_BT, seen)  # type: ignore[index]
            states.append(state_BSD)
            if extras is not None:
                every_extras.append(extras)
        return x_BSD, every_extras, states

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        """The embeddings [B, S, D] of this rank's positions, in ``dtype``."""
        embedding = self.tensor.weight(self.embedding)
        x_BSD: Tensor = self.ops.embedding(self.tensor.take_own_positions(tokens_BT), embedding).to(self.dtype)
        if self.embedding_grad_share != 1 and x_BSD.requires_grad:  # GLM-130B, arXiv 2210.02414 §3.3
            x_BSD = x_BSD.detach() + (x_BSD - x_BSD.detach()) * self.embedding_grad_share  # adds zero, in any dtype
        if self.embedding_scale != 1:
            x_BSD = x_BSD * self.embedding_scale
        if self.shape.embedding_norm:
            x_BSD = self.ops.rms_norm(x_BSD, torch.ones_like(x_BSD[0, 0]), self.shape.norm_eps)
        return x_BSD

    def place_constants(self, device: torch.device) -> None:
        """Copy RoPE's frequencies and ALiBi's slopes to the device before the first step. A copy within a step would wait for the device, and could
        not be recorded in a graph."""
        for kind in self.rope_kinds:
            self._find_frequencies(kind, device)
        if any(visibility is not None and visibility.has_slopes for visibility in self.visibilities):
            self._find_own_slopes(device)

    def _find_frequencies(self, kind: str, device: torch.device) -> tuple[Tensor, float]:
        key = kind, device
        if key not in self.constants:
            frequencies, factor = compute_rope_frequencies(self.shape, kind)
            self.constants[key] = frequencies.to(device), factor
        return self.constants[key]  # type: ignore[no-any-return]

    def _make_rope_tables(self, positions_BT: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        frequencies, factor = self._find_frequencies(kind, positions_BT.device)
        return look_up_rope_tables(positions_BT, self.shape.context, frequencies, factor, self.dtype)

    def _prepare_documents(self, documents_BT: Tensor, stretches: int) -> dict[Visibility | None, Any]:
        """The documents as the attention of each kind of layer takes them."""
        found: dict[Visibility | None, Any] = {}
        for visibility in self.visibilities:
            if visibility is None:
                found[None] = self.ops.prepare_attention(documents_BT, stretches)
            else:
                slopes_H = self._find_own_slopes(documents_BT.device) if visibility.has_slopes else None
                visible = VisibleKeys(documents_BT, visibility.window, slopes_H)
                found[visibility] = self.ops.prepare_general_attention(visible, stretches)
        return found

    def _find_own_slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes of this rank's heads."""
        key = "slopes", device
        if key not in self.constants:
            self.constants[key] = make_own_slopes(self.shape, self.tensor, device)
        return self.constants[key]  # type: ignore[no-any-return]

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
        balance_share: float = 0.0,
        objective: MultiTokenObjective | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss, nll_BS, load [expert layers, E] or None).

        loss: Σ weights · (nll + z_loss · logsumexp²) + router_z_share · Σ router z² + balance_share · Σ of the rows' losses of balance, an fp32
        scalar. nll_BS: fp32, detached, for this rank's positions (``tensor.part``). load: the number of tokens at each expert. ``objective``: of
        the layers for multi-token prediction, whose loss is added; None: they are not computed.
        """
        shifted: list[ShiftedBatch] = []
        if objective is not None:
            depths = range(1, 1 + len(self.multi_token))
            shifted = [multi_token.shift_batch(targets_BT, weights_BT, documents_BT, depth) for depth in depths]
        x_BSD, extras, states = self(tokens_BT, positions_BT, documents_BT, stretches, shifted)
        loss, nll_N = self._apply_head_loss_to(self._norm_output(x_BSD), targets_BT, weights_BT, z_loss)
        nll_BS = nll_N.view(x_BSD.shape[:2])
        if objective is not None:
            found = [
                self._apply_head_loss_to(state_BSD, one.targets_BT, one.weights_BT, z_loss)
                for state_BSD, one in zip(states, shifted, strict=True)
            ]
            weights = [self.tensor.take_own_positions(one.weights_BT).flatten() for one in shifted]
            losses, nlls = [one for one, _ in found], [nll_N for _, nll_N in found]
            loss = loss + multi_token.add_multi_token_sums(objective, losses, nlls, weights)
        if not extras:
            return loss, nll_BS, None
        every = torch.stack(extras)
        assert self.shape.experts is not None
        auxiliary, load = every.tensor_split([-self.shape.experts.count], dim=1)
        loss = loss + router_z_share * auxiliary[:, 0].sum()
        if self.shape.experts.balance == "loss":
            loss = loss + balance_share * auxiliary[:, 1].sum()
        return loss, nll_BS, load.detach().contiguous()  # gloo would sum the memory that a view skips

    def logits(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        """The logits [B, S, V], for tests and for comparing an export. Training never has all of them in memory."""
        x_BSD, *_ = self(tokens_BT, positions_BT, documents_BT)
        return self._compute_logits(self._norm_output(x_BSD))

    def multi_token_logits(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """The logits [B, S, V] of each layer for multi-token prediction, for tests and for measuring drafts. ``batch``: ``tokens_BT``,
        ``targets_BT``, ``positions_BT`` and ``documents_BT`` of a ``Batch``."""
        targets_BT, documents_BT = batch["targets_BT"], batch["documents_BT"]
        weights_BT = torch.zeros_like(targets_BT, dtype=torch.float32)
        depths = range(1, 1 + len(self.multi_token))
        shifted = [multi_token.shift_batch(targets_BT, weights_BT, documents_BT, depth) for depth in depths]
        *_, states = self(batch["tokens_BT"], batch["positions_BT"], documents_BT, 0, shifted)
        return [self._compute_logits(state_BSD) for state_BSD in states]

    def _compute_logits(self, h_BSD: Tensor) -> Tensor:
        logits_BSV = F.linear(self._head_input(h_BSD), self._head())
        cap = self.shape.logit_softcap
        return logits_BSV if cap is None else cap * torch.tanh(logits_BSV / cap)

    def _apply_head_loss_to(
        self, h_BSD: Tensor, targets_BT: Tensor, weights_BT: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        """(loss, nll_N) of normed states."""
        targets_N, weights_N = (self.tensor.take_own_positions(x_BT).flatten() for x_BT in (targets_BT, weights_BT))
        return self.apply_head_loss(self._head_input(h_BSD).flatten(0, 1), self._head(), targets_N, weights_N, z_loss)

    def _apply_plain_head(
        self, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        return self.ops.linear_cross_entropy(x_ND, weight_VD, targets_N, weights_N, z_loss)

    def _apply_capped_head(
        self, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        cap = self.shape.logit_softcap
        assert cap is not None
        return self.ops.softcapped_cross_entropy(x_ND, weight_VD, targets_N, weights_N, z_loss, cap)

    def _head(self) -> Tensor:
        """The head's matrix [V, D]: the embedding if it is tied."""
        return self.tensor.weight(getattr(self, self.head_name)).to(self.dtype)

    def _norm_output(self, x_BSD: Tensor) -> Tensor:
        if self.shape.norm_weights:
            norm_D = self.tensor.weight(self.final_norm)
            norm_D = 1 + norm_D.float() if self.shape.norm_plus_one else norm_D.to(self.dtype)
        else:
            norm_D = torch.ones_like(x_BSD[0, 0])
        return self.ops.rms_norm(x_BSD, norm_D, self.shape.norm_eps)  # type: ignore[no-any-return]

    def _head_input(self, h_BSD: Tensor) -> Tensor:
        share = self.shape.mup_width_ratio  # muP: logits keep their size as the width grows
        return h_BSD if share == 1 else h_BSD * share


def make_rope_tables(
    positions_BT: Tensor, shape: ModelSpec, dtype: torch.dtype, kind: str = "main"
) -> tuple[Tensor, Tensor]:
    """RoPE's cos and sin of one kind of layers, each [B, T, K] in ``dtype``, computed in fp32. The two halves of K are equal (arXiv 2104.09864)."""
    frequencies, factor = compute_rope_frequencies(shape, kind)
    return look_up_rope_tables(positions_BT, shape.context, frequencies.to(positions_BT.device), factor, dtype)


def look_up_rope_tables(
    positions_BT: Tensor, context: int, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same as ``make_rope_tables``, from the result of ``compute_rope_frequencies`` on the positions' device."""
    positions = torch.arange(context, device=positions_BT.device).float()
    angles_PK = positions.unsqueeze(-1) * frequencies.repeat(2)
    cos_PK, sin_PK = angles_PK.cos(), angles_PK.sin()
    if factor != 1:  # of the pairs that turn
        factor_K = torch.where(frequencies == 0, 1.0, factor).repeat(2)
        cos_PK, sin_PK = cos_PK * factor_K, sin_PK * factor_K
    return F.embedding(positions_BT, cos_PK.to(dtype)), F.embedding(positions_BT, sin_PK.to(dtype))
