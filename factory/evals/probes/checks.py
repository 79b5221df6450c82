"""The class of a check, and the names of all checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.contract.message import Message

OF_EVALUATOR = ("export", "finite_loss")
OF_TRAINER = ("tokenizer", "trainer_tokens", "packing")
OF_CHECKPOINT = (
    "weights",
    "shape",
    "rope",
    "norm",
    "vocabulary",
)  # they compare the export with its checkpoint
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
class ProbeCheck:
    """The result of a check."""

    name: str
    ok: bool | None  # None: the check could not be made; then it counts neither for nor against the candidate
    detail: str  # one line for a person: what differs and what to do; a ``Message`` without a full stop


def join_sentences(parts: Sequence[str]) -> Message:
    """Join sentences into one message. The data of the message contains the sentences.

    >>> join_sentences([Message("data.lost", "A file is lost"), Message("data.late", "A file is late")])
    'A file is lost. A file is late'
    """
    if len(parts) == 1:
        return Message.from_json(parts[0])
    return Message("checks.several", "{text}", text=". ".join(parts), parts=list(parts))
