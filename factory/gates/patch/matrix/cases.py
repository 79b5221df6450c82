"""The runs of the matrix. A case has a recipe for a model of some hundred weights, a number of steps, and a start.

Each case executes code that no other case executes (``tests/factory/gates/patch/matrix/test_coverage.py`` counts lines). It makes the effect of that
code large: a z-loss of 0.1, an outlier at every step, a gradient clip that always acts. So a patch that changes or skips the code changes the results
by far more than rounding does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.contract.recipe import Recipe, copy_with_changed_keys

DOMAINS = ("chat", "code", "docs")
VOCABULARY = 64
BASE: dict[str, Any] = {
    "name": "run",
    "seed": 1,
    "precision": "fp32",
    "compile": False,
    "checkpoint_every": 2,
    "keep_checkpoints": 3,
    "model": {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "d_ff": 32,
        "context": 16,
    },
    "mixture": {"weights": {"code": 0.5, "docs": 0.3, "chat": 0.2}, "max_epochs": 1000},
    "batch": {"sequences": 4},
    "optimizer": {"lr": 1e-2, "weight_decay": 1.0},
    "schedule": {"warmup_steps": 3, "trunk_steps": {"first": 8, "later": 8}, "anneal_steps": 6},
    "stability": {"grad_clip": 0.5, "z_loss": 0.1, "noise_scale_every": 3, "window": 8},
}
EXPERTS = {"count": 4, "per_token": 2, "d_ff": 8, "bias_rate": 0.05, "z_loss": 0.1}
ROUNDING = 2e-4  # for fp32; the results of the factory's other kernels differ by 5e-5
Begin = Literal[
    "nothing", "trunk", "annealed", "half", "damaged", "far", "late", "outliers", "quiet", "poisoned", "broken"
]
SizedBegin = Literal["sized", "sized outliers"]  # of the runs in ``sized_cases``


@dataclass(frozen=True)
class MatrixCase:
    """One run.

    begin: the checkpoint at the start (``start_checkpoints.make_derived_checkpoints``). With ``half``, ``damaged`` and ``far`` the run resumes in an
        interrupted folder of its own. ``far`` is at a random step, tens of thousands of steps after the segment's first step.
    changes: dotted recipe keys whose values differ from ``BASE``.
    generations: the number of shard generations in the data plan.
    stop_after: the number of steps after which the trainer gets a request to stop, as by SIGTERM; 0: never.
    kernels: 'chosen' (by each side's kernels.yaml) or 'reference'.
    rounding: the largest difference that another rounding may cause, as a share of a number's scale. It is several times the difference that the
        factory's other kernels cause.
    totals: compare only the loss, the rate, and sums over all tensors of a kind, because rounding grows from step to step.
    """

    name: str
    begin: Begin | SizedBegin = "nothing"
    kind: Literal["trunk", "anneal"] = "trunk"
    steps: int = 6
    changes: Mapping[str, Any] = field(default_factory=dict)
    generations: int = 1
    rewarm: bool = False
    restart_data: bool = False
    stop_after: int = 0
    ranks: int = 1
    kernels: Literal["chosen", "reference"] = "chosen"
    rounding: float = ROUNDING
    totals: bool = False
    exit_code: int = 0  # 2: the run must be refused
    slow_threads: bool = False  # every thread starts late, so that writing a checkpoint takes longer than a step
    waits: bool = False  # the trainer starts with --wait, as in timed runs, and starts once more after its end
    first_step: int | None = None  # a first step that differs from the checkpoint's
    drawn_domains: bool = False  # four domains, whose names are drawn for each verdict, in place of ``DOMAINS``

    def make_recipe(self) -> dict[str, Any]:
        """Return the complete recipe."""
        return make_case_recipe(self.changes)


def make_case_recipe(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the complete, validated recipe: ``BASE`` with ``changes`` (dotted key → value)."""
    return Recipe.parse(copy_with_changed_keys(BASE, changes)).model_dump()


MUON_ROUNDING = 3e-2  # Muon's iteration is in bf16
BF16_ROUNDING = 5e-2
MUON = {"optimizer.name": "muon"}
BF16 = {"precision": "bf16"}
NARROW = {
    "model.d_model": 8,
    "model.heads": 1,
    "model.head_dim": 8,
    "model.d_ff": 16,
    "model.context": 8,
    "batch.sequences": 2,
}
# With these keys every detector reports something within some hundred steps.
SENSITIVE_DETECTORS = {
    "stability.window": 8,
    "stability.plateau_windows": 2,
    "stability.spike_deviations": 1.0,  # at 2.0, one run in six had no drop of the loss
    "stability.skip_deviations": 2.0,
    "stability.divergence": 1.0001,
}
FAR_STEPS = (20_000, 90_000)
LONG_STEPS = (
    530,
    580,
)  # drawn in this range, so that no number of steps reveals the gate; 512 fill the history of the loss

CASES = (
    MatrixCase("first steps"),
    MatrixCase("next generation", "trunk", generations=2, waits=True),
    MatrixCase("threads that begin late", "trunk", slow_threads=True),
    MatrixCase("data again from the start", "trunk", restart_data=True),
    MatrixCase("resumed", "half"),
    MatrixCase("newest checkpoint damaged", "damaged"),
    MatrixCase("far into a segment", "far"),
    MatrixCase("stopped and resumed", "trunk", stop_after=3),
    MatrixCase("anneal", "trunk", "anneal"),
    MatrixCase(
        "anneal, linear, with a mixture of its own",
        "trunk",
        "anneal",
        changes={
            "schedule.shape": "linear",
            "schedule.final_lr_share": 0.1,
            "mixture.anneal_weights": {"code": 0.1, "docs": 0.1, "chat": 0.8},
        },
    ),
    MatrixCase(
        "anneal, cosine", "trunk", "anneal", changes={"schedule.shape": "cosine", "schedule.final_lr_share": 0.2}
    ),
    MatrixCase(
        "trunk after an anneal",
        "annealed",
        rewarm=True,
        changes={"schedule.continue_from": "anneal", "schedule.rewarmup_steps": 4},
    ),
    MatrixCase(
        "cosine trunk",
        changes={
            "schedule.kind": "cosine",
            "schedule.cosine_steps": 5,
            "optimizer.weight_decay": 0.5,
            "stability.grad_clip": 0.3,
            "stability.z_loss": 0.05,
            "model.rope_theta": 100.0,
            "model.norm_eps": 1e-2,
        },
    ),
    MatrixCase(
        "milestones and mixture phases",
        changes={
            "schedule.kind": "multi-step",
            "schedule.milestones": [{"from_step": 2, "share": 0.7}, {"from_step": 4, "share": 0.3}],
            "mixture.phases": [{"from_step": 3, "weights": {"chat": 1.0}}],
            "model.vocab_size": VOCABULARY + 16,
            "model.layers": 3,
            "stability.window": 9,
            "model.head_dim": 4,
        },
    ),
    MatrixCase(
        "micro-batches, batch warm-up",
        changes={
            "batch.micro_sequences": 2,
            "batch.warmup": [{"until_step": 2, "sequences": 2}],
        },
    ),
    MatrixCase("outliers are skipped", "outliers"),
    MatrixCase("a loss that is not finite", "poisoned"),
    MatrixCase("a hundred thousand steps on", "late", changes={"schedule.warmup_steps": 0}),
    MatrixCase(
        "a long run",
        steps=LONG_STEPS[0],
        changes={**NARROW, "optimizer.lr": 1e-3, "checkpoint_every": 100},
        rounding=1e-3,
        totals=True,
    ),
    MatrixCase(
        "detectors that report everything",
        steps=100,
        changes={**NARROW, **SENSITIVE_DETECTORS, "checkpoint_every": 50},
        rounding=1e-3,
    ),
    MatrixCase(
        "jumps and a plateau that are reported",
        "quiet",
        steps=10,
        changes={
            "stability.plateau_windows": 2,
            "stability.divergence": 1e9,
            "stability.skip_deviations": 1e30,
        },
    ),
    MatrixCase(
        "routers and ranks that are reported",
        steps=48,  # enough to report ranks for all drawn data: 16 judged steps reported them 0 to 6 times
        ranks=2,
        changes={
            **NARROW,
            **SENSITIVE_DETECTORS,
            "model.experts": {**EXPERTS, "per_token": 1, "bias_rate": 0.0},
            "checkpoint_every": 24,
        },
        rounding=1e-3,
        totals=True,
    ),
    MatrixCase("Muon", changes=MUON, rounding=MUON_ROUNDING),
    MatrixCase(
        "Muon without Nesterov, a wider base",
        changes={
            **MUON,
            "optimizer.muon.nesterov": False,
            "optimizer.muon.momentum": 0.7,
            "optimizer.muon.steps": 3,
            "model.base_d_model": 8,
        },
        rounding=MUON_ROUNDING,
    ),
    MatrixCase("experts", changes={"model.experts": EXPERTS}, stop_after=3),
    MatrixCase(
        "experts without a shared one, recomputed, Muon",
        changes={
            **MUON,
            "model.experts": {
                "count": 3,
                "per_token": 1,
                "d_ff": 8,
                "bias_rate": 0.02,
                "z_loss": 0.05,
                "shared": 0,
                "dense_layers": 0,
            },
            "parallel.recompute": "block",
        },
        rounding=MUON_ROUNDING,
        totals=True,
    ),
    MatrixCase(
        "no QK norm, layers without position, attention across documents",
        changes={
            "model.qk_norm": False,
            "model.nope_every": 2,
            "model.across_documents": True,
            "stability.embedding_grad_share": 0.1,
        },
        rounding=1e-3,
        totals=True,
    ),
    MatrixCase(  # as OLMo 2
        "norms after each half and of whole rows, a head of its own, biases, frequencies of Llama 3",
        changes={
            "model.norms": "post",
            "model.qk_norm": "whole",
            "model.tied": False,
            "model.qkv_bias": True,
            "model.attention_out_bias": True,
            "model.rope_scaling": {"kind": "llama3", "factor": 8.0, "original_context": 8},
        },
    ),
    MatrixCase(  # as Llama
        "a head of its own, Muon, biases of attention and MLP, YaRN",
        changes={
            **MUON,
            "model.qk_norm": False,
            "model.tied": False,
            "model.qkv_bias": True,
            "model.attention_out_bias": True,
            "model.mlp_bias": True,
            "model.base_d_model": 8,
            "model.rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 8},
        },
        rounding=MUON_ROUNDING,
    ),
    MatrixCase(  # as Gemma 2
        "windows, soft-caps, norms before and after each half, a scaled embedding",
        changes={
            "model.norms": "sandwich",
            "model.norm_plus_one": True,
            "model.qk_norm": False,
            "model.windows": [5, None],
            "model.attention_scale": 0.5,
            "model.attention_softcap": 1.0,
            "model.logit_softcap": 2.0,
            "model.activation": "gelu_tanh",
            "model.embedding_scale": 4.0,
        },
    ),
    MatrixCase(  # as Gemma 3
        "windows with a RoPE of their own, bf16",
        changes={
            **BF16,
            "model.norms": "sandwich",
            "model.norm_plus_one": True,
            "model.windows": [5, None],
            "model.window_rope_theta": 100.0,
            "model.activation": "gelu_tanh",
            "model.embedding_scale": 4.0,
        },
        rounding=0.5,
        totals=True,
    ),
    MatrixCase(  # as Qwen3-MoE
        "experts with softmax scores and a loss that balances them",
        changes={
            "model.tied": False,
            "model.experts": {
                **EXPERTS,
                "shared": 0,
                "dense_layers": 0,
                "scores": "softmax",
                "balance": "loss",
                "loss_weight": 0.5,
            },
        },
    ),
    MatrixCase(  # as DeepSeek-V3
        "latent attention, groups of experts",
        changes={
            "model.qk_norm": False,
            "model.kv_heads": 2,
            "model.tied": False,
            "model.latent": {"q_rank": 8, "kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 4, "v_head_dim": 6},
            "model.experts": {**EXPERTS, "per_token": 1, "groups": 2, "normalise": False, "scale": 2.5},
        },
    ),
    MatrixCase(  # as nanochat
        "norms without weights, a norm of the embedding, an MLP without a gate",
        changes={
            "model.tied": False,
            "model.norm_weights": False,
            "model.embedding_norm": True,
            "model.gated": False,
            "model.activation": "relu2",
            "model.logit_softcap": 2.0,
        },
    ),
    MatrixCase(  # as gpt-oss
        "attention sinks, clamped experts with biases",
        changes={
            "model.qk_norm": False,
            "model.tied": False,
            "model.attention_sinks": True,
            "model.qkv_bias": True,
            "model.attention_out_bias": True,
            "model.windows": [5, None],
            "model.experts": {
                **EXPERTS,
                "shared": 0,
                "dense_layers": 0,
                "scores": "softmax",
                "balance": "loss",
                "bias": True,
                "clamp": 0.5,
            },
        },
    ),
    MatrixCase(
        "LoRA's matrices in place of the weights",
        "trunk",
        changes={"adapt": {"kind": "lora", "rank": 2, "alpha": 3.0, "targets": ["q", "v", "down"]}},
    ),
    MatrixCase("DoRA for every matrix", "trunk", changes={"adapt": {"kind": "dora", "rank": 1}}),
    MatrixCase("frozen weights", "trunk", changes={"freeze": ["embedding", "blocks.0"]}),
    MatrixCase("bf16", "trunk", changes=BF16, rounding=BF16_ROUNDING),
    MatrixCase("bf16 from the first step", changes=BF16, rounding=0.5, totals=True),
    MatrixCase(
        "fp8",  # its products need multiples of 16
        changes={"precision": "fp8", "model.kv_heads": 2, "model.experts": {**EXPERTS, "d_ff": 16}},
        rounding=0.5,
        totals=True,
    ),
    MatrixCase(
        "bf16, Muon, experts",
        changes={**MUON, **BF16, "model.experts": {**EXPERTS, "shared": 2}},
        rounding=0.5,
        totals=True,
    ),
    MatrixCase("reference kernels", "trunk", kernels="reference"),
    MatrixCase("reference kernels, bf16", "trunk", changes=BF16, kernels="reference", rounding=BF16_ROUNDING),
    MatrixCase("compiled", changes={"compile": True, "stability.noise_scale_every": 0}),
    MatrixCase(
        "compiled, bf16",
        "trunk",
        changes={**BF16, "compile": True, "stability.noise_scale_every": 0},
        rounding=BF16_ROUNDING,
    ),
    MatrixCase("a checkpoint that is damaged", "broken", ranks=2, exit_code=2),
    MatrixCase("a checkpoint of another model", "trunk", changes={"model.layers": 1}, exit_code=2),
    MatrixCase("a checkpoint of another step", "trunk", first_step=7, exit_code=2),
    MatrixCase("a checkpoint of another optimiser", "trunk", changes=MUON, exit_code=2),
    MatrixCase(
        "truncated rows, another AdamW, a narrower base",
        changes={
            "batch.packing": "truncate-and-concatenate",
            "optimizer.beta1": 0.7,
            "optimizer.beta2": 0.8,
            "optimizer.eps": 1e-4,
            "model.base_d_model": 8,
            "keep_checkpoints": 2,
        },
    ),
    MatrixCase("two ranks, split weights", "trunk", ranks=2),
    MatrixCase("two ranks, replicas, Muon", ranks=2, changes={**MUON, "parallel.replicas": 2}, rounding=MUON_ROUNDING),
    MatrixCase(
        "two tensor ranks, recomputed",
        ranks=2,
        changes={"parallel.tensor": 2, "model.kv_heads": 2, "parallel.recompute": "block"},
    ),
    MatrixCase(
        "two tensor ranks, experts",
        ranks=2,
        changes={"parallel.tensor": 2, "model.kv_heads": 2, "model.experts": {**EXPERTS, "d_ff": 16}},
    ),
)


@dataclass(frozen=True)
class MatrixTool:
    """A program of ``trainer/tools`` that runs on files of the baseline.

    In ``arguments``, OUT stands for the tool's folder, TRUNK and ANNEALED for folders of runs, FIRST and LAST for checkpoints of the trunk, OTHER for
    a checkpoint of another model, SIZEDFIRST and SIZEDLAST for checkpoints at the recipe's size, RECIPE for a recipe file,
    SHARDS for the folder of token shards, and SHARD for one shard.
    """

    module: str
    arguments: tuple[str, ...]
    exit_code: int = 0


AVERAGE, DOCUMENTS, PACKING = (f"trainer.tools.{name}" for name in ("average", "documents", "packing_report"))
TOOLS = (
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST", "LAST")),
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST", "LAST", "--weights", "1,3")),
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST", "LAST", "--weights", "1"), 2),
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST", "LAST", "--weights", "1,x"), 2),
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST", "LAST", "--weights", "0,0"), 2),
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST", "FIRST"), 2),
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST"), 2),
    MatrixTool(AVERAGE, ("OUT/checkpoints", "FIRST", "OTHER"), 2),
    MatrixTool(AVERAGE, ("OUT/checkpoints",), 2),
    MatrixTool(DOCUMENTS, ("TRUNK", "5")),
    MatrixTool(DOCUMENTS, ("TRUNK", "1", "--json")),
    MatrixTool(DOCUMENTS, ("ANNEALED", "9")),
    MatrixTool(DOCUMENTS, ("TRUNK", "99"), 2),
    MatrixTool(PACKING, ("TRUNK", "--steps", "7")),
    MatrixTool(PACKING, ("TRUNK", "--steps", "7", "--json")),
    MatrixTool(PACKING, ("RECIPE", "SHARDS", "--steps", "3")),
    MatrixTool(PACKING, ("RECIPE", "SHARD", "--steps", "3")),
    MatrixTool(PACKING, ("TRUNK", "--steps", "0"), 2),
    MatrixTool(PACKING, ("RECIPE",), 2),
    MatrixTool("trainer", (), 2),
)


def make_tool_name(tool: MatrixTool) -> str:
    """Return the tool's name in reports: its module and arguments, without its output folder."""
    return " ".join(word for word in (tool.module, *tool.arguments) if not word.startswith("OUT"))
