"""Writes a release's GGUF file, tensor by tensor. The file has a temporary name until it is complete. The export is not changed.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package ``gguf`` of llama.cpp writes the header.
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

from factory.core.errors import InputError
from factory.core.progress import Progress
from factory.evals.export_folder import ExportWeights, read_config, read_json
from factory.ingest.tokenizer import Tokenizer
from factory.ingest.tokenizing.description import DEFAULT, read_chat_templates
from factory.ingest.tokenizing.fast_path import SPLIT_NAMES, name_split
from factory.ledger.ledger import Ledger
from factory.ledger.rows import ReleaseRow
from factory.release.checks import check_export_unchanged
from factory.release.gguf.gguf_type import GgufType
from factory.release.gguf.tensors import Floats, GgufTensor, find_gguf_architecture, plan_gguf_tensors
from factory.release.published_link import MODEL_NAME
from kernels.contract.files import rename_into_place
from kernels.contract.message import Message
from models.files.model_folder import INDEX, ONE_FILE
from models.spec import ModelSpec

if TYPE_CHECKING:
    import gguf

PUBLISHED = "published"
LICENCE = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9.+:() -]{1,200}")
BLOCK = 32  # weights that share a scale in Q8_0
FP16_MAX = 65504.0
# The largest weight that each type can store. For Q8_0 it is 127 times the largest fp16 scale of a block.
LARGEST = {"F16": FP16_MAX, "Q8_0": 127 * FP16_MAX}
FILE_TYPES = {
    GgufType.F32: "ALL_F32",
    GgufType.F16: "MOSTLY_F16",
    GgufType.BF16: "MOSTLY_BF16",
    GgufType.Q8_0: "MOSTLY_Q8_0",
}
TYPE_OF_EXPORT = {"F32": GgufType.F32, "F16": GgufType.F16, "BF16": GgufType.BF16}  # by safetensors' names


@dataclass(frozen=True)
class GgufFile:
    file: Path
    kind: GgufType
    architecture: str  # as llama.cpp names it
    tensors: int
    bytes: int


def write_release_gguf(
    ledger: Ledger,
    number: int,
    out: Path,
    progress: Progress,
    gguf_type: GgufType | None = None,
    licence: str | None = None,
) -> GgufFile:
    """Write the GGUF file of a published release to ``out``. Without ``gguf_type``, weights keep the export's type and are not rounded.

    ``licence``: the licence of the weights, as an SPDX expression; None: the file names no licence.
    Raises: InputError, and writes no file, when ``out`` exists, the export has changed, llama.cpp cannot compute the model, a weight is too
    large for ``gguf_type``, or the package ``gguf`` is not installed.
    """
    release = ReleaseRow.get(ledger, number)
    if release.state != PUBLISHED:
        raise InputError(
            "gguf.not_published",
            "release {release} is {state}, not published. Finish it with 'factory release'",
            release=number,
            state=release.state,
        )
    if licence is not None and not LICENCE.fullmatch(licence):
        raise InputError(
            "gguf.bad_licence", "{licence!r} is not an SPDX expression. An example is Apache-2.0", licence=licence
        )
    check_export_unchanged(ledger, release.candidate)
    about: dict[str, str | int] = {
        "general.type": "model",
        "general.name": f"{MODEL_NAME} release {number}",
        "general.basename": MODEL_NAME,
        "general.version": str(number),
        "general.license": licence or "",  # an empty value is not written
        "factory.release": number,
        "factory.candidate": release.candidate,
        "factory.export_sha256": release.export_sha256,
    }
    return write_export_gguf(Path(release.export_path), out, about, progress, gguf_type)


def write_export_gguf(
    export: Path, out: Path, about: dict[str, str | int], progress: Progress, gguf_type: GgufType | None = None
) -> GgufFile:
    """Write the GGUF file of an export. ``about``: further metadata for the file. Raises: InputError as ``write_release_gguf``."""
    _require_package()
    out = out.absolute()
    if out.is_symlink() or out.exists():
        raise InputError(
            "gguf.file_exists", "{file} exists already. Give another file name, or remove this file", file=out
        )
    weights = (ONE_FILE, INDEX)
    if around := next(
        (folder for folder in out.resolve().parents if any((folder / one).exists() for one in weights)), None
    ):
        raise InputError(
            "gguf.inside_export",
            "{folder} is an export, and a new file in it would change the export's hash. Give a file name in another folder",
            folder=around,
        )
    spec = read_config(export)
    plan = plan_gguf_tensors(spec)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            "gguf.no_folder", "The folder {folder} cannot be created: {why}", folder=out.parent, why=error.strerror
        ) from error
    for left in out.parent.glob(f".{glob.escape(out.name)}.{'?' * 12}.part"):  # left by a killed process
        left.unlink()
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.part")
    try:
        written = _write(export, aside, spec, plan, about, progress, gguf_type)
        rename_into_place(aside, out)
    finally:
        aside.unlink(missing_ok=True)
    return GgufFile(out, written, find_llama_cpp_architecture_name(spec), len(plan), out.stat().st_size)


def find_llama_cpp_architecture_name(spec: ModelSpec) -> str:
    """Return llama.cpp's name of the architecture, for the key ``general.architecture``."""
    import gguf

    return gguf.MODEL_ARCH_NAMES[find_gguf_architecture(spec)]


