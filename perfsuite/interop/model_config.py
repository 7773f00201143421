"""A model's sizes from a ``config.json`` as Hugging Face's Transformers writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from perfsuite.errors import CaseError, FileError
from perfsuite.models import ModelShape

LLAMA_SIZES = {
    "layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "vocab": "vocab_size",
}
GPT2_SIZES = {"layers": "n_layer", "d_model": "n_embd", "heads": "n_head", "vocab": "vocab_size"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes in a file; ``context`` of the shape is the longest sequence that the file allows, 0 where it is silent.

    ``window`` is over how many tokens attention looks back, None where it sees all of them.
    """

    shape: ModelShape
    window: int | None


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """The file's content, each value taken by its key and checked; ``where`` is the file for messages."""

    where: str
    values: Mapping[str, Any]

    def whole(self, key: str) -> int:
        """A whole number that has to be there."""
        if self.values.get(key) is None:
            raise FileError(f"{self.where}: {key} is missing; give a config of model_type {self.values['model_type']}")
        return self._whole(key)

    def whole_or(self, key: str, default: int) -> int:
        """A whole number that may be left out or null."""
        return default if self.values.get(key) is None else self._whole(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, which may be left out or null."""
        value = default if self.values.get(key) is None else self.values[key]
        if not isinstance(value, bool):
            raise FileError(f"{self.where}: {key}={value!r} must be true or false")
        return value

    def head_dim(self, d_model: int, heads: int) -> int:
        """A head's size: the file's, else the model's width shared by the heads."""
        if self.values.get("head_dim") is None and d_model % heads:
            raise FileError(f"{self.where}: the width {d_model} is not a multiple of {heads} heads; give head_dim")
        return self.whole_or("head_dim", d_model // heads)

    def _whole(self, key: str) -> int:
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FileError(f"{self.where}: {key}={value!r} must be a whole number of at least 1")
        return value


def read_model_config(path: Path) -> ModelConfig:
    """The sizes in the file at ``path``; a FileError names file, key and value where they cannot be told."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise FileError(f"{path}: not a model's config: the file holds no JSON object")
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise FileError(f"{path}: model_type={kind!r} is not known; use one of {', '.join(READERS)}, or give the sizes")
    try:
        return READERS[kind](_Fields(where=str(path), values=values))
    except CaseError as error:
        raise FileError(f"{path}: {error}") from None


def _gpt2(fields: _Fields) -> ModelConfig:
    sizes = {name: fields.whole(key) for name, key in GPT2_SIZES.items()}
    positions = fields.whole("n_positions")
    shape = ModelShape(
        **sizes,
        kv_heads=sizes["heads"],
        head_dim=fields.head_dim(sizes["d_model"], sizes["heads"]),
        d_ff=fields.whole_or("n_inner", 4 * sizes["d_model"]),
        gated=False,
        bias=True,
        tied=fields.flag("tie_word_embeddings", default=True),
        positions=positions,
        context=positions,
    )
    return ModelConfig(shape=shape, window=None)


def _llama(fields: _Fields) -> ModelConfig:
    """Llama's kind; a Llama file that does not tell the heads of keys and values has as many as queries."""
    return _llama_kind(fields, kv_heads=fields.whole_or("num_key_value_heads", fields.whole("num_attention_heads")))


def _mistral(fields: _Fields) -> ModelConfig:
    return _llama_kind(fields, kv_heads=fields.whole("num_key_value_heads"))


def _mixtral(fields: _Fields) -> ModelConfig:
    return _llama_kind(
        fields,
        kv_heads=fields.whole("num_key_value_heads"),
        experts=fields.whole("num_local_experts"),
        active_experts=fields.whole("num_experts_per_tok"),
    )


def _llama_kind(fields: _Fields, *, kv_heads: int, experts: int = 0, active_experts: int = 0) -> ModelConfig:
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key, default=False):
            raise FileError(f"{fields.where}: {key}=true: biases of such models are not counted; set it to false")
    sizes: dict[str, Any] = {name: fields.whole(key) for name, key in LLAMA_SIZES.items()}
    shape = ModelShape(
        **sizes,
        kv_heads=kv_heads,
        experts=experts,
        active_experts=active_experts,
        head_dim=fields.head_dim(sizes["d_model"], sizes["heads"]),
        tied=fields.flag("tie_word_embeddings", default=False),
        context=fields.whole_or("max_position_embeddings", 0),
    )
    window = fields.whole_or("sliding_window", 0)
    return ModelConfig(shape=shape, window=window or None)


READERS = {"llama": _llama, "mistral": _mistral, "mixtral": _mixtral, "gpt2": _gpt2}
