"""Commits that the benchmark of the preflight trains with: honest refactors, which change only how numbers are rounded, and faults of a chosen size.

An edit is (path, old text, new text). ``{size}`` in the new text of a fault is its relative size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Edit = tuple[str, str, str]

# Implementations of ops that compute the same in another way. Ops that are not named run their reference.
FUSED: Mapping[str, str] = {
    "attention": "recompute",
    "linear_cross_entropy": "chunked",
    "swiglu": "native",
    "adamw": "fused",
}
CPP: Mapping[str, str] = {
    "attention": "native",
    "linear_cross_entropy": "native",
    "swiglu": "native",
    "adamw": "reference",
}
SAVED: Mapping[str, str] = {
    "attention": "reference",
    "linear_cross_entropy": "saved_logits",
    "swiglu": "reference",
    "adamw": "reference",
}


@dataclass(frozen=True)
class HonestCode:
    """A refactor that an honest author might make. ``kernels``: the implementations that the recipe's machine chose, by op."""

    name: str
    edits: tuple[Edit, ...] = ()
    kernels: Mapping[str, str] = field(default_factory=lambda: FUSED)


HONEST = (
    HonestCode("as it is"),
    HonestCode("kernels in C++", kernels=CPP),
    HonestCode("saved logits, unfused AdamW", kernels=SAVED),
    HonestCode(
        "mean square: even elements, then odd ones",
        (
            (
                "kernels/rms_norm/__init__.py",
                "x.pow(2).mean(-1, keepdim=True)",
                "(x[..., ::2].pow(2).sum(-1, keepdim=True) + x[..., 1::2].pow(2).sum(-1, keepdim=True)) / x.shape[-1]",
            ),
        ),
    ),
    HonestCode(
        "products as the sum of two halves",
        (
            (
                "trainer/model/block.py",
                "[F.linear(h_BTD, weight) for weight in weights]",
                "[sum(F.linear(*pair) for pair in zip(h_BTD.chunk(2, -1), weight.chunk(2, -1))) for weight in weights]",
            ),
            (
                "trainer/run.py",
                '        if ranks.mesh is None and ranks.device.type == "cpu":\n            self.model.join_matrices()\n',
                "",
            ),
        ),
    ),
    HonestCode(
        "each matrix multiplied by itself",
        (
            (
                "trainer/run.py",
                '        if ranks.mesh is None and ranks.device.type == "cpu":\n            self.model.join_matrices()\n',
                "",
            ),
        ),
    ),
    HonestCode(
        "squares summed row by row",
        (
            (
                "trainer/optim/optimizer.py",
                "    return torch.stack(torch._foreach_norm(list(gradients.values()))).square()",
                "    return torch.stack([gradient.square().sum(-1).sum() for gradient in gradients.values()])",
            ),
        ),
    ),
    HonestCode(
        "loss by log_softmax",
        (
            (
                "kernels/linear_cross_entropy/__init__.py",
                "    nll_N = logsumexp_N - logits_NV.gather(1, targets_N.long().unsqueeze(1)).squeeze(1)\n    loss =",
                "    nll_N = -logits_NV.log_softmax(-1).gather(1, targets_N.long().unsqueeze(1)).squeeze(1)\n    loss =",
            ),
        ),
    ),
    HonestCode(
        "twice the micro-batches, last one first",
        (
            (
                "trainer/run.py",
                "        micro = self.recipe.batch.micro_sequences or rows\n",
                "        micro = max(1, (self.recipe.batch.micro_sequences or rows) // 2)\n",
            ),
            ("trainer/run.py", "enumerate(parts, start=1)", "enumerate(parts[::-1], start=1)"),
        ),
    ),
    HonestCode(
        "two threads on one rank, one thread on each of two",
        (
            (
                "trainer/run.py",
                "\n\nclass BatchSums:",
                '\ntorch.set_num_threads(1 if torch.distributed.is_torchelastic_launched() else 2)\n\n\nclass BatchSums:',
            ),
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A mistake that a preflight must refuse. ``part``: the part of the preflight that shows it. ``sizes``: relative; empty: it has one size."""

    name: str
    part: str
    edits: tuple[Edit, ...]
    sizes: tuple[str, ...] = ()


SIZES = ("1e-3", "1e-4", "3e-5", "1e-5", "3e-6")
FAULTS = (
    Fault(
        "a rank's gradient is too large",
        "ranks",
        (
            (
                "trainer/run.py",
                "        loss.backward()  # type",
                "        (loss * (1 + {size}) if self.ranks.rank else loss).backward()  # type",
            ),
        ),
        SIZES,
    ),
    Fault(
        "each rank divides by its own tokens: a sum for a mean",
        "ranks",
        (
            (
                "trainer/batch.py",
                "    supervised = sum(piece.supervised for row in rows for piece in row)\n",
                "    supervised = sum(piece.supervised for row in mine for piece in row)\n",
            ),
        ),
    ),
    Fault(
        "one of 4 micro-batches counts twice",
        "accumulation",
        (
            (
                "trainer/run.py",
                "        parts = batch.split_into_micro_batches(rows)\n",
                "        parts = batch.split_into_micro_batches(rows)\n        parts += parts[:1] if len(parts) > 1 else []\n"
                "        parts[-1] = dict(parts[-1])\n",
            ),
        ),
    ),
    Fault(
        "one of 4 micro-batches counts too much",
        "accumulation",
        (
            (
                "trainer/run.py",
                "        parts = batch.split_into_micro_batches(rows)\n",
                "        parts = batch.split_into_micro_batches(rows)\n        if len(parts) > 1:\n"
                '            parts[0]["weights_BT"] = parts[0]["weights_BT"] * (1 + {size})\n',
            ),
        ),
        SIZES,
    ),
    Fault(
        "a reference kernel's output is too large",
        "kernels",
        (
            (
                "kernels/swiglu/__init__.py",
                "    return F.silu(gate_XF) * up_XF\n",
                "    return F.silu(gate_XF) * up_XF * (1 + {size})\n",
            ),
        ),
        SIZES,
    ),
    Fault(
        "a kernel's gradient is too small",
        "kernels",
        (
            (
                "kernels/attention/__init__.py",
                "        return dq_BTHK, dk_BTGK, dv_BTGK, None",
                "        return dq_BTHK, dk_BTGK * (1 - {size}), dv_BTGK, None",
            ),
        ),
        SIZES,
    ),
    Fault(
        "a resume forgets the moments",
        "resume",
        (
            (
                "trainer/run.py",
                "self.optimizer.load_state_tensors(optimizer, untrained)",
                "self.optimizer.load_state_tensors({key: 0 * tensor for key, tensor in optimizer.items()})",
            ),
        ),
    ),
    Fault(
        "a resume forgets one tensor's second moment",
        "resume",
        (
            (
                "trainer/run.py",
                "self.optimizer.load_state_tensors(optimizer, untrained)",
                'self.optimizer.load_state_tensors(optimizer | {"exp_avg_sq.final_norm": 0 * optimizer["exp_avg_sq.final_norm"]}, untrained)',
            ),
        ),
    ),
    Fault(
        "a resume forgets the scale of the moments",
        "resume",
        (
            (
                "trainer/run.py",
                "self.optimizer.load_state_tensors(optimizer, untrained)",
                'self.optimizer.load_state_tensors({k: 0 * t if k.startswith("step.") else t for k, t in optimizer.items()}, untrained)',
            ),
        ),
    ),
)