def _require_package() -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            "gguf.no_package",
            "The package 'gguf', which writes GGUF files, is not installed: run pip install 'llm-factory[gguf]'",
        ) from error


def _write(
    export: Path, aside: Path, spec: ModelSpec, plan: list[GgufTensor],
    about: dict[str, str | int], progress: Progress, kind: GgufType | None,
) -> GgufType:  # fmt: skip
    """Write the whole file. Returns the type of its matrices, or of most: without ``kind``, each tensor keeps its own."""
    import gguf

    files = ExportWeights(export)
    files.check_tensors(spec)
    asked, kind = kind, kind or TYPE_OF_EXPORT[files.tensors["model.embed_tokens.weight"].dtype]
    writer = gguf.GGUFWriter(aside, find_llama_cpp_architecture_name(spec))
    _add_metadata(writer, spec, about, kind)
    add_vocabulary(writer, export, spec.vocab_size)
    types = {part.name: _type_of(part, asked or _find_own_type(files, part, kind)) for part in plan}
    sizes = {part.name: _bytes(part.shape, types[part.name]) for part in plan}
    for part in plan:
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), sizes[part.name], types[part.name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    with open(aside, "ab") as out, progress.task(f"{export.name} as GGUF", sum(sizes.values())) as task:
        _pad(out)
        for part in plan:  # without the writer of ``gguf``: numpy's error for a full disk has no errno
            tensors = [files.read_tensor(name).numpy() for name in part.sources]
            out.write(_stored(export, part, part.build_array(tensors), types[part.name]).data)
            _pad(out)
            task.advance(sizes[part.name], part.name)
    return kind


def _pad(out: BinaryIO) -> None:
    import gguf

    out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _find_own_type(files: ExportWeights, part: GgufTensor, usual: GgufType) -> GgufType:
    """The type in which no weight of a tensor is rounded."""
    own = {files.tensors[name].dtype for name in part.sources}
    return TYPE_OF_EXPORT[own.pop()] if len(own) == 1 else GgufType.F32 if own else usual


def _type_of(part: GgufTensor, kind: GgufType) -> gguf.GGMLQuantizationType:
    import gguf

    if part.is_always_fp32:
        return gguf.GGMLQuantizationType.F32
    if kind is GgufType.Q8_0 and part.shape[-1] % BLOCK:
        return gguf.GGMLQuantizationType.F16  # like llama.cpp's converter
    return gguf.GGMLQuantizationType[kind.name]


def _bytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block * size


def _stored(export: Path, part: GgufTensor, values: Floats, kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Convert a tensor to its type. Raises: InputError for a weight that would become infinite."""
    import gguf

    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= LARGEST.get(kind.name, math.inf):
        raise InputError(
            "gguf.large_weight",
            "{export}: {tensor} has a weight of {weight:.3g}, which is too large for {type}: use --type bf16 or f32",
            export=export,
            tensor=part.sources[0] if part.sources else part.name,
            weight=largest,
            type=kind.name,
        )
    stored: np.ndarray[Any, Any] = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    return stored


def _add_metadata(writer: gguf.GGUFWriter, spec: ModelSpec, about: dict[str, str | int], kind: GgufType) -> None:
    import gguf

    for key, value in about.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(spec.context)
    writer.add_embedding_length(spec.d_model)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.d_ff)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.rope_dim)
    writer.add_rope_freq_base(spec.rope_theta)
    _add_rope_scaling(writer, spec)
    if window := next((one for one in spec.windows or [] if one), None):
        writer.add_sliding_window(window)
    if spec.window_rope_theta is not None:
        writer.add_rope_freq_base_swa(spec.window_rope_theta)
    if spec.attention_softcap is not None:
        writer.add_attn_logit_softcapping(spec.attention_softcap)
    if spec.logit_softcap is not None:
        writer.add_final_logit_softcapping(spec.logit_softcap)
    if (experts := spec.experts) is not None:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.per_token)
        writer.add_expert_feed_forward_length(experts.d_ff)
        writer.add_expert_shared_count(experts.shared)
        writer.add_leading_dense_block_count(experts.dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[experts.scores.upper()])
        writer.add_expert_weights_norm(experts.normalise)
        writer.add_expert_weights_scale(experts.scale)
        writer.add_nextn_predict_layers(0)


def _add_rope_scaling(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Llama 3's scaling is a tensor, and dynamic scaling is none up to the model's context."""
    import gguf

    scaling = spec.rope_scaling
    if scaling is None or scaling.kind not in ("linear", "yarn"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType[scaling.kind.upper()])
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(scaling.original_context)


# -- the tokenizer -----------------------------------------------------------------------------------------------------
MODEL = "gpt2"  # byte-level BPE
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens


def add_vocabulary(writer: gguf.GGUFWriter, export: Path, vocab_size: int) -> None:
    """Add the tokenizer. ``vocab_size``: rows of the embedding; ids without a token become unused tokens.

    Raises: InputError for a tokenizer that llama.cpp would apply differently.
    """
    tokenizer = Tokenizer.load(export)
    where = export / "tokenizer.json"
    data = json.loads(where.read_text(encoding="utf-8"))
    model = data["model"]
    if (why := _find_obstacle(data)) is not None:
        raise InputError(
            "gguf.other_tokenizer",
            "{file}: {why}. llama.cpp would give other token ids, so the factory wrote no GGUF file",
            file=where,
            why=why,
        )
    by_id: dict[int, str] = {number: token for token, number in model["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for added in data["added_tokens"]:
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    if beyond := [number for number in by_id if number >= vocab_size]:
        raise InputError(
            "gguf.token_beyond",
            "{file}: token {token} is outside the model's vocabulary of {vocabulary:,} tokens",
            file=where,
            token=max(beyond),
            vocabulary=vocab_size,
        )
    writer.add_tokenizer_model(MODEL)
    writer.add_tokenizer_pre(SPLIT_NAMES[name_split(data) or ""][0])
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)])
    writer.add_token_types([kinds.get(number, UNUSED) for number in range(vocab_size)])
    # a merge is two tokens, joined by a space; the most frequent merge comes first
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    bos = tokenizer.bos_token
    writer.add_bos_token_id(tokenizer.end_token if bos is None else bos)
    writer.add_eos_token_id(tokenizer.stop_token)  # the end of a turn; llama.cpp knows <|endoftext|> by its name
    writer.add_eot_token_id(tokenizer.stop_token)
    writer.add_pad_token_id(tokenizer.end_token if tokenizer.ids.pad is None else tokenizer.ids.pad)
    writer.add_add_bos_token(bool(tokenizer.bos))
    writer.add_add_eos_token(False)
    if template := _chat_template(export) or tokenizer.chat_template:
        writer.add_chat_template(template)


def _find_obstacle(data: dict[str, Any]) -> str | None:
    """Return why llama.cpp would give other ids than the tokenizer; None if it would not."""
    model = data["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        return Message("gguf.not_plain_bpe", "the tokenizer is not a plain BPE tokenizer")
    name = name_split(data)
    if name is None or SPLIT_NAMES[name][1] != bool(model.get("ignore_merges")):
        return Message(
            "gguf.other_pattern",
            "the tokenizer does not split text into byte-level pieces as one of these models of llama.cpp does: {names}",
            names=[name for name, _ in SPLIT_NAMES.values()],
        )
    if data["normalizer"] is not None:
        return Message("gguf.normalizer", "the tokenizer normalises text before it splits the text")
    return None


def _chat_template(export: Path) -> str | None:
    """Return the chat template for chats without tools, which transformers finds. None: no template."""
    path = export / "tokenizer_config.json"
    return read_chat_templates(export, read_json(path) if path.is_file() else {}).get(DEFAULT)
