"""Writes a release's GGUF file, tensor by tensor, aside; then it is put in place whole. The export is only read.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the package ``gguf`` of llama.cpp writes it.
"""

from __future__ import annotations

import glob
import json
import math
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from factory.core.errors import InputError
from factory.core.progress import Progress
from factory.evals.export_config import ExportConfig
from factory.evals.export_folder import check_tensors, read_config, read_json
from factory.ingest.tokenizer import PATTERN, Tokenizer
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow
from factory.release.checks import check_export
from factory.release.gguf.kind import Kind
from factory.release.gguf.tensors import FileTensor, Floats, architecture, parts
from factory.release.serving import MODEL_NAME
from kernels.contract.files import put_in_place

if TYPE_CHECKING:
    import gguf

PUBLISHED = "published"
WEIGHTS = "model.safetensors"  # of an export
LICENCE = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9.+:() -]{1,200}")
BLOCK = 32  # weights that share a scale in Q8_0
FP16_MAX = 65504.0
# The largest weight that a type holds: of Q8_0 it is 127 times the scale of its block, which is an fp16.
LARGEST = {"F16": FP16_MAX, "Q8_0": 127 * FP16_MAX}
FILE_TYPES = {Kind.F32: "ALL_F32", Kind.F16: "MOSTLY_F16", Kind.BF16: "MOSTLY_BF16", Kind.Q8_0: "MOSTLY_Q8_0"}
OF_EXPORT = {"F32": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16}  # safetensors' names


@dataclass(frozen=True)
class GgufFile:
    file: Path
    kind: Kind
    architecture: str  # as llama.cpp names it
    tensors: int
    bytes: int


def write_release(
    ledger: Ledger, number: int, out: Path, progress: Progress, kind: Kind | None = None, licence: str | None = None
) -> GgufFile:
    """Make the GGUF file of a published release at ``out``. ``kind`` None: as the export has its weights, so that none is rounded.

    ``licence``: of the weights, an SPDX expression; None: the file names none.
    Raises: InputError, and leaves nothing, when there is something at the place, when the export is not what was judged, when llama.cpp
    has not the model's maths, when a weight is too large for ``kind``, or when the package ``gguf`` is not installed.
    """
    release = ReleaseRow.get(ledger, number)
    if release.state != PUBLISHED:
        raise InputError(f"release {number} is {release.state}, not published: 'factory release' finishes it")
    if licence is not None and not LICENCE.fullmatch(licence):
        raise InputError(f"{licence!r} is no SPDX expression, such as Apache-2.0")
    check_export(ledger, release.candidate)
    about: dict[str, str | int] = {
        "general.type": "model",
        "general.name": f"{MODEL_NAME} release {number}",
        "general.basename": MODEL_NAME,
        "general.version": str(number),
        "general.license": licence or "",  # an empty one is not written
        "factory.release": number,
        "factory.candidate": release.candidate,
        "factory.export_sha256": release.export_sha256,
    }
    return write_export(Path(release.export_path), out, about, progress, kind)


def write_export(
    export: Path, out: Path, about: dict[str, str | int], progress: Progress, kind: Kind | None = None
) -> GgufFile:
    """``about``: metadata of the file beyond what the export says. Raises: InputError as ``write_release``."""
    _require_package()
    out = out.absolute()
    if out.is_symlink() or out.exists():
        raise InputError(f"{out} is there already: name another file, or remove it")
    if around := next((folder for folder in out.resolve().parents if (folder / WEIGHTS).exists()), None):
        raise InputError(f"{around} is an export, known by the hash of its files: name a file elsewhere")
    config, model_type = read_config(export), str(read_json(export / "config.json")["model_type"])
    plan = parts(config, model_type)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out.parent} cannot be made: {error.strerror}") from error
    for left in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 12}.part"):  # of one that was killed
        left.unlink()
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        written = _write(export, aside, config, model_type, plan, about, progress, kind)
        put_in_place(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return GgufFile(out, written, architecture_name(model_type), len(plan), out.stat().st_size)


def architecture_name(model_type: str) -> str:
    """llama.cpp's, as ``general.architecture`` has it."""
    import gguf

    return gguf.MODEL_ARCH_NAMES[architecture(model_type)]


def _require_package() -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            "a GGUF file is written with the package gguf, which is not installed: pip install 'llm-factory[gguf]'"
        ) from error


