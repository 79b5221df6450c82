"""The sandboxed side of ``gguf_source``: transformers reads a .gguf file, and the model is saved as a folder with fp32 safetensors.

It is run as ``python -I inside_gguf.py FILE OUT``, and imports nothing of the factory. The licence that the file names goes into a card.

A separate file, because it runs alone in the sandbox.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


NAMES = ("quantization_config", "unk_token_id", "local_files_only")


def main(path: str, out: str) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = os.path.split(path)
    fields = gguf.GGUFReader(path).fields
    licence = fields["general.license"].contents() if "general.license" in fields else ""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    tokenizer.save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, local_files_only=True, dtype=torch.float32)
    config = model.config.to_diff_dict() | {"architectures": [type(model).__name__]}
    # The weights are no longer quantised, and the other keys name things. save_pretrained would refuse the model.
    config = {key: value for key, value in config.items() if key not in NAMES and not key.startswith("_")}
    with open(os.path.join(out, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, os.path.join(out, "model.safetensors"))
    if isinstance(licence, str) and licence:
        with open(os.path.join(out, "README.md"), "w", encoding="utf-8") as card:
            card.write(f"---\nlicense: {json.dumps(licence[:100])}\n---\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
