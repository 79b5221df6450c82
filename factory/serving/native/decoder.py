"""Computes the decoder models of ``export_config`` with a cache of keys and values, in fp32, on a CPU or a GPU.

The results equal those of the judge's model (``factory.evals.reference_model``): tests compare the two, and so does the supervisor before a release
becomes current. A token's position is its column in the cache, so rows of any length share a batch without padding. A pass treats the new tokens of
all rows as one list, [N, D]. Only attention distinguishes rows. Matrices with the same input are stored and multiplied as one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from factory.evals.export_config import ExpertsConfig, ExportConfig
from factory.evals.export_folder import read_config, read_weights

JOINED_MATRICES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens ``first`` … ``last - 1`` of a pass, all of one ``row``. The last of them is at column ``seen - 1``."""

    first: int
    last: int
    row: int
    seen: int
    mask_TS: torch.Tensor | None  # None: a causal mask is used, because the row begins with this piece


@dataclass(frozen=True)
class _Pass:
    """The positions of the tokens of a pass. The first ``singles`` tokens belong to the first rows, one to each. ``pieces`` has all others."""

    row_N: torch.Tensor
    column_N: torch.Tensor
    turn_N1K: tuple[torch.Tensor, torch.Tensor]  # cosines and sines of RoPE
    singles: int
    seen: int  # number of columns that the singles attend to
    mask_B11S: torch.Tensor | None  # added to the scores of the singles; None: each single attends to all these columns
    pieces: list[_Piece]


