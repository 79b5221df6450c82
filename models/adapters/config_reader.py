"""Reads a ``config.json`` strictly: each key once, with the type and range that it must have. A key that nothing read is refused by name and value.

A file of a model is untrusted. Some keys make a program fetch or run code, and others change the model's function in a way that no tensor shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kernels.contract.message import CodedError, Message

Read = TypeVar("Read")
MISSING: Any = object()
# Keys that do not change what the weights compute: names, versions, defaults of training, ids of tokens.
IDLE = {
    "_name_or_path", "architectures", "model_type", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_dropout",
    "initializer_range", "pad_token_id", "residual_dropout", "resid_pdrop", "embd_pdrop", "torch_dtype", "transformers_version",
    "transformers.js_config", "use_cache", "is_llama_config", "cache_implementation", "unsloth_version", "unsloth_fixed",
    "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "output_attentions", "output_hidden_states",
    "return_dict",
}  # fmt: skip


class ModelFilesError(CodedError):
    """The files of a model are missing, damaged, or say something that cannot be represented. The message names the file and the key."""


class ConfigReader:
    """The keys of a config.json. ``where``: the file, for messages. ``left``: the keys that were not read yet."""

    def __init__(self, config: Mapping[str, Any], where: Path | str) -> None:
        self.config, self.where = config, where
        self.left = set(config)

    def take(self, key: str, default: Any = MISSING) -> Any:
        """The value of a key as it stands. A missing key and null are the default. Raises: ModelFilesError if the key is required."""
        self.left.discard(key)
        value = self.config.get(key)
        if value is None:
            if default is MISSING:
                raise self.missing(key)
            return default
        return value

    def is_null(self, key: str) -> bool:
        """True if the file says null, where null means something else than a missing key."""
        return key in self.config and self.config[key] is None

    def whole(self, key: str, lowest: int, highest: int, default: Any = MISSING) -> int:
        """A whole number within bounds; ``default`` if it is missing."""
        value = self.take(key, default)
        if value is default and default is not MISSING:
            return value  # type: ignore[no-any-return]
        if type(value) is not int or not lowest <= value <= highest:
            raise self.unexpected(
                key,
                Message("models.whole", "a whole number from {lowest} to {highest}", lowest=lowest, highest=highest),
                value,
            )
        return value

    def positive(self, key: str, default: Any = MISSING) -> float:
        """A number above 10^-30 and below 10^12; ``default`` if it is missing."""
        value = self.take(key, default)
        if value is default and default is not MISSING:
            return value  # type: ignore[no-any-return]
        if type(value) not in (int, float) or not 1e-30 < value < 1e12:
            raise self.not_positive(key, value)
        return float(value)

    def number(self, key: str, default: float) -> float:
        """A number from 0 to below 10^12; ``default`` if it is missing."""
        return default if self.take(key, 0) == 0 else self.positive(key)

    def truth(self, key: str, default: Any = MISSING) -> bool:
        """true or false; ``default`` if it is missing. null is not true: it is refused where true is the default."""
        value = self.take(key, default)
        if self.is_null(key) and default is True:
            value = None
        if type(value) is not bool:
            raise self.unexpected(key, Message("models.truth", "true or false"), value)
        return value

    def choice(self, key: str, named: Mapping[Any, Read], default: Any = MISSING) -> Read:
        """The meaning of a value that must be one of ``named``; ``default`` is such a value."""
        value = self.take(key, default)
        if not isinstance(value, str | int | float | bool) or value not in named:
            raise self.unexpected(key, Message("models.one_of", "one of {values}", values=list(named)), value)
        return named[value]

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any other value than ``allowed``. A missing key means the first of them, and so does null unless it is true."""
        self.left.discard(key)
        value = self.config.get(key)
        value = allowed[0] if value is None and not (self.is_null(key) and allowed[0] is True) else value
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            expected = (
                repr(allowed[0])
                if len(allowed) == 1
                else Message("models.one_of_these", "{values}", values=list(allowed))
            )
            raise self.unexpected(key, expected, value)

    def within(self, key: str, value: Any) -> ConfigReader:
        """A reader of a mapping inside the file."""
        if not isinstance(value, dict):
            raise self.unexpected(key, Message("models.mapping", "a mapping"), value)
        return ConfigReader(value, f"{self.where}: {key}")

    def finish(self, idle: Collection[str] = ()) -> None:
        """Refuse what nothing read. Keys of ``IDLE`` and ``idle`` are allowed if their values are short and plain."""
        for key in sorted(self.left):
            value = self.config[key]
            if key not in IDLE and key not in idle:
                if value is None and key != "is_causal":
                    continue
                if key == "is_causal" and value is True:
                    continue  # null would let a position see later ones
                if key == "auto_map":
                    raise ModelFilesError(
                        "models.own_code", "{file}: auto_map names code in the model's folder, which is never run. If transformers has the "
                                           "class {expected} of its own, remove the key",
                        file=self.where, expected=str(self.config.get("architectures"))[:80],
                    )  # fmt: skip
                if key == "quantization_config":
                    raise ModelFilesError(
                        "models.quantised", "{file}: the weights are quantised (quantization_config: {value}). Use the model's folder with "
                                            "bf16, fp16 or fp32 weights",
                        file=self.where, value=str(value)[:80],
                    )  # fmt: skip
                raise ModelFilesError(
                    "models.unknown_key", "{file}: key {key} (value {value}) cannot be represented. A model with this key could "
                                          "compute something else. Remove the key if you know that it changes nothing. Else use another "
                                          "model: docs/MODELS.md lists which models the factory can compute",
                    file=self.where, key=key[:80], value=str(value)[:80],
                )  # fmt: skip
            values = value if isinstance(value, list) else [value]
            plain = len(values) <= 16 and not any(isinstance(one, dict | list) or len(str(one)) > 80 for one in values)
            if not plain and key != "transformers.js_config":
                raise self.unexpected(key, Message("models.plain", "a short plain value"), value)

    def missing(self, key: str) -> ModelFilesError:
        return ModelFilesError(
            "models.missing_key", "{file}: key {key} is missing. Use the config.json of the model's makers", file=self.where, key=key
        )  # fmt: skip

    def not_positive(self, key: str, value: Any) -> ModelFilesError:
        return self.unexpected(key, Message("models.positive", "a positive number"), value)

    def unexpected(self, key: str, expected: str, value: Any) -> ModelFilesError:
        return ModelFilesError(
            "models.other_value", "{file}: key {key}: expected {expected}, got {given}. If the file is wrong, correct the value. Else use "
                                  "another model: docs/MODELS.md lists the values that the factory can compute",
            file=self.where, key=key[:80], expected=expected, given=str(value)[:80],
        )  # fmt: skip


def read_with(
    build: Callable[[ConfigReader], Read], config: Mapping[str, Any], where: Path | str, idle: Collection[str]
) -> Read:
    """Read a whole file with ``build`` and refuse what it left. Raises: ModelFilesError."""
    reader = ConfigReader(config, where)
    found = build(reader)
    reader.finish(idle)
    return found