def _write(
    export: Path, aside: Path, config: ExportConfig, model_type: str, plan: list[FileTensor],
    about: dict[str, str | int], progress: Progress, kind: Kind | None,
) -> Kind:  # fmt: skip
    """The whole file. Returns how its matrices are stored."""
    import gguf

    path = export / WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            check_tensors(path, file, config)
            kind = kind or OF_EXPORT[file.get_slice("model.embed_tokens.weight").get_dtype()]
            writer = gguf.GGUFWriter(aside, architecture_name(model_type))
            _add_metadata(writer, config, about, kind)
            add_vocabulary(writer, export, config.vocab_size)
            types = {part.name: _type_of(part, kind) for part in plan}
            sizes = {part.name: _bytes(part.shape, types[part.name]) for part in plan}
            for part in plan:
                writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), sizes[part.name], types[part.name])
            try:
                writer.write_header_to_file()
                writer.write_kv_data_to_file()
                writer.write_ti_data_to_file()
            finally:
                writer.close()
            with open(aside, "ab") as out, progress.task(f"{path.parent.name} as GGUF", sum(sizes.values())) as task:
                _pad(out)
                for part in plan:  # not by the writer: what its numpy says of a full disk has no error number
                    tensors = [file.get_tensor(name).float().numpy() for name in part.sources]
                    out.write(_stored(path, part, part.made_of(tensors), types[part.name]).data)
                    _pad(out)
                    task.advance(sizes[part.name], part.name)
    except SafetensorError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return kind


def _pad(out: BinaryIO) -> None:
    import gguf

    out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _type_of(part: FileTensor, kind: Kind) -> gguf.GGMLQuantizationType:
    import gguf

    if part.is_exact:
        return gguf.GGMLQuantizationType.F32
    if kind is Kind.Q8_0 and part.shape[-1] % BLOCK:
        return gguf.GGMLQuantizationType.F16  # as llama.cpp's own converter does
    return gguf.GGMLQuantizationType[kind.name]


def _bytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def _stored(path: Path, part: FileTensor, values: Floats, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Raises: InputError for a weight that would become infinite."""
    import gguf

    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= LARGEST.get(kind.name, math.inf):
        raise InputError(
            f"{path}: {part.sources[0]} has a weight of {largest:.3g}, too large for {kind.name}: use --type bf16 or f32"
        )
    stored: np.ndarray[Any, Any] = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    return stored


def _add_metadata(writer: gguf.GGUFWriter, config: ExportConfig, about: dict[str, str | int], kind: Kind) -> None:
    import gguf

    for key, value in about.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if (experts := config.experts) is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.per_token)
        writer.add_expert_feed_forward_length(experts.d_ff)
        writer.add_expert_shared_count(experts.shared)
        writer.add_leading_dense_block_count(experts.dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(1.0)
        writer.add_nextn_predict_layers(0)


# -- the tokenizer -----------------------------------------------------------------------------------------------------
# llama.cpp has the split patterns in its own code and chooses one by name, ``tokenizer.ggml.pre``. Its converter finds the name by a
# hash over the ids of a sample text, so that it knows published vocabularies alone; ours is trained on the factory's own text, and
# splits as Qwen2's does.
MODEL, PRE = "gpt2", "qwen2"  # byte-level BPE, and Qwen2's split pattern
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens


def add_vocabulary(writer: gguf.GGUFWriter, export: Path, vocab_size: int) -> None:
    """``vocab_size``: rows of the embedding; ids without a token become unused ones.

    Raises: InputError for a tokenizer that llama.cpp would split otherwise.
    """
    tokenizer = Tokenizer.load(export, probed=False)  # what it splits is looked at below
    where = export / "tokenizer.json"
    data = json.loads(where.read_text(encoding="utf-8"))
    model = data["model"]
    if (why := _unlike_qwen2(data)) is not None:
        raise InputError(f"{where}: {why}; llama.cpp would give other ids, so no GGUF file is made")
    by_id: dict[int, str] = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for added in data["added_tokens"]:
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if beyond := [number for number in by_id if number >= vocab_size]:
        raise InputError(f"{where}: token {max(beyond)} is beyond the model's vocabulary of {vocab_size}")
    writer.add_tokenizer_model(MODEL)
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types([kinds.get(number, UNUSED) for number in range(vocab_size)])
    # two tokens and a blank between, best first
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokenizer.end_token)
    writer.add_eos_token_id(tokenizer.stop_token)  # ends a turn; llama.cpp knows <|endoftext|> by its name
    writer.add_eot_token_id(tokenizer.stop_token)
    writer.add_pad_token_id(tokenizer.end_token)
    writer.add_add_bos_token(bool(tokenizer.bos))
    writer.add_add_eos_token(False)
    writer.add_chat_template(_chat_template(export) or tokenizer.chat_template)


def _unlike_qwen2(data: dict[str, Any]) -> str | None:
    """Why text is not split and merged as llama.cpp does under the name ``PRE``; None when it is."""
    model, split = data["model"], data["pre_tokenizer"] or {}
    steps = split.get("pretokenizers", [split])
    patterns = [step["pattern"] for step in steps if step.get("type") == "Split"]
    if patterns != [{"Regex": PATTERN}] or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return "text is not split with Qwen2's pattern into byte-level pieces"
    if data["normalizer"] is not None:
        return "text is normalised before it is split"
    if model["type"] != "BPE" or model.get("ignore_merges") or model.get("byte_fallback") or model.get("dropout"):
        return "it is no plain BPE"
    return None


def _chat_template(export: Path) -> str | None:
    """As transformers reads it: the file before the key."""
    if (path := export / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    if (path := export / "tokenizer_config.json").is_file():
        return read_json(path).get("chat_template")
    return None
