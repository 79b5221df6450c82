"""The decoders of ``export_config`` in plain fp32 torch, for evaluation. They are slow and use no code of the trainer.

Each block has RMSNorm before both halves, grouped-query attention with RoPE in the rotate-half layout, and SwiGLU (Llama). Qwen3 also normalises
queries and keys (arXiv:2505.09388, §2). SmolLM3 has layers without RoPE. GLM-4-MoE sends each token to experts that a biased sigmoid chooses and an
unbiased sigmoid weights (arXiv:2412.19437, §2.1.2). Tests compare each decoder with transformers within 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from factory.evals.export_config import ExpertsConfig, ExportConfig
from factory.evals.export_folder import read_config, read_weights

LOGITS_AT_ONCE = 1 << 25  # floats; 128 MiB


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


class ReferenceModel:
    """A loaded export. For scoring, sequences are padded on the right, which does not change other positions.

    ``move_to`` moves the model to another device. Arguments and results stay on the CPU.
    """

    device = torch.device("cpu")

    def __init__(self, config: ExportConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = weights
        self.head_VD = weights["model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"]
        self.frequencies_K2 = config.rope_theta ** (
            -torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        )

    @classmethod
    def load(cls, folder: Path) -> ReferenceModel:
        """Load an export. Raises: ExportError unless it is a valid export of a supported architecture."""
        config = read_config(folder)
        return cls(config, read_weights(folder, config))

    def move_to(self, device: str | torch.device) -> ReferenceModel:
        """Move the model to ``device`` and return it."""
        self.device = torch.device(device)
        self.weights = {name: weight.to(self.device) for name, weight in self.weights.items()}
        self.head_VD, self.frequencies_K2 = self.head_VD.to(self.device), self.frequencies_K2.to(self.device)
        return self

    @torch.inference_mode()
    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [B, T, V] of int64 tokens [B, T]."""
        with self.device:
            return (self._hidden(tokens_BT.to(self.device)) @ self.head_VD.T).cpu()

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
            rows = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
            nll_BT, likeliest_BT = torch.zeros(tokens_BT.shape), torch.zeros(tokens_BT.shape, dtype=torch.bool)
            nats, likeliest = [], []
            for h, t in zip(hidden_ND.split(rows), targets_N.split(rows), strict=True):
                logits = h @ self.head_VD.T
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
            logits_TV = self._hidden(tokens[None, :-1])[0] @ self.head_VD.T
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
        config, rows, longest = self.config, len(prompts), max(map(len, prompts))
        total = longest + max_new_tokens
        tokens_BT = torch.zeros(rows, longest, dtype=torch.int64)
        real_BS = torch.ones(rows, total, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, longest - len(prompt) :] = torch.tensor(prompt)
            real_BS[row, : longest - len(prompt)] = False
        position_BS = (real_BS.long().cumsum(1) - 1).clamp(min=0)
        cache = torch.zeros(config.layers, 2, rows, config.kv_heads, total, config.head_dim)
        # A padded query must see something, or its softmax is 0/0: itself.
        causal_TS = torch.arange(total)[None, :] <= torch.arange(longest)[:, None]
        allowed_BTS = causal_TS[None] & (real_BS[:, None, :] | torch.eye(longest, total, dtype=torch.bool)[None])
        hidden = self._hidden(tokens_BT, position_BS[:, :longest], allowed_BTS, cache, 0)
        written: list[list[int]] = [[] for _ in prompts]
        ended = [False] * rows
        for at in range(longest, total):
            next_B = choose((hidden[:, -1] @ self.head_VD.T).cpu()).to(self.device)
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
            hidden = self._hidden(next_B[:, None], position_BS[:, at : at + 1], seen_B1S, cache, at)
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

    def _hidden(
        self,
        tokens_BT: torch.Tensor,
        position_BT: torch.Tensor | None = None,
        allowed_BTS: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        at: int = 0,
    ) -> torch.Tensor:
        """Return the output of the final norm [B, T, D]. Writes keys and values into ``cache`` [layers, 2, B, G, S, K] from column ``at`` on."""
        config, w = self.config, self.weights
        rows, length = tokens_BT.shape
        if position_BT is None:
            position_BT = torch.arange(length).expand(rows, length)
        angle_BTK = (position_BT[..., None].float() * self.frequencies_K2).repeat(1, 1, 2)
        cos, sin = angle_BTK.cos()[:, None], angle_BTK.sin()[:, None]
        mask = None if allowed_BTS is None else allowed_BTS[:, None]

        def heads(x_BTD: torch.Tensor, name: str, count: int) -> torch.Tensor:
            return F.linear(x_BTD, w[f"{name}_proj.weight"]).view(rows, length, count, config.head_dim).transpose(1, 2)

        x_BTD = F.embedding(tokens_BT, w["model.embed_tokens.weight"])
        for layer in range(config.layers):
            block = f"model.layers.{layer}."
            attention = block + "self_attn."
            y = self._norm(x_BTD, block + "input_layernorm")
            q, k = heads(y, attention + "q", config.heads), heads(y, attention + "k", config.kv_heads)
            if config.qk_norm:
                q, k = self._norm(q, attention + "q_norm"), self._norm(k, attention + "k_norm")
            if config.rope_layers[layer]:
                q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            v = heads(y, attention + "v", config.kv_heads)
            if cache is not None:
                cache[layer, 0, :, :, at : at + length], cache[layer, 1, :, :, at : at + length] = k, v
                k, v = cache[layer, 0], cache[layer, 1]
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            x_BTD = x_BTD + F.linear(o.transpose(1, 2).flatten(2), w[attention + "o_proj.weight"])
            y = self._norm(x_BTD, block + "post_attention_layernorm")
            experts = config.get_experts_of_layer(layer)
            mlp = block + "mlp"
            x_BTD = x_BTD + (self._swiglu(y, mlp) if experts is None else self._mixture(y, mlp, experts))
        return self._norm(x_BTD, "model.norm")

    def _swiglu(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def _mixture(self, x_BTD: torch.Tensor, name: str, experts: ExpertsConfig) -> torch.Tensor:
        x_ND = x_BTD.flatten(0, 1)
        affinity_NE = F.linear(x_ND, self.weights[f"{name}.gate.weight"]).sigmoid()
        ranked_NE = affinity_NE + self.weights[f"{name}.gate.e_score_correction_bias"]
        chosen_NE = torch.zeros_like(affinity_NE).scatter(1, ranked_NE.topk(experts.per_token).indices, 1.0)
        weight_NE = affinity_NE * chosen_NE
        weight_NE = weight_NE / (weight_NE.sum(1, keepdim=True) + 1e-20)
        y_ND = self._swiglu(x_ND, f"{name}.shared_experts")
        for expert in range(experts.count):
            at = chosen_NE[:, expert].nonzero()[:, 0]
            if len(at):
                y_ND[at] += weight_NE[at, expert, None] * self._swiglu(x_ND[at], f"{name}.experts.{expert}")
        return y_ND.view_as(x_BTD)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps) * self.weights[name + ".weight"]
        )


def _rotate(x_BHTK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x_BHTK.chunk(2, -1)
    return x_BHTK * cos + torch.cat((-second, first), -1) * sin
