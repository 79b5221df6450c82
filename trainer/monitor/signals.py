"""Measures signs of trouble in layers, ranks and routers, which the loss shows late or never.

- One layer in turn, every fourth step (``UpdateMonitor.find_layer_to_measure``): the largest magnitude in its input, its largest attention
  logit, and the size of its update divided by the learning rate.
- Each rank's own gradient norm, before gradients are summed over ranks. FSDP sums the gradients of weights within the backward pass.
  Therefore the norm is taken of the gradient at the first layer's input, which depends on the backward passes of all layers.
- The balance of each expert layer: how evenly its tokens are spread over the experts.

The values of all ranks are part of the message between ranks, and of the transfer to the host, that the step makes anyway. Forward hooks at the
layers' inputs measure them, outside of compiled code. A replayed CUDA graph calls no forward hook. With graphs, the forward hooks only keep the
layers' inputs (``kept``), and ``measure_inputs`` measures them after the micro-batch.

Limits: only some queries of the batch's first row are used for the attention logit, with all of their keys. A fault in the backward pass of the
embedding, or in the sum over ranks, changes no rank's number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from models.tensors import MULTI_TOKEN
from trainer.contract.recipe import Recipe
from trainer.model.block import Block
from trainer.model.transformer import Decoder
from trainer.monitor.hook import Anomaly, StepHook, UpdateOutcome, WeightUpdate
from trainer.monitor.window import RecentValues, compute_median_and_deviation
from trainer.parallel.ranks import Ranks

QUERIES = 64  # number of queries of a row whose attention logits are computed
LOGIT_LIMIT = 100.0  # Kimi K2 clips attention logits from this value on: arXiv 2507.20534 §2.1
LEAST_BALANCE = 0.25  # limit for ``measure_expert_balance``, which is 1 if all experts are used alike and 0 if all tokens go to the same few
LEAST_CHANGE = 0.1  # least deviation of a logarithm: a small ripple of a quantity that hardly changes is not an anomaly
PAST, ENOUGH = (
    8,
    4,
)  # a value is compared with up to ``PAST`` earlier values of its layer or rank, and is judged from ``ENOUGH`` on
KINDS = {"update_ratio": "update_jump", "activation_max": "activation_jump", "attention_logit_max": "attention_logits"}


class LayerHistory:
    """The past values of one quantity of many parts (layers). It compares each new value with the past values of the same part. The unit is the usual
    change of all parts."""

    def __init__(self, window: int) -> None:
        self.past: dict[str, deque[float]] = {}
        self.changes = RecentValues(window)  # value / the median of its part's past, of all parts

    def observe(self, part: str, value: float) -> tuple[float, float] | None:
        """Add a value of a part. Returns (the part's usual value, robust deviations of its change above the usual change); None if not known yet."""
        if not (math.isfinite(value) and value > 0):
            return None
        past = self.past.setdefault(part, deque(maxlen=PAST))
        judged = None
        if len(past) >= ENOUGH:
            usual = median(past)
            if self.changes.is_half_full:
                center, deviation = compute_median_and_deviation([math.log(change) for change in self.changes.values])
                judged = usual, (math.log(value / usual) - center) / max(deviation, LEAST_CHANGE)
            self.changes.values.append(value / usual)
        past.append(value)
        return judged

    def state_dict(self) -> dict[str, Any]:
        return {"past": {part: list(held) for part, held in self.past.items()}, "changes": list(self.changes.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.past = {part: deque(held, maxlen=PAST) for part, held in state["past"].items()}
        self.changes.restore(state["changes"])


class RankGradNormHistory:
    """The past gradient norms of each rank. It compares a rank's change from its own past with the change of the other ranks at the same step."""

    def __init__(self, window: int) -> None:
        self.past: list[deque[float]] = []  # by rank
        self.spreads = RecentValues(
            window
        )  # for each step: the factor (at least 1) by which the rank that changed most moved away from the others

    def observe(self, norms: list[float]) -> tuple[int, float, float] | None:
        """Add the norms of a step. Returns (the rank that changed most, the factor by which it moved away from the others, robust deviations above
        the usual factor).

        Returns None if that is not known yet, or if a norm is zero or not finite. Example: if the norms of two ranks were 1 and 1, and are now 1
        and 5, rank 1 changed most, by a factor of 5.
        """
        if len(self.past) != len(norms):
            self.past = [deque(maxlen=PAST) for _ in norms]
            self.spreads.values.clear()
        if not all(math.isfinite(norm) and norm > 0 for norm in norms):
            return None
        judged = None
        if len(self.past[0]) >= ENOUGH:
            changes = [math.log(norm / median(past)) for norm, past in zip(norms, self.past)]
            rank = max(range(len(norms)), key=lambda r: abs(changes[r]))
            apart = abs(changes[rank] - median(changes[:rank] + changes[rank + 1 :]))
            if self.spreads.is_half_full:
                center, deviation = compute_median_and_deviation([math.log(spread) for spread in self.spreads.values])
                judged = rank, math.exp(apart), (apart - center) / max(deviation, LEAST_CHANGE)
            self.spreads.values.append(math.exp(apart))
        for norm, past in zip(norms, self.past):
            past.append(norm)
        return judged

    def state_dict(self) -> dict[str, Any]:
        return {"past": [list(held) for held in self.past], "spreads": list(self.spreads.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.past = [deque(held, maxlen=PAST) for held in state["past"]]
        self.spreads.restore(state["spreads"])


LayerInputs = dict[str, tuple[nn.Module, tuple[Any, ...]]]  # layer → (its module, its inputs)


class InstabilitySignals(StepHook):
    """The hook that measures these signs. The step also calls it before the forward pass (``begin_step``), and sums ``by_rank`` over the ranks."""

    key = "signals"
    required = False  # some checkpoints are older than this hook

    def __init__(self, recipe: Recipe, model: Decoder, ranks: Ranks) -> None:
        self.ranks = ranks
        self.deviations = recipe.stability.spike_deviations
        self.per_token = recipe.model.experts.per_token if recipe.model.experts is not None else 0
        self.layers = [f"blocks.{number}" for number in range(len(model.blocks))]
        self.expert_layers = [name for name, block in zip(self.layers, model.blocks) if block.experts is not None]
        self.expert_layers += [
            f"{MULTI_TOKEN}.{depth}"
            for depth in range(recipe.trained_multi_token_layers)
            if model.multi_token[depth].experts is not None
        ]
        self.turns = {name: LayerHistory(recipe.stability.window) for name in KINDS}
        self.norms = RankGradNormHistory(recipe.stability.window)
        self.reported: list[str] = []  # lasting states that were reported and still hold
        self.measured: dict[str, int] = {}  # layer → the last step that it was measured at
        self._layer: str | None = None  # to measure in the step that is under way
        self._first = False  # its first micro-batch is still to come
        # [ranks, 3]: Σ gradient² at the first layer's input, largest magnitude, largest attention logit. Only this rank's row
        # is not zero until the rows are summed over the ranks.
        self.by_rank = torch.zeros(ranks.size, 3, device=ranks.device)
        self._awaits_gradient = False
        self._rank_norms: list[float] = []
        self.kept: LayerInputs | None = None  # by layer; None: inputs are measured at once
        for name, block in zip(self.layers, model.blocks):
            block.register_forward_pre_hook(partial(self._look, name))

    def begin_step(self, layer: str | None) -> None:
        """Called before a step's forward pass. ``layer``: the layer to measure; None: no layer's turn."""
        self._layer, self._first = layer, True
        self.by_rank = torch.zeros_like(self.by_rank)

    def _look(self, name: str, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Called with the inputs of each layer: x_BSD, cos, sin, documents, and the documents as prepared for attention."""
        self._awaits_gradient |= self.ranks.size > 1 and name == self.layers[0]
        if (
            self._awaits_gradient and inputs[0].requires_grad
        ):  # later than at the first layer if the embedding is frozen
            inputs[0].register_hook(self._add_gradient)
            self._awaits_gradient = False
        if self.kept is not None:
            self.kept[name] = block, (inputs[0].detach(), *inputs[1:])
        elif name == self._layer:
            self._measure(block, inputs)

    def measure_inputs(self, kept: LayerInputs) -> None:
        """Measure the layer of this step from the inputs that the layers of a micro-batch had. Does nothing if its inputs are not among them."""
        if self._layer in kept:
            self._measure(*kept[self._layer])

    def _measure(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        own = self.by_rank[self.ranks.rank]
        with torch.no_grad():
            low, high = inputs[0].aminmax()
            own[1] = torch.maximum(own[1], torch.maximum(-low, high).float())
            if self._first and self.ranks.data_rank == 0:  # the same row in every layout
                own[2] = find_largest_attention_logit(block, *inputs[:4])  # type: ignore[arg-type]
        self._first = False

    @torch.no_grad()
    def _add_gradient(self, gradient: Tensor) -> None:
        self.by_rank[self.ranks.rank, 0] += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()

    @torch.no_grad()
    def after_update(self, update: WeightUpdate) -> dict[str, Tensor]:
        numbers = {"rank_squares": self.by_rank[:, 0]} if self.ranks.size > 1 else {}
        if self._layer in self.layers:
            numbers |= {f"activation_max/{self._layer}": self.by_rank[:, 1]}
            numbers |= {f"attention_logit_max/{self._layer}": self.by_rank[:, 2]}
        if update.load_LE is not None:
            numbers["balance"] = measure_expert_balance(update.load_LE, self.per_token)
        return numbers

    def record(self, numbers: dict[str, list[float]], outcome: UpdateOutcome) -> dict[str, Any]:
        """Returns ``activation_max/<layer>`` and ``attention_logit_max/<layer>`` of the measured layer, and ``router_balance/<layer>``.

        With several ranks also ``rank_grad_norm_ratio``: the largest gradient norm of a rank divided by the smallest.
        """
        found: dict[str, Any] = {name: find_max_or_nan(ranks) for name, ranks in numbers.items() if "_max/" in name}
        found |= {
            f"router_balance/{name}": value for name, value in zip(self.expert_layers, numbers.get("balance", ()))
        }
        if self.ranks.size > 1:
            self._rank_norms = [square**0.5 for square in numbers["rank_squares"]]
            found["rank_grad_norm_ratio"] = find_max_or_nan(self._rank_norms) / max(min(self._rank_norms), 1e-30)
        return found

    def after_step(self, record: dict[str, Any]) -> list[Anomaly]:
        step, skipped = record["step"], record["skipped"]
        return [*self._of_layer(step, record, skipped), *self._of_ranks(step, skipped), *self._of_routers(step, record)]

    def _of_layer(self, step: int, record: dict[str, Any], skipped: bool) -> Iterator[Anomaly]:
        """Anomalies of the layer that was measured. Their onset is the step after its previous measurement."""
        layers = set()
        for key, value in record.items():
            quantity, _, layer = key.partition("/")
            if quantity not in KINDS or (quantity == "update_ratio" and (skipped or record["lr"] == 0)):
                continue
            layers.add(layer)
            began = self.measured.get(layer, step - 1) + 1
            kind, where = KINDS[quantity], f"layer/{layer}"
            if quantity == "update_ratio":  # the rate changes by design, so the update is divided by it
                value /= record["lr"]
            judged = self.turns[quantity].observe(layer, value)
            if judged is not None and judged[1] > self.deviations:
                yield Anomaly(step, kind, value, *judged, skipped, began, where)
            elif quantity == "attention_logit_max" and self._is_new(f"{kind} {where}", value > LOGIT_LIMIT):
                yield Anomaly(step, kind, value, LOGIT_LIMIT, value / LOGIT_LIMIT, skipped, began, where)
        self.measured |= dict.fromkeys(layers, step)

    def _of_ranks(self, step: int, skipped: bool) -> Iterator[Anomaly]:
        judged = self.norms.observe(self._rank_norms) if self._rank_norms else None
        if judged is not None and judged[2] > self.deviations:
            rank, apart, deviations = judged
            yield Anomaly(step, "rank_grad_norm", apart, 1.0, deviations, skipped, step, f"rank/{rank}")

    def _of_routers(self, step: int, record: dict[str, Any]) -> Iterator[Anomaly]:
        for layer in self.expert_layers:
            value, where = record[f"router_balance/{layer}"], f"layer/{layer}"
            if self._is_new(f"router_collapse {where}", value < LEAST_BALANCE):
                share = value / LEAST_BALANCE
                yield Anomaly(step, "router_collapse", value, LEAST_BALANCE, share, record["skipped"], step, where)

    def _is_new(self, what: str, holds: bool) -> bool:
        """True if the state holds and was not reported since it began."""
        new = holds and what not in self.reported
        self.reported = [other for other in self.reported if other != what] + [what] * holds
        return new

    def state_dict(self) -> dict[str, Any]:
        return {
            "turns": {name: turns.state_dict() for name, turns in self.turns.items()},
            "measured": dict(self.measured),
            "ranks": self.norms.state_dict(),
            "reported": self.reported,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, turns in self.turns.items():
            turns.load_state_dict(state["turns"][name])
        self.measured = dict(state["measured"])
        self.norms.load_state_dict(state["ranks"])
        self.reported = list(state["reported"])


def find_max_or_nan(values: list[float]) -> float:
    """The largest value; NaN if any value is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values)


@torch.no_grad()
def find_largest_attention_logit(
    block: Block, x_BSD: Tensor, cos_BTK: Tensor, sin_BTK: Tensor, documents_BT: Tensor
) -> Tensor:
    """The largest attention logit of about ``QUERIES`` queries of the first row, or zero if all are negative. Returns an fp32 scalar.

    Only the heads of this rank are used. A logit is q · k · the scale of the scores, before a soft-cap, for a key that the query sees.
    """
    shape, tensor = block.shape, block.tensor
    h_1TD = tensor.gather(block.placement.start(block, x_BSD[:1]))
    q_1THK, k_1TGK, _ = block.attention.project(block, h_1TD, cos_BTK[:1], sin_BTK[:1])
    q_THK, k_TGK = q_1THK[0].float(), k_1TGK[0].float()
    places_T = torch.arange(len(q_THK), device=x_BSD.device)
    places_P = places_T[:: max(1, len(places_T) // QUERIES)]
    q_PGrK = q_THK[places_P].unflatten(1, (k_TGK.shape[1], -1))
    logits_GrPT = torch.einsum("pgrk,tgk->grpt", q_PGrK, k_TGK) * shape.head_dim**-0.5
    documents_T = documents_BT[0]
    documents_P1 = documents_T[places_P].unsqueeze(1)
    seen_PT = (documents_P1 == documents_T) & (documents_P1 >= 0) & (places_T <= places_P.unsqueeze(1))
    if block.visibility is not None and block.visibility.window is not None:
        seen_PT &= places_P.unsqueeze(1) - places_T < block.visibility.window
    return torch.where(seen_PT, logits_GrPT, 0.0).amax()


def measure_expert_balance(load_LE: Tensor, per_token: int) -> Tensor:
    """How evenly tokens are spread over E experts: fp32 [L], from 0 (all tokens go to the same few) to 1 (even). ``load_LE``: tokens at each expert.

    The balance is (exp(entropy) − k) / (E − k). exp(entropy) is the number of experts that would have the same entropy if used equally. Each token
    has k choices, so at least k experts are used. Example: 60 choices of 30 tokens, spread over 4 experts, and over the same 2 experts:

    >>> measure_expert_balance(torch.tensor([[15.0, 15.0, 15.0, 15.0], [30.0, 30.0, 0.0, 0.0]]), per_token=2)
    tensor([1., 0.])
    """
    experts = load_LE.shape[1]
    if experts == per_token:
        return torch.ones(len(load_LE), device=load_LE.device)
    share_LE = load_LE / load_LE.sum(1, keepdim=True)
    entropy_L = torch.special.entr(share_LE).sum(1)
    return ((entropy_L.exp() - per_token) / (experts - per_token)).clamp(0.0, 1.0)
