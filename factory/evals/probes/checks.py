"""What a check is, and the names of all that there are."""

from __future__ import annotations

from dataclasses import dataclass

OF_EVALUATOR = ("export", "finite_loss")
OF_TRAINER = ("tokenizer", "trainer_tokens", "packing")
OF_CHECKPOINT = (
    "weights",
    "shape",
    "rope",
    "norm",
    "vocabulary",
)  # the export against the checkpoint that it was made from
OF_FILES = ("bos_eos", "generation_config", "template")
OF_SERVER = (  # transformers on the export
    "server_text", "server_chat", "round_trip", "whitespace", "typed_special", "injected_role", "system_message", "tools_printed",
    "stop", "logits", "smoke",
)  # fmt: skip
OF_ENGINE = (  # the serving engine on the export
    "engine_start", "engine_text", "engine_chat", "engine_typed_special", "engine_injected_role", "engine_stop", "engine_logprobs",
)  # fmt: skip
OF_DATA = ("no_held_out_in_training", "no_shared_ngrams")
CHECKS = (*OF_EVALUATOR, *OF_TRAINER, *OF_CHECKPOINT, *OF_FILES, *OF_SERVER, *OF_ENGINE, *OF_DATA)


@dataclass(frozen=True)
class Check:
    """A question, its answer, and why."""

    name: str
    ok: bool | None  # None: it could not be made, so it counts neither for nor against the candidate
    detail: str  # one line for a person: what differs, and what to do
