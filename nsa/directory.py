"""A model as a directory: `config.json` and `model.safetensors`.

Hugging Face's tools read the same directory (`nsa.hf`). Reading a directory runs no code from it.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from nsa.config import ModelConfig, NSAConfig, parameter_count
from nsa.model import Transformer

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MODEL_TYPE = "nsa"
"""The type in `config.json`, by which Hugging Face's tools find `nsa.hf`."""


def save_model(
    model: Transformer, directory: Path | str, facts: Mapping[str, str] | None = None
) -> None:
    """Writes the configuration and the weights of a model to a directory.

    `facts` are added to the metadata of the weights. An interrupted write leaves the earlier model
    or no `config.json`, so `load_model` never returns a mixture. Raises OSError, for example if the
    directory has a `config.json` of another kind. Raises ValueError for a model with `force_branch`
    or `uniform_gate`.
    """
    if any(layer.switches.fixed_gate for layer in model.attention_layers()):
        raise ValueError("a directory cannot describe force_branch or uniform_gate of a model")
    path = Path(directory)
    config = {
        "model_type": MODEL_TYPE, "architectures": ["NSAForCausalLM"],
        "dtype": str(model.head.weight.dtype).removeprefix("torch."), "model": asdict(model.config),
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    try:
        _described(path)
    except ValueError as error:
        raise FileExistsError(
            f"{path} has a {CONFIG} of another kind; name another directory"
        ) from error
    except FileNotFoundError:
        pass
    # torch.compile wraps a module, and adds this prefix to the names of its weights.
    named = {name.replace("_orig_mod.", ""): x for name, x in model.state_dict().items()}
    weights = save(named, {"format": "pt", **(facts or {})})
    for name, data in ((WEIGHTS, weights), (CONFIG, json.dumps(config, indent=2).encode() + b"\n")):
        with (path / f".{name}.new").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # before config.json completes the directory
    (path / CONFIG).unlink(missing_ok=True)
    for name in (WEIGHTS, CONFIG):
        (path / f".{name}.new").replace(path / name)


def load_model(directory: Path | str) -> Transformer:
    """Returns the model of a directory, on the CPU, in the dtype of its weights.

    Raises ValueError if the directory cannot be loaded, for example if a file is missing or of
    another kind.
    """
    path = Path(directory)
    try:
        config = model_config(_described(path))
        weights = load((path / WEIGHTS).read_bytes())
        # `NSAForCausalLM.save_pretrained` writes the names with this prefix.
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
        return _with_weights(config, weights)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{directory} cannot be loaded as a model: {reason}") from error


def _described(path: Path) -> Any:
    """Returns `model` of a directory's config.json, unchecked. Raises ValueError or OSError."""
    found = json.loads((path / CONFIG).read_text())
    if not isinstance(found, dict) or found.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{CONFIG} does not have the model_type {MODEL_TYPE!r}")
    return found.get("model")


def _with_weights(config: ModelConfig, weights: dict[str, Tensor]) -> Transformer:
    """Returns the model with these weights. Raises RuntimeError or ValueError."""
    total, expected = sum(x.numel() for x in weights.values()), parameter_count(config)
    if total != expected:  # checked first: a damaged configuration may describe a huge model
        raise ValueError(f"{WEIGHTS} has {total} parameters, {CONFIG} describes {expected}")
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, assign=True)
    return model


def model_config(values: Any, kind: type = ModelConfig) -> Any:
    """Returns a configuration made from plain data, for example from JSON. Raises ValueError."""
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} must be a mapping; got {values!r:.40}")
    types, found = get_type_hints(kind), dict(values)
    for name in [name for name in types if name in found]:
        hint, value, choices = types[name], found[name], get_args(types[name])
        if hint is NSAConfig:
            found[name] = model_config(value, NSAConfig)
            continue
        number = type(value) in ((int, float) if hint is float else (hint,))
        usual = number and (0 < value < math.inf or value == getattr(kind, name, None))
        if not (value in choices if choices else usual):
            expected = f"one of {choices}" if choices else f"a positive {hint.__name__}"
            raise ValueError(f"{name} must be {expected}; got {value!r:.40}")
    try:
        return kind(**found)
    except TypeError as error:  # a field is missing or unknown
        raise ValueError(str(error)) from error
