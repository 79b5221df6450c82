"""Mixture of experts without dropped tokens: a sigmoid router, top-k, shared experts, balanced by a bias only.

DeepSeek-V3 (arXiv 2412.19437) §2.1.2, as ``Glm4MoeForCausalLM`` computes it. An expert's affinity is the sigmoid of its logit. The bias
decides which experts are chosen, never their weights. The chosen affinities are divided by their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.registry import Ops

LEAST_SUM = 1e-20  # least sum of the chosen affinities, as in Glm4Moe


@dataclass(frozen=True)
class Routing:
    """The experts of N tokens, k each."""

    experts_Nk: Tensor  # int64
    weights_Nk: Tensor  # fp32, each row sums to one
    logits_NE: Tensor  # fp32

    def tokens_per_expert(self, counts_N: Tensor) -> Tensor:
        """Tokens at each expert, fp32 [E], of those where ``counts_N`` (bool) is true."""
        E = self.logits_NE.shape[1]
        chosen_NkE = self.experts_Nk.unsqueeze(-1) == torch.arange(E, device=self.experts_Nk.device)
        return (chosen_NkE & counts_N[:, None, None]).sum((0, 1)).float()

    def z_loss(self, counts_N: Tensor) -> Tensor:
        """Σ logsumexp(logits)² over the tokens that count, fp32 (ST-MoE, arXiv 2202.08906, eq. 5 without its mean)."""
        return torch.where(counts_N, self.logits_NE.logsumexp(-1).square(), 0.0).sum()


def route_tokens(x_ND: Tensor, router_ED: Tensor, bias_E: Tensor, per_token: int) -> Routing:
    """Choose each token's experts. Computed in fp32 for every dtype of x."""
    logits_NE = F.linear(x_ND.float(), router_ED.float())
    affinity_NE = logits_NE.sigmoid()
    experts_Nk = (affinity_NE.detach() + bias_E).topk(per_token, dim=-1).indices
    chosen_Nk = affinity_NE.gather(1, experts_Nk)
    return Routing(experts_Nk, chosen_Nk / (chosen_Nk.sum(-1, keepdim=True) + LEAST_SUM), logits_NE)


def mix_experts(x_ND: Tensor, routing: Routing, gate_EDF: Tensor, up_EDF: Tensor, down_EFD: Tensor, ops: Ops) -> Tensor:
    """Σ over a token's experts of weight · down(swiglu(gate, up)); gate, up [E, D, F], down [E, F, D]. Returns [N, D].

    Tokens are sorted by expert, so that each expert is one matrix product, and put back in place: nothing is summed in
    an order that could change.
    """
    N, k = routing.experts_Nk.shape
    flat = routing.experts_Nk.flatten()
    order = flat.argsort(stable=True)
    ends_E = (flat.unsqueeze(1) == torch.arange(gate_EDF.shape[0], device=flat.device)).sum(0).cumsum(0).int()
    x = x_ND[order // k]
    by_expert = F.grouped_mm if x.dtype == torch.bfloat16 else _uncompiled
    gate, up = by_expert(x, gate_EDF, offs=ends_E), by_expert(x, up_EDF, offs=ends_E)
    y = by_expert(ops.swiglu(gate, up), down_EFD, offs=ends_E)
    y_NkD = y[order.argsort()].view(N, k, -1)
    return (y_NkD * routing.weights_Nk.to(y.dtype).unsqueeze(-1)).sum(1)


@torch.compiler.disable
def _uncompiled(x_ND: Tensor, weight_EDF: Tensor, offs: Tensor) -> Tensor:
    """torch runs grouped_mm in fp32 but traces it in bf16 only (2.11 to 2.13)."""
    return F.grouped_mm(x_ND, weight_EDF, offs=offs)


def update_bias(bias_E: Tensor, load_E: Tensor, rate: float, skip: Tensor) -> None:
    """One step of balancing, in place: up for experts with less than the mean load, down for those with more."""
    step = rate * (load_E.mean() - load_E).sign()
    bias_E.add_(torch.where(skip > 0, 0.0, step))
