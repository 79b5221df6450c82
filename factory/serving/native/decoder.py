"""Computes the decoders of ``models.spec`` with a cache of keys and values, in fp32, on a CPU or a GPU.

The results equal those of the judge's model (``factory.evals.reference_model``): tests compare the two, and so does the supervisor before a release
becomes current. A token's position is its column in the cache, so rows of any length share a batch without padding. A pass treats the new tokens of
all rows as one list, [N, D]. Only attention distinguishes rows. Matrices with the same input are stored and multiplied as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from factory.evals.export_folder import read_config, read_weights
from models.rope import compute_alibi_slopes, compute_rope_frequencies
from models.spec import ExpertsSpec, LayerSpec, ModelSpec
from models.tensors import list_unit_norms

JOINED_TENSORS = (
    ("q", "k", "v"), ("q_bias", "k_bias", "v_bias"), ("gate", "up"), ("gate_bias", "up_bias"), ("shared_gate", "shared_up"),
    ("experts_gate", "experts_up"),
)  # fmt: skip
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}

Block = dict[
    str, torch.Tensor
]  # the tensors of a layer by their native key; a joined one has the key of its first part
Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of RoPE [N, 1, K]
Biases = dict[int | None, torch.Tensor | None]  # by ``LayerSpec.window``: what is added to the scores


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens ``first`` … ``last - 1`` of a pass, all of one ``row``. The last of them is at column ``seen - 1``."""

    first: int
    last: int
    row: int
    seen: int
    biases: Biases  # [T, S], with ALiBi [H, T, S]; None: a causal mask is used, because the row begins with this piece


@dataclass(frozen=True)
class _Pass:
    """The positions of the tokens of a pass. The first ``singles`` tokens belong to the first rows, one to each. ``pieces`` has all others."""

    row_N: torch.Tensor
    column_N: torch.Tensor
    turns: dict[str, Turn]  # by ``LayerSpec.rope``
    singles: int
    seen: int  # number of columns that the singles attend to
    biases: Biases  # of the singles [B, 1, 1, S], with ALiBi [B, G, H / G, S]; None: each single attends to all these columns
    pieces: list[_Piece]


