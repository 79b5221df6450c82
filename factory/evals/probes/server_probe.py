"""The server's side of parity: loads an export with transformers and writes down ids, logits and generated tokens.

It is run as ``python -I server_probe.py REQUEST ANSWER`` in its own process with a clean environment, and imports nothing of the factory. It reads
REQUEST (JSON: export, classes, texts, chats, waiting, tools, logits_of, generate, max_new_tokens, stop_ids, memory_mib, cpu_seconds) and writes
ANSWER (JSON) and ANSWER.npy (fp32 logits [T, V] of ``logits_of``). It sets its limits before it reads the export.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any


def main(request_path: str, answer_path: str) -> None:
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    limit = request["memory_mib"] << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"], request["cpu_seconds"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    import numpy as np
    import torch
    import transformers
    from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

    export = request["export"]
    with open(os.path.join(export, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    # by model_type: classes of transformers itself, never code of the export
    name = request["classes"].get(str(config.get("model_type")))
    if name is None or config.get("architectures") != [name]:
        raise SystemExit(f"no known architecture: {str(config.get('architectures'))[:80]}")
    model_class = getattr(transformers, name)
    only_here: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(export, **only_here)
    model = model_class.from_pretrained(export, use_safetensors=True, dtype=torch.float32, **only_here).eval()

    class Force(LogitsProcessor):
        """Forces the third generated token. If the token stops generation, no token follows."""

        def __init__(self, token: int, prompt: int) -> None:
            self.token, self.at = token, prompt + 2

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(scores, -1e9)
            filler = next(t for t in range(scores.shape[-1]) if t not in request["stop_ids"])
            forced[:, self.token if input_ids.shape[1] >= self.at else filler] = 0.0
            return forced

    def generate(ids: list[int], force: int | None) -> list[int]:
        prompt = torch.tensor([ids])
        processors = LogitsProcessorList([] if force is None else [Force(force, len(ids))])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=request["max_new_tokens"],
            logits_processor=processors,
        )
        return [int(token) for token in out[0, len(ids) :]]

    with torch.inference_mode():
        logits = model(torch.tensor([request["logits_of"]])).logits[0].float().numpy()
        generated = generate(request["generate"], None)
        stopped = {str(token): generate(request["generate"], token) for token in request["stop_ids"]}
    np.save(answer_path + ".npy", logits, allow_pickle=False)
    eos = model.generation_config.eos_token_id

    def ids_of_chat(messages: list[dict[str, str]], waits: bool, tools: list[Any] | None = None) -> list[int] | str:
        """Return the ids of a chat, or the reason why the template refuses it. Any exception of the template is an answer."""
        try:
            words = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=waits)
            return list(tokenizer(words, add_special_tokens=False)["input_ids"])
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    texts = [tokenizer(text, add_special_tokens=True)["input_ids"] for text in request["texts"]]
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
    answer = {
        "texts": texts,
        "decoded": decoded,
        "encoded_again": [tokenizer(text, add_special_tokens=True)["input_ids"] for text in decoded],
        "chats": [ids_of_chat(messages, waits=False) for messages in request["chats"]],
        "waiting": [ids_of_chat(messages, waits=True) for messages in request["waiting"]],
        "with_tools": [ids_of_chat(messages, waits=True, tools=request["tools"]) for messages in request["waiting"]],
        "tokenizer_ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "generated": generated,
        "stopped": stopped,
        "eos_token_ids": [] if eos is None else [eos] if isinstance(eos, int) else list(eos),
    }
    with open(answer_path + ".part", "w", encoding="utf-8") as out:
        json.dump(answer, out)
    os.replace(answer_path + ".part", answer_path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
