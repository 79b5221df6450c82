"""What is to be reached, in one table: ``page`` shows each number beside its aim, and ``tests/gpu`` fails below it."""

from __future__ import annotations

# op → share of its floor (``fast.floor``), forward and backward, at width 4096: of copy bandwidth where it moves memory, of the product rate
# where it multiplies. quack reaches about 0.9 of 3.35 TB/s with RMSNorm, softmax and cross-entropy on an H100.
SHARES = {
    "rms_norm": 0.85,
    "add_rms_norm": 0.85,
    "swiglu": 0.85,
    "qk_norm_rope": 0.80,
    "embedding": 0.50,
    "adamw": 0.85,
    "attention": 0.40,
    "linear_cross_entropy": 0.60,
    "general_attention": 0.20,
    "softcapped_cross_entropy": 0.45,
    "newton_schulz": 0.50,
}
AIM_WIDTH = 4096
HOST_WAITS = 1  # a step: its own transfer of the loss and all that hooks measured
FIRST_STEP_S = 60.0  # cold, of the 1 B model
MFU = {"1b": 0.50}  # of the data sheet's peak, bf16
MFU_ON = {"h200": {"1b": 0.60}}  # on cards that should do better
TOKENS_PER_S = {("0.6b", "h100"): 52_000.0}  # published for one H100: 26,005, at 16.8 % MFU
# (what, a published number, its unit, whose). Ours stand beside them in the report.
PUBLISHED = (
    ("rms_norm", "RMSNorm, softmax and cross-entropy: about 90 % of 3.35 TB/s on an H100 (quack)"),
    (
        "add_rms_norm",
        "fused add + RMSNorm: 2.92 TB/s at width 16k, and a fixed 0.3 ms of host time a call at width 1k (Liger-Kernel)",
    ),
    (
        "linear_cross_entropy",
        "cross-entropy alone, without the products, 8,192 × 131k, bf16, forward and backward: 7.96 ms (Liger-Kernel)",
    ),
    ("step", "0.6 B Qwen3 at context 8,192 on one H100: 26,005 tokens/s, 16.8 % MFU"),
)


def mfu_aim(model: str, card: str) -> float | None:
    """Of ``model`` (a name of ``benchmarks.gpu.models``) on a card of that name; None: none was set."""
    special = next((aims for key, aims in MFU_ON.items() if key in card.lower()), {})
    return special.get(model, MFU.get(model))


def tokens_aim(model: str, card: str) -> float | None:
    return next((aim for (name, key), aim in TOKENS_PER_S.items() if name == model and key in card.lower()), None)