class CachedDecoder:
    """A decoder of an export, loaded onto ``device``. ``weights``: the fp32 tensors of ``models.tensors`` by name."""

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.weights = {name: weight.to(device) for name, weight in weights.items()}
        self._layers = [spec.layer(number) for number in range(spec.layers)]
        self._blocks = [self._prepare(number) for number in range(spec.layers)]
        unit_D = torch.ones(spec.d_model, device=device)
        self._final_norm_D = self._norm_weight(self.weights["final_norm"]) if spec.norm_weights else unit_D
        self.head_VD = self.weights["embedding" if spec.tied else "head"]
        self._scale = spec.attention_scale or spec.head_dim**-0.5
        self._needs_scores = (
            spec.attention_softcap is not None or spec.attention_sinks
        )  # torch's fused attention has neither
        self._ropes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind in sorted({layer.rope for layer in self._layers} - {"none"}):
            frequency_K2, factor = compute_rope_frequencies(spec, kind)
            factor_K2 = torch.where(frequency_K2 == 0, 1.0, factor)  # a pair that does not turn keeps its size
            self._ropes[kind] = frequency_K2.to(device), factor_K2.to(device)
        slopes = compute_alibi_slopes(spec.heads) if spec.position == "alibi" else None
        self._slopes_H = None if slopes is None else torch.tensor(slopes, device=device)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> CachedDecoder:
        """Load an export. Raises: ExportError for an export that is damaged or of an unknown family."""
        spec = read_config(folder)
        return cls(spec, read_weights(folder, spec), device)

    def _prepare(self, number: int) -> Block:
        """Return the tensors of a layer, with those of ``JOINED_TENSORS`` joined. ``weights`` then has views of these."""
        prefix = f"blocks.{number}."
        block = {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        block |= {key: torch.ones(size, device=self.device) for key, size in list_unit_norms(self.spec, number).items()}
        for parts in JOINED_TENSORS:
            if all(part in block for part in parts):
                held = [block.pop(part) for part in parts]
                dim = max(held[0].ndim - 2, 0)
                joined = torch.cat(held, dim)
                views = joined.split([part.shape[dim] for part in held], dim)
                self.weights |= {prefix + part: view for part, view in zip(parts, views, strict=True)}
                block[parts[0]] = joined
        block |= {key: self._norm_weight(weight) for key, weight in block.items() if key.endswith("norm")}
        if self.spec.qk_norm is True:  # of each query head, then of each key head
            q_K, k_K = block.pop("q_norm"), block.pop("k_norm")
            block["qk_norm"] = torch.cat((q_K.expand(self.spec.heads, -1), k_K.expand(self.spec.kv_heads, -1)))
        return block

    def _norm_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 1 if self.spec.norm_plus_one else weight

    def make_cache(self, rows: int, columns: int) -> torch.Tensor:
        """Return a cache [layers, 2, rows, G, columns, K] of zeros. Unwritten columns are masked, but a NaN in them would still spoil the row."""
        s = self.spec
        return torch.zeros(s.layers, 2, rows, s.kv_heads, columns, s.head_dim, device=self.device)

    @property
    def cache_bytes_per_token(self) -> int:
        """Return the bytes that the cache needs for each token."""
        return 4 * self.spec.layers * 2 * self.spec.kv_heads * self.spec.head_dim

    @torch.inference_mode()
    def compute_logits(self, tokens: list[list[int]], starts: list[int], cache: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after the last token of each row. ``tokens``: one or more for each of the first B rows of ``cache``.

        ``cache``: [layers, 2, rows, G, S, K]. ``starts``: the column of each row's first token. The keys and values of ``tokens`` are written to the
        cache. All columns before them must have been written.
        """
        spec = self.spec
        at = self._place([len(row) for row in tokens], starts)
        ids_N = torch.tensor([token for row in tokens for token in row], device=self.device)
        x_ND = F.embedding(ids_N, self.weights["embedding"])
        if spec.embedding_scale is not None:
            x_ND = x_ND * spec.embedding_scale
        if spec.embedding_norm:
            x_ND = F.rms_norm(x_ND, x_ND.shape[1:], eps=spec.norm_eps)
        for number, (block, layer) in enumerate(zip(self._blocks, self._layers, strict=True)):
            y_ND = self._norm(x_ND, block.get("attention_norm"))
            o_ND = self._attention(y_ND, block, layer, at, cache[number])
            # in the last layer, only the last token of a prompt needs the rest of the layer
            if at.pieces and number == spec.layers - 1:
                ends = [*range(at.singles), *(piece.last - 1 for piece in at.pieces)]
                x_ND, o_ND = x_ND[ends], o_ND[ends]
            o_ND = F.linear(o_ND, block["attention_out"], block.get("attention_out_bias"))
            x_ND = x_ND + self._norm(o_ND, block.get("attention_post_norm"))
            y_ND = self._norm(x_ND, block.get("mlp_norm"))
            y_ND = self._mlp(y_ND, block) if layer.experts is None else self._mixture(y_ND, block, layer.experts)
            x_ND = x_ND + self._norm(y_ND, block.get("mlp_post_norm"))
        return _cap(F.linear(self._norm(x_ND, self._final_norm_D), self.head_VD), spec.logit_softcap)

    # -- positions -----------------------------------------------------------------------------------------------------
    def _place(self, lengths: list[int], starts: list[int]) -> _Pass:
        singles = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
        columns = [start + place for start, length in zip(starts, lengths, strict=True) for place in range(length)]
        column_N = torch.tensor(columns, device=self.device)
        row_N = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)], device=self.device)
        seen = max(starts[:singles], default=0) + 1
        same = min(starts[:singles], default=0) + 1 == seen  # all singles attend to all columns
        biases = self._make_biases(column_N[:singles], seen, sees_all=same)
        biases = {window: bias if bias is None else self._shape_singles(bias) for window, bias in biases.items()}
        pieces, first = [], singles
        for row, (length, start) in enumerate(zip(lengths[singles:], starts[singles:], strict=True), singles):
            last = first + length
            of_piece = self._make_biases(
                column_N[first:last], start + length, sees_all=not start and not self._needs_scores
            )
            pieces.append(_Piece(first, last, row, start + length, of_piece))
            first = last
        return _Pass(row_N, column_N, self._turn(column_N), singles, seen, biases, pieces)

    def _turn(self, column_N: torch.Tensor) -> dict[str, Turn]:
        found = {}
        for kind, (frequency_K2, factor_K2) in self._ropes.items():
            angle_NK2 = column_N[:, None] * frequency_K2
            cos, sin = angle_NK2.cos() * factor_K2, angle_NK2.sin() * factor_K2
            # with the signs that ``_rotate`` needs
            found[kind] = torch.cat((cos, cos), 1)[:, None], torch.cat((-sin, sin), 1)[:, None]
        return found

    def _make_biases(self, column_N: torch.Tensor, seen: int, sees_all: bool) -> Biases:
        """Return, for each window, what is added to the scores of queries at ``column_N`` [N, S], with ALiBi [H, N, S].

        ``sees_all``: without a window and ALiBi, no bias is needed.
        """
        found: Biases = {}
        for window in {layer.window for layer in self._layers}:
            if sees_all and window is None and self._slopes_H is None:
                found[window] = None
                continue
            distance_NS = column_N[:, None] - torch.arange(seen, device=self.device)
            hidden_NS = distance_NS < 0
            if window is not None:
                hidden_NS |= distance_NS >= window
            bias = torch.zeros(hidden_NS.shape, device=self.device).masked_fill_(hidden_NS, -torch.inf)
            found[window] = bias if self._slopes_H is None else bias - self._slopes_H[:, None, None] * distance_NS
        return found

    def _shape_singles(self, bias: torch.Tensor) -> torch.Tensor:
        """[B, S] → [B, 1, 1, S]; with ALiBi [H, B, S] → [B, G, H / G, S]."""
        if self._slopes_H is None:
            return bias[:, None, None]
        return bias.transpose(0, 1).unflatten(1, (self.spec.kv_heads, -1))

    # -- attention -----------------------------------------------------------------------------------------------------
    def _attention(
        self, x_ND: torch.Tensor, block: Block, layer: LayerSpec, at: _Pass, cache: torch.Tensor
    ) -> torch.Tensor:
        spec, turn = self.spec, at.turns.get(layer.rope)
        project = self._project_latent if spec.latent else self._project
        q_NHK, k_NGK, v_NGV = project(x_ND, block, turn)
        if spec.v_head_dim == spec.head_dim:
            cache[:, at.row_N, :, at.column_N] = torch.stack((k_NGK, v_NGV), 1)
        else:
            cache[0, at.row_N, :, at.column_N] = k_NGK
            cache[1, at.row_N, :, at.column_N, : spec.v_head_dim] = v_NGV
        keys, values = cache[0], cache[1, ..., : spec.v_head_dim]
        outputs = []
        if at.singles:  # queries that share a key-value head are computed as if they were tokens of one row
            q_BGQK = q_NHK[: at.singles].unflatten(1, (spec.kv_heads, -1))
            k_BGSK, v_BGSV = keys[: at.singles, :, : at.seen], values[: at.singles, :, : at.seen]
            bias = at.biases[layer.window]
            if self._needs_scores:
                o_BGQV = self._attend(q_BGQK, k_BGSK, v_BGSV, bias, block)
            else:
                o_BGQV = F.scaled_dot_product_attention(q_BGQK, k_BGSK, v_BGSV, attn_mask=bias, scale=self._scale)
            outputs.append(o_BGQV.flatten(1))
        for piece in at.pieces:
            q_1HTK = q_NHK[piece.first : piece.last].transpose(0, 1)[None]
            k_1GSK, v_1GSV = keys[piece.row, None, :, : piece.seen], values[piece.row, None, :, : piece.seen]
            bias = piece.biases[layer.window]
            if self._needs_scores:
                group = spec.heads // spec.kv_heads
                k_1HSK, v_1HSV = k_1GSK.repeat_interleave(group, 1), v_1GSV.repeat_interleave(group, 1)
                o_1HTV = self._attend(q_1HTK, k_1HSK, v_1HSV, bias, block)
            else:
                o_1HTV = F.scaled_dot_product_attention(
                    q_1HTK, k_1GSK, v_1GSV, attn_mask=bias, is_causal=bias is None, scale=self._scale, enable_gqa=True
                )
            outputs.append(o_1HTV[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _project(
        self, x_ND: torch.Tensor, block: Block, turn: Turn | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [N, H, K], keys [N, G, K] and values [N, G, K] of tokens."""
        spec = self.spec
        joined_ND = F.linear(x_ND, block["q"], block.get("q_bias"))
        if spec.qk_norm == "whole":
            q, k, v = joined_ND.split(
                [count * spec.head_dim for count in (spec.heads, spec.kv_heads, spec.kv_heads)], 1
            )
            joined_ND = torch.cat((self._norm(q, block["q_norm"]), self._norm(k, block["k_norm"]), v), 1)
        parts_NHK = joined_ND.view(len(x_ND), -1, spec.head_dim)
        qk_NHK, v_NGK = parts_NHK.split((spec.heads + spec.kv_heads, spec.kv_heads), 1)
        if spec.qk_norm is True:
            qk_NHK = F.rms_norm(qk_NHK, (spec.head_dim,), eps=spec.norm_eps) * block["qk_norm"]
        if turn is not None:
            qk_NHK = _rotate(qk_NHK, turn)
        q_NHK, k_NGK = qk_NHK.split((spec.heads, spec.kv_heads), 1)
        return q_NHK, k_NGK, v_NGK

    def _project_latent(
        self, x_ND: torch.Tensor, block: Block, turn: Turn | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``_project`` with multi-head latent attention (arXiv 2405.04434, §2.1). The cache has the keys and values of all heads."""
        spec, latent = self.spec, self.spec.latent
        assert latent is not None
        compressed = x_ND
        if latent.q_rank is not None:
            compressed = self._norm(F.linear(x_ND, block["q_down"]), block["q_down_norm"])
        q_NHK = F.linear(compressed, block["q"]).view(len(x_ND), spec.heads, spec.head_dim)
        q_still, q_turning = q_NHK.split((latent.nope_head_dim, latent.rope_head_dim), 2)
        kv_NR, k_turning = F.linear(x_ND, block["kv_down"]).split((latent.kv_rank, latent.rope_head_dim), 1)
        kv = F.linear(self._norm(kv_NR, block["kv_down_norm"]), block["kv_up"]).view(len(x_ND), spec.heads, -1)
        k_still, v_NHV = kv.split((latent.nope_head_dim, latent.v_head_dim), 2)
        turning = torch.cat((q_turning, k_turning[:, None]), 1)
        if turn is not None:
            turning = _rotate(turning, turn)
        q_turning, k_turning = turning[:, :-1], turning[:, -1:].expand(-1, spec.heads, -1)
        return torch.cat((q_still, q_turning), 2), torch.cat((k_still, k_turning), 2), v_NHV

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, block: Block
    ) -> torch.Tensor:
        """Attention with what torch's fused one has not. Heads are in dimension 1, or in 1 and 2 for singles, whose q is [B, G, H / G, K]."""
        scores = _cap(q @ k.transpose(-1, -2) * self._scale, self.spec.attention_softcap)
        scores = scores if bias is None else scores + bias
        if not self.spec.attention_sinks:
            return scores.softmax(-1) @ v
        sinks = block["sinks"].view(k.shape[1], -1, 1).expand(*scores.shape[:-1], 1)  # a share that adds nothing
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v

    # -- MLP -----------------------------------------------------------------------------------------------------------
    def _mlp(self, x: torch.Tensor, block: Block) -> torch.Tensor:
        activation = ACTIVATIONS[self.spec.activation]
        if self.spec.gated:
            gate, up = F.linear(x, block["gate"], block.get("gate_bias")).chunk(2, -1)
            inner = activation(gate) * up
        else:
            inner = activation(F.linear(x, block["up"], block.get("up_bias")))
        return F.linear(inner, block["down"], block.get("down_bias"))

    def _mixture(self, x_ND: torch.Tensor, block: Block, experts: ExpertsSpec) -> torch.Tensor:
        """Send each token to ``per_token`` experts, chosen by biased scores and weighted by unbiased ones (arXiv:2412.19437, §2.1.2)."""
        scores_NE = F.linear(x_ND, block["router"], block.get("router_logits_bias"))
        affinity_NE = scores_NE.sigmoid() if experts.scores == "sigmoid" else scores_NE.softmax(-1)
        ranked_NE = affinity_NE + block["router_bias"] if "router_bias" in block else affinity_NE
        if experts.groups > 1:
            ranked_NGE = ranked_NE.unflatten(1, (experts.groups, -1))
            rank_NG = ranked_NGE.topk(2).values.sum(-1)
            other_NG = torch.ones_like(rank_NG).scatter_(1, rank_NG.topk(experts.groups_per_token).indices, 0.0).bool()
            ranked_NE = ranked_NGE.masked_fill(other_NG[..., None], -torch.inf).flatten(1)
        chosen_NP = ranked_NE.topk(experts.per_token).indices
        weight_NP = affinity_NE.gather(1, chosen_NP)
        if experts.normalise:
            weight_NP = weight_NP / (weight_NP.sum(1, keepdim=True) + 1e-20)
        if experts.scale != 1.0:
            weight_NP = weight_NP * experts.scale
        y_ND = _swiglu(x_ND, block["shared_gate"], block["shared_down"]) if experts.shared else torch.zeros_like(x_ND)
        for expert in chosen_NP.unique().tolist():
            token_M, place_M = (chosen_NP == expert).nonzero(as_tuple=True)
            y_ND[token_M] += weight_NP[token_M, place_M, None] * self._expert(x_ND[token_M], block, expert, experts)
        return y_ND

    def _expert(self, x_MD: torch.Tensor, block: Block, expert: int, experts: ExpertsSpec) -> torch.Tensor:
        gate_up, down = block["experts_gate"][expert], block["experts_down"][expert]
        if not experts.bias and experts.clamp is None:
            return _swiglu(x_MD, gate_up, down)
        biases: list[torch.Tensor | None] = [None, None, None]
        if experts.bias:
            keys = ("experts_gate_bias", "experts_up_bias", "experts_down_bias")
            biases = [block[key].view(experts.count, -1)[expert] for key in keys]
        gate, up = (F.linear(x_MD, w, b) for w, b in zip(gate_up.chunk(2), biases[:2], strict=True))
        if experts.clamp is None:
            return F.linear(F.silu(gate) * up, down, biases[2])
        gate, up = gate.clamp(max=experts.clamp), up.clamp(-experts.clamp, experts.clamp)
        return F.linear(gate * (gate * experts.clamp_alpha).sigmoid() * (up + 1), down, biases[2])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMSNorm; ``x`` itself if the layer has no norm here."""
        return x if weight is None else F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)


def _swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def _cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Soft-capping (arXiv 2408.00118, §2)."""
    return x if cap is None else cap * torch.tanh(x / cap)


def _rotate(x_NHK: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Apply RoPE to the two halves of each head. In the sines, those of the first half are negated."""
    cos_N1K, sin_N1K = turn
    return torch.addcmul(x_NHK * cos_N1K, x_NHK.roll(x_NHK.shape[-1] // 2, -1), sin_N1K)
