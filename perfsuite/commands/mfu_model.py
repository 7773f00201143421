"""The model that ``perfsuite mfu`` is asked about: by its parameters, a preset, a config file or its sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfsuite.commands.console import refuse
from perfsuite.commands.mfu_options import Options
from perfsuite.interop.model_config import read_model_config
from perfsuite.models import MODELS, ModelShape
from perfsuite.training_run import TrainedModel, model_of_params, model_of_shape

REQUIRED_SIZES = ("layers", "d_model", "heads", "d_ff", "vocab")
SIZES = (*REQUIRED_SIZES, "kv_heads", "head_dim", "experts", "active_experts", "gated", "tied")
WAYS = "--params N, --model PRESET, --config FILE, or its sizes (--layers, --d-model, --heads, --d-ff, --vocab)"


def trained_model(options: Options) -> TrainedModel:
    """The model with its FLOPs of a token; what contradicts itself or is missing is refused by the option's name."""
    given = _given(options, ("params", "model", "config"))
    flags = [*given, *_given(options, SIZES)[:1]]
    if not flags:
        refuse(f"no model: give one of {WAYS}")
    if len(flags) > 1:
        refuse(f"{' and '.join(flags)} contradict each other; give one of {WAYS}")
    if options.params is not None:
        if options.seq_len is not None:
            refuse("--seq-len: 6N counts no attention; leave it out, or give --model, --config or sizes for --params")
        return model_of_params(options.params)
    if options.model is not None:
        return _preset(options.model, options.seq_len)
    if options.config is not None:
        return _configured(options.config, options.seq_len)
    return _by_sizes(options)


def _given(options: Options, names: tuple[str, ...]) -> list[str]:
    return [_flag(name) for name in names if getattr(options, name) is not None]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _preset(name: str, seq_len: int | None) -> TrainedModel:
    if name not in MODELS:
        refuse(f"--model {name}: use one of {', '.join(MODELS)}")
    return _counted(name, MODELS[name], seq_len)


def _configured(path: Path, seq_len: int | None) -> TrainedModel:
    """The model of a config file; one whose attention looks back over a window only as far as that is full."""
    config = read_model_config(path)
    if config.window is not None and (seq_len or config.shape.context) > config.window:
        refuse(
            f"--config {path}: sliding_window={config.window}, and attention over a window is not counted; "
            f"give --seq-len {config.window} or less"
        )
    return _counted(str(path), config.shape, seq_len)


def _counted(name: str, shape: ModelShape, seq_len: int | None) -> TrainedModel:
    """The model at a sequence length that it can have; its own where none is given."""
    length = seq_len or shape.context
    if not length:
        refuse(f"--seq-len is missing: {name} does not tell how long a sequence is")
    if shape.positions and length > shape.positions:
        refuse(f"--seq-len {length}: {name} has learned positions for {shape.positions} tokens; give at most that")
    return model_of_shape(name, shape, seq_len=length)


def _by_sizes(options: Options) -> TrainedModel:
    """A model of Llama's kind, or with --no-gated of GPT's, with learned positions for one sequence."""
    missing = [_flag(name) for name in (*REQUIRED_SIZES, "seq_len") if getattr(options, name) is None]
    if missing or options.seq_len is None:
        refuse(f"{', '.join(missing)}: missing; a model by its sizes needs each of these")
    sizes: dict[str, Any] = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    gated = sizes.setdefault("gated", True)
    sizes.setdefault("kv_heads", sizes["heads"])
    if "head_dim" not in sizes:
        if sizes["d_model"] % sizes["heads"]:
            refuse(f"--head-dim is missing: --d-model {sizes['d_model']} is no multiple of --heads {sizes['heads']}")
        sizes["head_dim"] = sizes["d_model"] // sizes["heads"]
    _refuse_heads(sizes)
    _refuse_experts(options)
    shape = ModelShape(**sizes, bias=not gated, positions=0 if gated else options.seq_len)
    return _counted("by its sizes", shape, options.seq_len)


def _refuse_heads(sizes: dict[str, Any]) -> None:
    """Heads that no model has, by the options that make them."""
    heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    if heads % kv_heads:
        refuse(f"--kv-heads {kv_heads}: --heads {heads} must be a multiple of it")
    if sizes["gated"] and head_dim % 2:
        refuse(f"--head-dim {head_dim} must be even: rotary positions turn pairs; give an even one, or --no-gated")


def _refuse_experts(options: Options) -> None:
    """A mixture that is half given, or that no model here is."""
    experts, active = options.experts, options.active_experts
    if experts is None and active is None:
        return
    if experts is None or active is None:
        refuse("--experts and --active-experts go together; give both, or neither for a dense model")
    if active > experts:
        refuse(f"--active-experts {active} must be at most --experts {experts}")
    if options.gated is False:
        refuse(f"--experts {experts} goes with --gated: leave out --no-gated")
