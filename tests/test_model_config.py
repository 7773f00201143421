"""Sizes from config.json files: published models by their parameter counts, and files that cannot be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.errors import FileError
from perfsuite.interop.model_config import READERS, ModelConfig, read_model_config
from perfsuite.models import MODELS

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL = {**LLAMA3, "model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768}
MIXTRAL = {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


def read(directory: Path, content: object) -> ModelConfig:
    path = directory / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return read_model_config(path)


@pytest.mark.parametrize(
    ("content", "parameters"),
    [
        (GPT2, 124_439_808),
        ({**GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24, "n_inner": None}, 354_823_168),  # GPT-2 medium
        (LLAMA3, 8_030_261_248),
        # Llama-2-7B: as many heads of keys as of queries, which the first files did not say.
        (
            {
                **{key: value for key, value in LLAMA3.items() if key != "num_key_value_heads"},
                "intermediate_size": 11008,
                "vocab_size": 32000,
            },
            6_738_415_616,
        ),
        # Llama-3.2-1B: a tied head.
        (
            {
                **LLAMA3,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
            1_235_814_400,
        ),
        (MISTRAL, 7_241_732_096),
        # Mistral-Nemo-12B: heads narrower than the model's width shared by them.
        (
            {**MISTRAL, "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128, "vocab_size": 131072},
            12_247_782_400,
        ),
        (MIXTRAL, 46_702_792_704),
    ],
)
def test_parameters_are_the_published_ones(tmp_path: Path, content: dict[str, Any], parameters: int) -> None:
    assert read(tmp_path, content).shape.parameters() == parameters


def test_a_config_gives_the_presets_sizes(tmp_path: Path) -> None:
    assert read(tmp_path, GPT2).shape == MODELS["gpt2-124m"]
    assert read(tmp_path, {**LLAMA3, "head_dim": None}).shape.matmul_weights() == MODELS["llama3-8b"].matmul_weights()
    mixtral = read(tmp_path, MIXTRAL).shape
    assert (mixtral.experts, mixtral.active_experts, mixtral.context) == (8, 2, 32768)


def test_a_window_is_told(tmp_path: Path) -> None:
    assert read(tmp_path, {**MISTRAL, "sliding_window": 4096}).window == 4096
    assert read(tmp_path, {**MISTRAL, "sliding_window": None}).window is None
    assert read(tmp_path, MISTRAL).window is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "not JSON: Input data was truncated"),
        ("{", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ("[]", "not a model's config: the file holds no JSON object"),
        ({}, "model_type=None is not known; use one of llama, mistral, mixtral, gpt2, or give the sizes"),
        ({"model_type": "gemma3"}, "model_type='gemma3' is not known; use one of llama, mistral, mixtral, gpt2"),
        ({"model_type": ["llama"]}, "model_type=['llama'] is not known"),
        ({"model_type": "llama"}, "num_attention_heads is missing; give a config of model_type llama"),
        ({**LLAMA3, "vocab_size": None}, "vocab_size is missing"),
        ({**GPT2, "n_positions": None}, "n_positions is missing; give a config of model_type gpt2"),
        ({**MISTRAL, "num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({**MIXTRAL, "num_local_experts": None}, "num_local_experts is missing"),
        ({**LLAMA3, "hidden_size": 4096.0}, "hidden_size=4096.0 must be a whole number of at least 1"),
        ({**LLAMA3, "hidden_size": "4096"}, "hidden_size='4096' must be a whole number of at least 1"),
        ({**LLAMA3, "hidden_size": True}, "hidden_size=True must be a whole number of at least 1"),
        ({**LLAMA3, "num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number of at least 1"),
        ({**LLAMA3, "max_position_embeddings": -1}, "max_position_embeddings=-1 must be a whole number"),
        ({**LLAMA3, "tie_word_embeddings": 1}, "tie_word_embeddings=1 must be true or false"),
        ({**LLAMA3, "num_attention_heads": 30}, "the width 4096 is not a multiple of 30 heads; give head_dim"),
        ({**LLAMA3, "num_key_value_heads": 5}, "model: heads=32 must be a multiple of kv_heads=5"),
        ({**MIXTRAL, "num_experts_per_tok": 9}, "model: active_experts=9 must lie between 1 and experts=8"),
        ({**LLAMA3, "mlp_bias": True}, "mlp_bias=true: biases of such models are not counted"),
        ({**LLAMA3, "attention_bias": True}, "attention_bias=true: biases of such models are not counted"),
    ],
)
def test_a_fault_names_file_key_and_value(tmp_path: Path, content: object, fault: str) -> None:
    with pytest.raises(FileError) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {fault}")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read: Is a directory"):
        read_model_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(FileError, match="not JSON: "):
        read_model_config(path)


KEYS = sorted({key for content in (GPT2, MIXTRAL) for key in content if key != "model_type"} | {"head_dim", "n_inner"})
VALUES: st.SearchStrategy[object] = (
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3) | st.just([])
)


@given(kind=st.sampled_from(list(READERS)), changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_values_are_sizes_or_one_line(
    kind: str, changes: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("configs")
    fault = ""
    try:
        assert read(directory, {**GPT2, **MIXTRAL, **changes, "model_type": kind}).shape.parameters() > 0
    except FileError as error:
        fault = str(error)
    assert "\n" not in fault