class CachedDecoder:
    """A decoder model of an export, loaded onto ``device``."""

    def __init__(self, config: ExportConfig, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        self.config, self.device = config, device
        self.weights = {name: weight.to(device) for name, weight in weights.items()}
        self._joined = self._join()
        self._qk_norm_HK = [self._qk_norm(layer) for layer in range(config.layers)] if config.qk_norm else []
        self.head_VD = self.weights["model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"]
        even_K2 = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        frequencies_K2 = config.rope_theta ** (-even_K2 / config.head_dim)
        angle_SK2 = torch.arange(config.context)[:, None].float() * frequencies_K2
        self._cos_SK = angle_SK2.cos().repeat(1, 2).to(device)
        self._sin_SK = torch.cat((-angle_SK2.sin(), angle_SK2.sin()), 1).to(
            device
        )  # with the signs that ``_rotate`` needs

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> CachedDecoder:
        """Load an export. Raises: ExportError for an export that is damaged or has an unknown architecture."""
        config = read_config(folder)
        return cls(config, read_weights(folder, config), device)

    def _join(self) -> dict[str, torch.Tensor]:
        """Join the matrices of ``JOINED_MATRICES``. Returns each by the name of its first part. ``weights`` then has views of them."""
        joined = {}
        for first, *others in JOINED_MATRICES:
            for name in [name for name in self.weights if name.endswith(f".{first}.weight")]:
                names = [name, *(name.replace(first, other) for other in others)]
                joined[name] = torch.cat([self.weights[part] for part in names])
                self.weights |= dict(
                    zip(names, joined[name].split([len(self.weights[part]) for part in names]), strict=True)
                )
        return joined

    def _qk_norm(self, layer: int) -> torch.Tensor:
        """Return the norm weights for each query head, then for each key head."""
        q_K, k_K = (self.weights[f"model.layers.{layer}.self_attn.{part}_norm.weight"] for part in "qk")
        return torch.cat((q_K.expand(self.config.heads, -1), k_K.expand(self.config.kv_heads, -1)))

    def make_cache(self, rows: int, columns: int) -> torch.Tensor:
        """Return a cache [layers, 2, rows, G, columns, K] of zeros. Unwritten columns are masked, but a NaN in them would still spoil the row."""
        c = self.config
        return torch.zeros(c.layers, 2, rows, c.kv_heads, columns, c.head_dim, device=self.device)

    @property
    def cache_bytes_per_token(self) -> int:
        """Return the bytes that the cache needs for each token."""
        return 4 * self.config.layers * 2 * self.config.kv_heads * self.config.head_dim

    @torch.inference_mode()
    def compute_logits(self, tokens: list[list[int]], starts: list[int], cache: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after the last token of each row. ``tokens``: one or more for each of the first B rows of ``cache``.

        ``cache``: [layers, 2, rows, G, S, K]. ``starts``: the column of each row's first token. The keys and values of ``tokens`` are written to the
        cache. All columns before them must have been written.
        """
        at = self._place([len(row) for row in tokens], starts)
        ids_N = torch.tensor([token for row in tokens for token in row], device=self.device)
        x_ND = F.embedding(ids_N, self.weights["model.embed_tokens.weight"])
        for layer in range(self.config.layers):
            block = f"model.layers.{layer}"
            y_ND = self._norm(x_ND, self.weights[f"{block}.input_layernorm.weight"])
            o_ND = self._attention(y_ND, layer, at, cache[layer])
            if (
                at.pieces and layer == self.config.layers - 1
            ):  # in the last layer, only the last token of a prompt needs the rest of the layer
                ends = [*range(at.singles), *(piece.last - 1 for piece in at.pieces)]
                x_ND, o_ND = x_ND[ends], o_ND[ends]
            x_ND = x_ND + F.linear(o_ND, self.weights[f"{block}.self_attn.o_proj.weight"])
            y_ND = self._norm(x_ND, self.weights[f"{block}.post_attention_layernorm.weight"])
            experts = self.config.get_experts_of_layer(layer)
            mlp = f"{block}.mlp"
            x_ND = x_ND + (self._swiglu(y_ND, mlp) if experts is None else self._mixture(y_ND, mlp, experts))
        return F.linear(self._norm(x_ND, self.weights["model.norm.weight"]), self.head_VD)

    def _place(self, lengths: list[int], starts: list[int]) -> _Pass:
        singles = next((row for row, length in enumerate(lengths) if length > 1), len(lengths))
        columns = [start + place for start, length in zip(starts, lengths, strict=True) for place in range(length)]
        column_N = torch.tensor(columns, device=self.device)
        row_N = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)], device=self.device)
        seen = max(starts[:singles], default=0) + 1
        mask_B11S = None
        if min(starts[:singles], default=0) + 1 < seen:
            hidden_BS = torch.arange(seen, device=self.device) > column_N[:singles, None]
            mask_BS = torch.zeros(hidden_BS.shape, device=self.device).masked_fill_(hidden_BS, -torch.inf)
            mask_B11S = mask_BS[:, None, None]
        pieces, first = [], singles
        for row, (length, start) in enumerate(zip(lengths[singles:], starts[singles:], strict=True), singles):
            last = first + length
            mask_TS = torch.arange(start + length, device=self.device) <= column_N[first:last, None] if start else None
            pieces.append(_Piece(first, last, row, start + length, mask_TS))
            first = last
        turn = self._cos_SK[column_N, None], self._sin_SK[column_N, None]
        return _Pass(row_N, column_N, turn, singles, seen, mask_B11S, pieces)

    def _attention(self, x_ND: torch.Tensor, layer: int, at: _Pass, cache: torch.Tensor) -> torch.Tensor:
        config, name = self.config, f"model.layers.{layer}.self_attn"
        parts_NHK = F.linear(x_ND, self._joined[f"{name}.q_proj.weight"]).view(len(x_ND), -1, config.head_dim)
        qk_NHK, v_NGK = parts_NHK.split((config.heads + config.kv_heads, config.kv_heads), 1)
        if config.qk_norm:
            qk_NHK = F.rms_norm(qk_NHK, (config.head_dim,), eps=config.norm_eps) * self._qk_norm_HK[layer]
        if config.rope_layers[layer]:
            qk_NHK = _rotate(qk_NHK, *at.turn_N1K)
        q_NHK, k_NGK = qk_NHK.split((config.heads, config.kv_heads), 1)
        cache[:, at.row_N, :, at.column_N] = torch.stack((k_NGK, v_NGK), 1)
        outputs = []
        if at.singles:  # queries that share a key-value head are computed as if they were tokens of one row
            q_BGQK = q_NHK[: at.singles].unflatten(1, (config.kv_heads, -1))
            keys, values = cache[:, : at.singles, :, : at.seen]
            o_BGQK = F.scaled_dot_product_attention(q_BGQK, keys, values, attn_mask=at.mask_B11S)
            outputs.append(o_BGQK.flatten(1))
        for piece in at.pieces:
            q_1HTK = q_NHK[piece.first : piece.last].transpose(0, 1)[None]
            keys, values = cache[:, piece.row, None, :, : piece.seen]
            o_1HTK = F.scaled_dot_product_attention(
                q_1HTK, keys, values, attn_mask=piece.mask_TS, is_causal=piece.mask_TS is None, enable_gqa=True
            )
            outputs.append(o_1HTK[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _swiglu(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = F.linear(x, self._joined[f"{name}.gate_proj.weight"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.weights[f"{name}.down_proj.weight"])

    def _mixture(self, x_ND: torch.Tensor, name: str, experts: ExpertsConfig) -> torch.Tensor:
        """Send each token to ``per_token`` experts, chosen by biased sigmoids and weighted by unbiased ones (arXiv:2412.19437, §2.1.2)."""
        affinity_NE = F.linear(x_ND, self.weights[f"{name}.gate.weight"]).sigmoid()
        chosen_NP = (affinity_NE + self.weights[f"{name}.gate.e_score_correction_bias"]).topk(experts.per_token).indices
        weight_NP = affinity_NE.gather(1, chosen_NP)
        weight_NP = weight_NP / (weight_NP.sum(1, keepdim=True) + 1e-20)
        y_ND = self._swiglu(x_ND, f"{name}.shared_experts")
        for expert in chosen_NP.unique().tolist():
            token_M, place_M = (chosen_NP == expert).nonzero(as_tuple=True)
            out_MD = self._swiglu(x_ND[token_M], f"{name}.experts.{expert}")
            y_ND[token_M] += weight_NP[token_M, place_M, None] * out_MD
        return y_ND

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _rotate(x_NHK: torch.Tensor, cos_N1K: torch.Tensor, sin_N1K: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to the two halves of each head. In ``sin_N1K``, the sines of the first half are negated."""
    return torch.addcmul(x_NHK * cos_N1K, x_NHK.roll(x_NHK.shape[-1] // 2, -1), sin_N1K)
