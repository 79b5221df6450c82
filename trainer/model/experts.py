"""Mixture of experts: a sigmoid router with top-k, and shared experts. No token is dropped, and only a bias balances the load.

The layer is that of DeepSeek-V3 (arXiv 2412.19437 §2.1.2), as ``Glm4MoeForCausalLM`` computes it. A token's affinity to an expert is the
sigmoid of its router logit. The bias affects which experts are chosen, but not their weights. The weights are the affinities of the chosen
experts, divided by their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contract.registry import Ops

LEAST_SUM = 1e-20  # least sum of the chosen affinities, as in Glm4Moe


@dataclass(frozen=True)
class TokenRouting:
    """The k experts of each of N tokens, and their weights."""

    experts_Nk: Tensor  # int64
    weights_Nk: Tensor  # fp32, each row sums to one
    logits_NE: Tensor  # fp32

    def count_tokens_per_expert(self, counts_N: Tensor) -> Tensor:
        """Number of tokens that go to each expert, fp32 [E]. Only tokens whose ``counts_N`` (bool) is true are counted."""
        E = self.logits_NE.shape[1]
        chosen_NkE = self.experts_Nk.unsqueeze(-1) == torch.arange(E, device=self.experts_Nk.device)
        return (chosen_NkE & counts_N[:, None, None]).sum((0, 1)).float()

    def z_loss(self, counts_N: Tensor) -> Tensor:
        """Σ logsumexp(logits)² over the tokens whose ``counts_N`` is true, an fp32 scalar (ST-MoE, arXiv 2202.08906, eq. 5 without its mean)."""
        return torch.where(counts_N, self.logits_NE.logsumexp(-1).square(), 0.0).sum()


def route_tokens(x_ND: Tensor, router_ED: Tensor, bias_E: Tensor, per_token: int) -> TokenRouting:
    """Choose ``per_token`` experts for each token. The computation is in fp32 for every dtype of x."""
    logits_NE = F.linear(x_ND.float(), router_ED.float())
    affinity_NE = logits_NE.sigmoid()
    experts_Nk = (affinity_NE.detach() + bias_E).topk(per_token, dim=-1).indices
    chosen_Nk = affinity_NE.gather(1, experts_Nk)
    return TokenRouting(experts_Nk, chosen_Nk / (chosen_Nk.sum(-1, keepdim=True) + LEAST_SUM), logits_NE)


def compute_expert_outputs(
    x_ND: Tensor, routing: TokenRouting, gate_EDF: Tensor, up_EDF: Tensor, down_EFD: Tensor, ops: Ops
) -> Tensor:
    """The outputs of the experts, [N, D]: for each token, the sum over its experts of weight · down(swiglu(gate, up)).

    Tokens are sorted by expert, so that each expert is one matrix product, and are then put back in place. No sum depends on the order in
    which threads run.
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
    """grouped_mm outside of compiled code: torch 2.11 to 2.13 can run it in fp32, but can trace it in bf16 only."""
    return F.grouped_mm(x_ND, weight_EDF, offs=offs)


def update_router_bias(bias_E: Tensor, load_E: Tensor, rate: float, skip: Tensor) -> None:
    """One step of load balancing, in place: raise the bias of experts with less than the mean load, and lower that of experts with more."""
    step = rate * (load_E.mean() - load_E).sign()
    bias_E.add_(torch.where(skip > 0, 0.0, step))
