"""Mixture of experts: a router with top-k, and shared experts. No token is dropped.

The layer is that of DeepSeek-V3 (arXiv 2412.19437 §2.1.2), as ``DeepseekV3ForCausalLM`` and ``Glm4MoeForCausalLM`` compute it, or with softmax
scores that of Qwen3-MoE (arXiv 2505.09388 §2). A token's affinity to an expert is the sigmoid of its router logit, or the softmax of its logits. A
bias affects which experts are chosen, but not their weights. The weights are the affinities of the chosen experts, divided by their sum. The load is
balanced by the bias, or by a loss of each row of the batch (``TokenRouting.balance_loss``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.registry import Ops
from models.spec import GROUPED_MULTIPLE, ExpertsSpec

LEAST_SUM = 1e-20  # least sum of the chosen affinities, as in Glm4Moe


@dataclass(frozen=True)
class TokenRouting:
    """The k experts of each of N tokens, and their weights."""

    experts_Nk: Tensor  # int64
    weights_Nk: Tensor  # fp32
    logits_NE: Tensor  # fp32
    affinity_NE: Tensor  # fp32

    def list_chosen_experts(self, counts_N: Tensor) -> Tensor:
        """[N, k, E] bool: which expert each choice is. Nothing is chosen by tokens whose ``counts_N`` (bool) is false."""
        E = self.logits_NE.shape[1]
        chosen_NkE = self.experts_Nk.unsqueeze(-1) == torch.arange(E, device=self.experts_Nk.device)
        return chosen_NkE & counts_N[:, None, None]

    def count_tokens_per_expert(self, counts_N: Tensor) -> Tensor:
        """Number of tokens that go to each expert, fp32 [E]. Only tokens whose ``counts_N`` (bool) is true are counted."""
        return self.list_chosen_experts(counts_N).sum((0, 1)).float()

    def z_loss(self, counts_N: Tensor) -> Tensor:
        """Σ logsumexp(logits)² over the tokens whose ``counts_N`` is true, an fp32 scalar (ST-MoE, arXiv 2202.08906, eq. 5 without its mean)."""
        return torch.where(counts_N, self.logits_NE.logsumexp(-1).square(), 0.0).sum()

    def balance_loss(self, counts_BT: Tensor) -> Tensor:
        """Σ over the rows of E · Σ_e f_e · P_e, an fp32 scalar. A row with an even load has 1, and one without tokens has 0.

        f_e: the share of a row's choices that are expert e. P_e: the mean over its tokens of e's share of a token's affinities. Switch (arXiv
        2101.03961 §2.2) has this loss for a batch, DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20) for a sequence. For a row it does not depend on
        how micro-batches and ranks divide the batch.
        """
        (B, T), E = counts_BT.shape, self.logits_NE.shape[1]
        chosen_BE = self.list_chosen_experts(counts_BT.flatten()).view(B, -1, E).sum(1).float()
        share_BTE = (self.affinity_NE / (self.affinity_NE.sum(-1, keepdim=True) + LEAST_SUM)).view(B, T, E)
        shares_BE = torch.where(counts_BT.unsqueeze(-1), share_BTE, 0.0).sum(1)
        tokens_B1 = counts_BT.sum(1, keepdim=True).clamp(min=1)
        return E * (chosen_BE / chosen_BE.sum(1, keepdim=True).clamp(min=1) * shares_BE / tokens_B1).sum()


def score_by_sigmoid(logits_NE: Tensor) -> Tensor:
    return logits_NE.sigmoid()


def score_by_softmax(logits_NE: Tensor) -> Tensor:
    return logits_NE.softmax(-1)


SCORES = {"sigmoid": score_by_sigmoid, "softmax": score_by_softmax}


def route_tokens(
    x_ND: Tensor,
    router_ED: Tensor,
    bias_E: Tensor | None,
    experts: ExpertsSpec,
    logits_bias_E: Tensor | None = None,
) -> TokenRouting:
    """Choose ``experts.per_token`` experts for each token. The computation is in fp32 for every dtype of x. ``bias_E``: of the choice."""
    logits_NE = F.linear(x_ND.float(), router_ED.float(), None if logits_bias_E is None else logits_bias_E.float())
    affinity_NE = SCORES[experts.scores](logits_NE)
    wanted_NE = affinity_NE.detach() if bias_E is None else affinity_NE.detach() + bias_E
    if experts.groups > 1:
        wanted_NE = keep_best_groups(wanted_NE, experts.groups, experts.groups_per_token)
    experts_Nk = wanted_NE.topk(experts.per_token, dim=-1).indices
    weights_Nk = affinity_NE.gather(1, experts_Nk)
    if experts.normalise:
        weights_Nk = weights_Nk / (weights_Nk.sum(-1, keepdim=True) + LEAST_SUM)
    if experts.scale != 1:
        weights_Nk = weights_Nk * experts.scale
    return TokenRouting(experts_Nk, weights_Nk, logits_NE, affinity_NE)


def keep_best_groups(wanted_NE: Tensor, groups: int, chosen: int) -> Tensor:
    """-inf for experts outside of a token's ``chosen`` best groups. A group counts as its two best experts together (DeepSeek-V3 §2.1.2).

    >>> keep_best_groups(torch.tensor([[0.9, 0.0, 0.5, 0.6]]), groups=2, chosen=1)
    tensor([[  -inf,   -inf, 0.5000, 0.6000]])
    """
    wanted_Nge = wanted_NE.unflatten(1, (groups, -1))
    best_Nc = wanted_Nge.topk(2, dim=-1).values.sum(-1).topk(chosen, dim=-1).indices
    kept_Ng = (best_Nc.unsqueeze(-1) == torch.arange(groups, device=wanted_NE.device)).any(1)
    return torch.where(kept_Ng.unsqueeze(-1), wanted_Nge, float("-inf")).flatten(1)


def measure_routing(routing: TokenRouting, holds_BT: Tensor, experts: ExpertsSpec) -> Tensor:
    """The extras of a layer (``Block``): Σ z², with ``balance: loss`` the loss of the balance, and the number of tokens at each expert, in fp32."""
    holds_N = holds_BT.flatten()
    parts = [routing.z_loss(holds_N)[None], routing.count_tokens_per_expert(holds_N)]
    if experts.balance == "loss":
        parts.insert(1, routing.balance_loss(holds_BT)[None])
    return torch.cat(parts)


def apply_gate(gate: Tensor, up: Tensor, experts: ExpertsSpec, ops: Ops) -> Tensor:
    """What an expert computes of its gate and up: SwiGLU, or with ``experts.clamp`` that of gpt-oss (arXiv 2508.10925)."""
    if experts.clamp is None:
        return ops.swiglu(gate, up)
    gate, up = gate.clamp(max=experts.clamp), up.clamp(-experts.clamp, experts.clamp)
    return gate * (gate * experts.clamp_alpha).sigmoid() * (up + 1)


def append_bias(weight_EXY: Tensor, bias_EX: Tensor) -> Tensor:
    """[E, X, Y + 8]: each expert's matrix with its bias as one more column, and zeros, because grouped products need such a width.

    With a one behind each row that it multiplies (``append_one``), the product adds the bias. The gradient of a bias is then a product too, whose sum
    does not depend on the order of threads.
    """
    bias_EX1 = bias_EX.view(len(weight_EXY), -1, 1)
    zeros = bias_EX1.new_zeros(1, 1, 1).expand(*bias_EX1.shape[:2], GROUPED_MULTIPLE - 1)
    return torch.cat((weight_EXY, bias_EX1, zeros), 2)


def append_one(x_NY: Tensor, weight_EYX: Tensor) -> Tensor:
    """A one and zeros behind each row, as many as the matrices have more inputs."""
    more = weight_EYX.shape[1] - x_NY.shape[1]
    if not more:
        return x_NY
    one = torch.arange(more, device=x_NY.device).eq(0).to(x_NY.dtype)
    return torch.cat((x_NY, one.expand(len(x_NY), -1)), 1)


def compute_expert_outputs(
    x_ND: Tensor,
    routing: TokenRouting,
    gate_EDF: Tensor,
    up_EDF: Tensor,
    down_EFD: Tensor,
    experts: ExpertsSpec,
    ops: Ops,
) -> Tensor:
    """The outputs of the experts, [N, D]: for each token, the sum over its experts of weight · down(``apply_gate``(gate, up)).

    A matrix that has more inputs than the tokens have values ends with its bias (``append_bias``). Tokens are sorted by expert, so that each expert
    is one matrix product, and are then put back in place. No sum depends on the order in which threads run.
    """
    N, k = routing.experts_Nk.shape
    flat = routing.experts_Nk.flatten()
    order = flat.argsort(stable=True)
    ends_E = (flat.unsqueeze(1) == torch.arange(gate_EDF.shape[0], device=flat.device)).sum(0).cumsum(0).int()
    x = append_one(x_ND[order // k], gate_EDF)
    by_expert = F.grouped_mm if x.dtype == torch.bfloat16 else _uncompiled
    gate, up = by_expert(x, gate_EDF, offs=ends_E), by_expert(x, up_EDF, offs=ends_E)
    y = by_expert(append_one(apply_gate(gate, up, experts, ops), down_EFD), down_EFD, offs=ends_E)
    y_NkD = y[order.argsort()].view(N, k, -1)
    return (y_NkD * routing.weights_Nk.to(y.dtype).unsqueeze(-1)).sum(1)


@torch.compiler.disable
def _uncompiled(x_ND: Tensor, weight_EDF: Tensor, offs: Tensor) -> Tensor:
    """grouped_mm outside of compiled code: torch 2.11 to 2.13 can run it in fp32, but can trace it in bf16 only."""
    return F.grouped_mm(x_ND, weight_EDF, offs=offs)


def update_router_bias(bias_E: Tensor, load_E: Tensor, rate: float, skip: Tensor) -> None:
    """One step of load balancing, in place: raise the bias of experts with less than the mean load, and lower that of experts with more."""
    step = rate * (load_E.mean() - load_E).sign()
    bias_E.add_(torch.where(skip > 0, 0.0, step))
