"""The decoders of ``models.spec`` in plain fp32 torch, for evaluation. They are slow and use no code of the trainer.

A block is attention and an MLP, each added to the residual stream. Each fact of ``ModelSpec`` is computed where it stands in the formula, from the
tensors of ``models.tensors``. Tests compare each family of models with transformers within 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from factory.evals.export_folder import read_config, read_weights
from models.rope import compute_alibi_slopes, compute_rope_frequencies
from models.spec import ExpertsSpec, LayerSpec, ModelSpec

NORMS = {  # of a block, by ``ModelSpec.norms``
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_post_norm", "mlp_post_norm"),
    "sandwich": ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"),
}
LOGITS_AT_ONCE = 1 << 25  # floats; 128 MiB
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@dataclass(frozen=True)
class GeneratedTokens:
    tokens: list[int]  # without the stop token
    ended: bool  # before the limit


def choose_likeliest_tokens(logits_BV: torch.Tensor) -> torch.Tensor:
    """Return the likeliest tokens [B]."""
    return logits_BV.argmax(-1)


def never_finished(tokens: list[int]) -> bool:
    """Return False, so that only a stop token or the limit ends a text."""
    return False


@dataclass(frozen=True)
class GreedyContinuation:
    """The likeliest tokens after a prompt. Stop tokens do not end it."""

    tokens: list[int]
    logprobs: list[float]  # nats
    margins: list[
        float
    ]  # nats between the likeliest and the second token; if small, another correct program may choose the second


Turn = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [B, 1, T, head_dim / 2]


@dataclass(frozen=True)
class _Pass:
    """What the positions of the tokens [B, T] of a pass mean for the layers that differ in it."""

    turns: dict[str, Turn]  # of ``LayerSpec.rope``
    # By ``LayerSpec.window``: what is added to the scores [B, H or 1, T, S]: −∞ where a query does not see a key. None: it sees all keys before it.
    biases: dict[int | None, torch.Tensor | None]


class ReferenceModel:
    """A loaded model. For scoring, sequences are padded on the right, which does not change other positions.

    ``weights``: the fp32 tensors of ``models.tensors`` by name. ``move_to`` moves the model to another device. Arguments and results stay on the CPU.
    """

    device = torch.device("cpu")

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self.weights = weights
        self._use_weights()

    @classmethod
    def load(cls, folder: Path) -> ReferenceModel:
        """Load an export. Raises: ExportError unless it is a valid export of a supported family."""
        spec = read_config(folder)
        return cls(spec, read_weights(folder, spec))

    def move_to(self, device: str | torch.device) -> ReferenceModel:
        """Move the model to ``device`` and return it."""
        self.device = torch.device(device)
        self.weights = {name: weight.to(self.device) for name, weight in self.weights.items()}
        self._use_weights()
        return self

    def _use_weights(self) -> None:
        spec = self.spec
        self.head_VD = self.weights["embedding" if spec.tied else "head"]
        kinds: set[str] = {spec.layer(layer).rope for layer in range(spec.layers)}
        self.ropes = {kind: _make_rope(spec, kind, self.device) for kind in kinds - {"none"}}
        slopes = compute_alibi_slopes(spec.heads) if spec.position == "alibi" else None
        self.slopes_H = None if slopes is None else torch.tensor(slopes, device=self.device)

    @torch.inference_mode()
    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [B, T, V] of int64 tokens [B, T]."""
        with self.device:
            return self._head(self._hidden(tokens_BT.to(self.device))).cpu()

    def nll(self, tokens_BT: torch.Tensor, scored_BT: torch.Tensor) -> torch.Tensor:
        """Return the negative log-likelihood [B, T] in nats of each scored token, given the tokens before it; 0 for other tokens.

        Column 0 is never scored.
        """
        return self.score_tokens(tokens_BT, scored_BT)[0]

    @torch.inference_mode()
    def score_tokens(self, tokens_BT: torch.Tensor, scored_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (``nll``, bool [B, T]: whether the scored token is the likeliest)."""
        tokens_BT, scored_BT = tokens_BT.to(self.device), scored_BT.to(self.device)
        with self.device:
            hidden_ND = self._hidden(tokens_BT)[:, :-1][scored_BT[:, 1:]]
            targets_N = tokens_BT[:, 1:][scored_BT[:, 1:]]
            rows = max(1, LOGITS_AT_ONCE // self.spec.vocab_size)
            nll_BT, likeliest_BT = torch.zeros(tokens_BT.shape), torch.zeros(tokens_BT.shape, dtype=torch.bool)
            nats, likeliest = [], []
            for h, t in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True):
                logits = self._head(h)
                nats.append(F.cross_entropy(logits, t, reduction="none"))
                likeliest.append(logits.argmax(-1) == t)
            nll_BT[:, 1:][scored_BT[:, 1:]] = torch.cat(nats)
            likeliest_BT[:, 1:][scored_BT[:, 1:]] = torch.cat(likeliest)
        return nll_BT.cpu(), likeliest_BT.cpu()

    def measure_gradient_norm(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
        """Return (nats, norm of their gradient with respect to all weights) of a document.

        ``pieces``: (int64 tokens [T + 1], bool scored targets [T]) for each piece of the document.
        """
        wanted = [w.requires_grad_() for w in self.weights.values() if w.is_floating_point()]
        nats = torch.zeros(())
        for tokens, scored in pieces:
            logits_TV = self._head(self._hidden(tokens[None, :-1])[0])
            nats = nats + F.cross_entropy(logits_TV[scored], tokens[1:][scored], reduction="sum")
        gradients = torch.autograd.grad(nats, wanted, allow_unused=True)
        squares = torch.stack([g.square().sum() for g in gradients if g is not None])
        return float(nats.detach()), float(squares.sum().sqrt())

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: Collection[int],
        choose: Callable[[torch.Tensor], torch.Tensor] = choose_likeliest_tokens,
        finished: Callable[[list[int]], bool] = never_finished,
    ) -> list[GeneratedTokens]:
        """Return continuations of all prompts, generated as one batch.

        A continuation ends at its first ``stop`` token, when ``finished(tokens)`` is true, or at the limit. ``choose`` maps fp32 logits [B, V] on the
        CPU to the next tokens [B]. Prompts are padded on the left. Prompt and limit together may not exceed the model's context.
        """
        assert prompts and all(prompts)
        with self.device:
            return self._generate(prompts, max_new_tokens, stop, choose, finished)

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: Collection[int],
        choose: Callable[[torch.Tensor], torch.Tensor],
        finished: Callable[[list[int]], bool],
    ) -> list[GeneratedTokens]:
        spec, rows, longest = self.spec, len(prompts), max(map(len, prompts))
        total = longest + max_new_tokens
        tokens_BT = torch.zeros(rows, longest, dtype=torch.int64)
        real_BS = torch.ones(rows, total, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
            real_BS[row, : longest - len(prompt)] = False
        position_BS = (real_BS.long().cumsum(1) - 1).clamp(min=0)
        cache = [  # keys and values of each layer
            (
                torch.zeros(rows, spec.kv_heads, total, spec.head_dim),
                torch.zeros(rows, spec.kv_heads, total, spec.v_head_dim),
            )
            for _ in range(spec.layers)
        ]
        # A padded query must see something, or its softmax is 0/0: itself.
        causal_TS = torch.arange(total)[None, :] <= torch.arange(longest)[:, None]
        allowed_BTS = causal_TS[None] & (real_BS[:, None, :] | torch.eye(longest, total, dtype=torch.bool)[None])
        at_prompt = self._place(position_BS[:, :longest], position_BS, allowed_BTS)
        hidden = self._hidden(tokens_BT, at_prompt, cache, 0)
        written: list[list[int]] = [[] for _ in prompts]
        ended = [False] * rows
        for at in range(longest, total):
            next_B = choose(self._head(hidden[:, -1]).cpu()).to(self.device)
            for row, token in enumerate(next_B.tolist()):
                if ended[row]:
                    continue
                ended[row] = token in stop
                if not ended[row]:
                    written[row].append(token)
                    ended[row] = finished(written[row])
            if all(ended) or at == total - 1:
                break
            seen_B1S = (real_BS & (torch.arange(total) <= at))[:, None, :]
            at_next = self._place(position_BS[:, at : at + 1], position_BS, seen_B1S)
            hidden = self._hidden(next_B[:, None], at_next, cache, at)
        return [GeneratedTokens(tokens, end) for tokens, end in zip(written, ended, strict=True)]

    @torch.inference_mode()
    def continue_greedily(self, prompt: Sequence[int], count: int) -> GreedyContinuation:
        """Return the ``count`` likeliest tokens, with log-probabilities from one forward pass over all tokens.

        Prompt and tokens must fit into the context.
        """
        tokens = self.generate([prompt], count, stop=())[0].tokens
        logprobs_TV = self.logits(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1].log_softmax(-1)
        own_T = logprobs_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        best_T2 = logprobs_TV.topk(2).values
        return GreedyContinuation(tokens, own_T.tolist(), (best_T2[:, 0] - best_T2[:, 1]).tolist())

    # -- the model -----------------------------------------------------------------------------------------------------
    def _place(
        self, position_BT: torch.Tensor, position_BS: torch.Tensor, allowed_BTS: torch.Tensor | None = None
    ) -> _Pass:
        """``position_BT``: of the tokens of a pass. ``position_BS``: of the columns of the cache, or of the pass itself.

        ``allowed_BTS``: which columns a token may see; None: itself and all before it.
        """
        layers = [self.spec.layer(number) for number in range(self.spec.layers)]
        angles = {
            kind: (position_BT[:, None, :, None].float() * frequency_K2, factor_K2)
            for kind, (frequency_K2, factor_K2) in self.ropes.items()
        }
        turns = {kind: (angle.cos() * factor, angle.sin() * factor) for kind, (angle, factor) in angles.items()}
        distance_BTS = position_BT[:, :, None] - position_BS[:, None, :]
        biases = {
            window: self._make_bias(window, distance_BTS, allowed_BTS) for window in {one.window for one in layers}
        }
        return _Pass(turns, biases)

    def _make_bias(
        self, window: int | None, distance_BTS: torch.Tensor, allowed_BTS: torch.Tensor | None
    ) -> torch.Tensor | None:
        spec = self.spec
        needs_scores = spec.attention_softcap is not None or spec.attention_sinks or self.slopes_H is not None
        if allowed_BTS is None and window is None and not needs_scores:
            return None
        seen_BTS = distance_BTS >= 0 if allowed_BTS is None else allowed_BTS
        if window is not None:
            seen_BTS = seen_BTS & (distance_BTS < window)
        bias_BHTS = torch.zeros(seen_BTS.shape, device=seen_BTS.device).masked_fill_(~seen_BTS, -torch.inf)[:, None]
        if self.slopes_H is not None:  # ALiBi (arXiv 2108.12409)
            bias_BHTS = bias_BHTS - self.slopes_H[:, None, None] * distance_BTS[:, None]
        return bias_BHTS

    def _hidden(
        self,
        tokens_BT: torch.Tensor,
        at: _Pass | None = None,
        cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        column: int = 0,
    ) -> torch.Tensor:
        """Return the output of the final norm [B, T, D]. Writes keys and values into ``cache`` from ``column`` on."""
        spec = self.spec
        if at is None:
            position_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand(tokens_BT.shape)
            at = self._place(position_BT, position_BT)
        x_BTD = F.embedding(tokens_BT, self.weights["embedding"]) * (spec.embedding_scale or 1.0)
        if spec.embedding_norm:
            x_BTD = self._norm(x_BTD, None)
        for number in range(spec.layers):
            block, layer = f"blocks.{number}.", spec.layer(number)

            def normed(name: str, x: torch.Tensor, block: str = block) -> torch.Tensor:
                """Return ``x`` after the norm, if the block has one of this name."""
                return self._norm(x, block + name) if name in NORMS[spec.norms] else x

            held = None if cache is None else cache[number]
            y_BTD = self._attention(normed("attention_norm", x_BTD), block, layer, at, held, column)
            x_BTD = x_BTD + normed("attention_post_norm", y_BTD)
            y_BTD = normed("mlp_norm", x_BTD)
            y_BTD = self._mlp(y_BTD, block) if layer.experts is None else self._mixture(y_BTD, block, layer.experts)
            x_BTD = x_BTD + normed("mlp_post_norm", y_BTD)
        return self._norm(x_BTD, "final_norm")

    def _head(self, hidden_D: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of hidden vectors [..., D]."""
        logits_V = hidden_D * self.spec.mup_width_ratio @ self.head_VD.T
        return _cap(logits_V, self.spec.logit_softcap)

    def _attention(
        self,
        x_BTD: torch.Tensor,
        block: str,
        layer: LayerSpec,
        at: _Pass,
        cache: tuple[torch.Tensor, torch.Tensor] | None,
        column: int,
    ) -> torch.Tensor:
        project = self._project_latent if self.spec.latent else self._project
        q_BHTK, k_BGTK, v_BGTV = project(x_BTD, block, at.turns.get(layer.rope))
        if cache is not None:
            for held, new in zip(cache, (k_BGTK, v_BGTV), strict=True):
                held[:, :, column : column + new.shape[2]] = new
            k_BGTK, v_BGTV = cache
        o_BHTV = self._attend(q_BHTK, k_BGTK, v_BGTV, block, at.biases[layer.window])
        return self._linear(o_BHTV.transpose(1, 2).flatten(2), block + "attention_out")

    def _project(
        self, x_BTD: torch.Tensor, block: str, turn: Turn | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        q, k, v = (self._linear(x_BTD, block + name) for name in "qkv")
        if spec.qk_norm == "whole":  # all heads of a token together
            q, k = self._norm(q, block + "q_norm"), self._norm(k, block + "k_norm")
        q, k, v = (x.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2) for x in (q, k, v))
        if spec.qk_norm is True:
            q, k = self._norm(q, block + "q_norm"), self._norm(k, block + "k_norm")
        return _rotate(q, turn), _rotate(k, turn), v

    def _project_latent(
        self, x_BTD: torch.Tensor, block: str, turn: Turn | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Multi-head latent attention (arXiv 2405.04434, §2.1), without its shorter cache: keys and values are made for all heads."""
        spec, latent = self.spec, self.spec.latent
        assert latent is not None
        compressed_BTR = x_BTD
        if latent.q_rank is not None:
            compressed_BTR = self._norm(self._linear(x_BTD, block + "q_down"), block + "q_down_norm")
        q_BHTK = self._linear(compressed_BTR, block + "q").unflatten(-1, (spec.heads, spec.head_dim)).transpose(1, 2)
        q_still, q_turning = q_BHTK.split((latent.nope_head_dim, latent.rope_head_dim), -1)
        q_BHTK = torch.cat((q_still, _rotate(q_turning, turn)), -1)
        kv_BTR, k_turning_BTK = self._linear(x_BTD, block + "kv_down").split((latent.kv_rank, latent.rope_head_dim), -1)
        kv = self._linear(self._norm(kv_BTR, block + "kv_down_norm"), block + "kv_up")
        k_still, v_BHTV = (
            kv.unflatten(-1, (spec.heads, -1)).transpose(1, 2).split((latent.nope_head_dim, latent.v_head_dim), -1)
        )
        k_turning = _rotate(k_turning_BTK[:, None], turn).expand(-1, spec.heads, -1, -1)
        return q_BHTK, torch.cat((k_still, k_turning), -1), v_BHTV

    def _attend(
        self,
        q_BHTK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSV: torch.Tensor,
        block: str,
        bias_BHTS: torch.Tensor | None,
    ) -> torch.Tensor:
        spec = self.spec
        scale = spec.attention_scale or spec.head_dim**-0.5
        if spec.attention_softcap is None and not spec.attention_sinks:
            return F.scaled_dot_product_attention(
                q_BHTK, k_BGSK, v_BGSV, attn_mask=bias_BHTS, is_causal=bias_BHTS is None, scale=scale, enable_gqa=True
            )
        assert bias_BHTS is not None
        rows = []
        for row, q_HTK in enumerate(q_BHTK):  # one at a time: the scores of a row need much memory
            k_HSK, v_HSV = (x[row].repeat_interleave(spec.heads // spec.kv_heads, 0) for x in (k_BGSK, v_BGSV))
            scores_HTS = _cap(q_HTK @ k_HSK.transpose(1, 2) * scale, spec.attention_softcap)
            scores_HTS = scores_HTS + bias_BHTS[row]
            if spec.attention_sinks:  # a share of the attention that adds nothing
                sink_HT1 = self.weights[block + "sinks"][:, None, None].expand(-1, scores_HTS.shape[1], 1)
                rows.append(torch.cat((scores_HTS, sink_HT1), -1).softmax(-1)[..., :-1] @ v_HSV)
            else:
                rows.append(scores_HTS.softmax(-1) @ v_HSV)
        return torch.stack(rows)

    def _mlp(self, x: torch.Tensor, block: str) -> torch.Tensor:
        activation = ACTIVATIONS[self.spec.activation]
        up = self._linear(x, block + "up")
        inner = activation(self._linear(x, block + "gate")) * up if self.spec.gated else activation(up)
        return self._linear(inner, block + "down")

    def _mixture(self, x_BTD: torch.Tensor, block: str, experts: ExpertsSpec) -> torch.Tensor:
        """Send each token to its experts (arXiv 2412.19437, §2.1.2; softmax: arXiv 2505.09388, §2)."""
        w, x_ND = self.weights, x_BTD.flatten(0, 1)
        scores_NE = F.linear(x_ND, w[block + "router"], w.get(block + "router_logits_bias"))
        affinity_NE = scores_NE.sigmoid() if experts.scores == "sigmoid" else scores_NE.softmax(-1)
        ranked_NE = affinity_NE + w.get(block + "router_bias", torch.zeros(()))
        if experts.groups > 1:  # a group's rank is the sum of its two best experts
            ranked_NGE = ranked_NE.unflatten(1, (experts.groups, -1))
            best_NG = ranked_NGE.topk(2).values.sum(-1).topk(experts.groups_per_token).indices
            other_NG = torch.ones(ranked_NGE.shape[:2], dtype=torch.bool).scatter(1, best_NG, False)
            ranked_NE = ranked_NGE.masked_fill(other_NG[..., None], -torch.inf).flatten(1)
        chosen_NE = torch.zeros_like(affinity_NE).scatter(1, ranked_NE.topk(experts.per_token).indices, 1.0)
        weight_NE = affinity_NE * chosen_NE
        if experts.normalise:
            weight_NE = weight_NE / (weight_NE.sum(1, keepdim=True) + 1e-20)
        weight_NE = weight_NE * experts.scale
        y_ND = torch.zeros_like(x_ND)
        if experts.shared:
            y_ND = y_ND + _swiglu(x_ND, *(w[f"{block}shared_{part}"] for part in ("gate", "up", "down")))
        for expert in range(experts.count):
            at = chosen_NE[:, expert].nonzero()[:, 0]
            if len(at):
                y_ND[at] += weight_NE[at, expert, None] * self._expert(x_ND[at], block, expert, experts)
        return y_ND.view_as(x_BTD)

    def _expert(self, x_MD: torch.Tensor, block: str, expert: int, experts: ExpertsSpec) -> torch.Tensor:
        def product(x: torch.Tensor, part: str) -> torch.Tensor:
            bias = self.weights[f"{block}experts_{part}_bias"].view(experts.count, -1)[expert] if experts.bias else None
            return F.linear(x, self.weights[f"{block}experts_{part}"][expert], bias)

        gate, up = product(x_MD, "gate"), product(x_MD, "up")
        if experts.clamp is None:
            return product(F.silu(gate) * up, "down")
        gate, up = gate.clamp(max=experts.clamp), up.clamp(-experts.clamp, experts.clamp)
        return product(gate * torch.sigmoid(experts.clamp_alpha * gate) * (up + 1), "down")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[name], self.weights.get(name + "_bias"))

    def _norm(self, x: torch.Tensor, name: str | None) -> torch.Tensor:
        """RMSNorm (arXiv 1910.07467). Without a name it has no weight."""
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        if name is None or not self.spec.norm_weights:
            return x
        return x * (self.weights[name] + 1 if self.spec.norm_plus_one else self.weights[name])


def _make_rope(spec: ModelSpec, kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the radians a position of each pair of dimensions, and the factor of its cosine and sine: 1 for a pair that does not turn."""
    frequency_K2, factor = compute_rope_frequencies(spec, kind)
    factor_K2 = torch.where(frequency_K2 == 0, 1.0, factor)
    return frequency_K2.to(device), factor_K2.to(device)


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Soft-capping (arXiv 2408.00118, §2)."""
    return x if cap is None else cap * torch.tanh(x / cap)


def _rotate(x_BHTK: torch.Tensor, turn: Turn | None) -> torch.Tensor:
    """Turn dimension i of each head with dimension i + head_dim / 2. None: the layer has no RoPE."""
    if turn is None:
        return x_BHTK
    cos, sin = turn
    first, second = x_BHTK.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
