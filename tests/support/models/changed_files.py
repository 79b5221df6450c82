"""Changes the files of a model to what another program could have left there."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np


def rewrite_gguf(file: Path, out: Path, change: dict[str, Any]) -> Path:
    """Copy a .gguf file of a Llama with other keys and tensors. None: without that key or tensor. An array of numpy: a tensor."""
    import gguf

    reader, kinds = gguf.GGUFReader(file), gguf.GGUFValueType
    writer = gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in {"general.architecture", *change}:
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.name not in change:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, value in change.items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(name, value)
        elif isinstance(value, list):
            writer.add_key_value(name, value, kinds.ARRAY, kinds.STRING if isinstance(value[0], str) else kinds.INT32)
        elif value is not None:
            writer.add_key_value(name, value, kinds.STRING if isinstance(value, str) else kinds.FLOAT32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def write_lfs_pointer(file: Path) -> None:
    """Replace a file by what a clone without Git LFS has in its place."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {file.stat().st_size}\n")
