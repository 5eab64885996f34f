"""Comparison of Keras configurations: the parts that must be equal for the weights to have a mean."""

import json
from collections.abc import Mapping
from typing import Any

from hvdx.errors import AverageError

# A model within a model has six levels; the configuration of a thousand layers has a megabyte.
_MOST_LEVELS = 200
MOST_BYTES = 1 << 24

# Keys that describe initialisation and training and do not change what the network computes; and names, which Keras
# numbers across models (dense_1 in one, dense_5 in the next).
_IGNORED = frozenset(
    [
        "backend",
        "build_config",
        "build_input_shape",
        "compile_config",
        "dropout",
        "input_shape",
        "keras_version",
        "module",
        "momentum",
        "name",
        "noise_shape",
        "quantization_config",
        "recurrent_dropout",
        "registered_name",
        "renorm_clipping",
        "renorm_momentum",
        "seed",
        "shared_object_id",
        "synchronized",
        "trainable",
    ]
)
_IGNORED_ENDINGS = ("_initializer", "_regularizer", "_constraint", "_dropout")
_REFERENCES = ("inbound_nodes", "input_layers", "output_layers")


def parse_config(text: str | bytes, where: str) -> tuple[Any, Any]:
    """Parse the configuration of a saved model.

    Returns:
        The configuration, and the part of it that `comparable` returns.

    Raises:
        AverageError: if the text is not JSON, or does not describe a model.

    Example:
        >>> parse_config('{"class_name": "Dense", "name": "dense_7"}', "model.keras")
        ({'class_name': 'Dense', 'name': 'dense_7'}, {'class_name': 'Dense'})
    """
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        config = json.loads(text)
        _check_levels(config)
        return config, comparable(config)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{error or type(error).__name__}".split("\n")[0]
        raise AverageError(
            f"{where}: expected JSON that describes a model, got something else ({reason}). The file is damaged: "
            "copy or save it again."
        ) from None


def _check_levels(config: object) -> None:
    level = [config]
    for _ in range(_MOST_LEVELS):
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"more than {_MOST_LEVELS} levels")


def comparable(config: object, places: Mapping[str, int] | None = None) -> Any:
    """Return a configuration without the parts that may differ between networks that are averaged.

    Layers are identified by their positions, since their names may differ.

    Args:
        config: result of `keras.saving.serialize_keras_object`, or the parsed `model.to_json` of Keras 2.
        places: positions of the layers, by name, in the model that `config` is a part of.

    Returns:
        Nested dictionaries and lists.

    Example:
        >>> layer = {"class_name": "Dense", "config": {"name": "dense_7", "units": 3, "trainable": False}}
        >>> comparable({"class_name": "Sequential", "config": {"name": "sequential_2", "layers": [layer]}})
        {'class_name': 'Sequential', 'config': {'layers': [{'class_name': 'Dense', 'config': {'units': 3}}]}}
    """
    places = places or {}
    if isinstance(config, list | tuple):
        return [comparable(item, places) for item in config]
    if not isinstance(config, dict):
        return config
    if str(config.get("class_name", "")).endswith("DTypePolicy"):
        return config.get("config")
    if config.get("class_name") == "__keras_tensor__":
        return _reference(config["config"].get("keras_history"), places)
    if isinstance(config.get("layers"), list):
        places = {name: i for i, name in enumerate(map(_name, config["layers"])) if name is not None}
    noise = "Dropout" in str(config.get("class_name", ""))
    return {
        key: _references(value, places)
        if key in _REFERENCES
        else comparable(_without_rate(value) if noise and key == "config" else value, places)
        for key, value in config.items()
        # Newer versions of Keras write options that older ones lack; None or False means that an option is off.
        if key not in _IGNORED and not key.endswith(_IGNORED_ENDINGS) and value is not None and value is not False
    }


def _name(layer: object) -> str | None:
    if not isinstance(layer, dict):
        return None
    inner = layer.get("config")
    return layer.get("name") or (inner.get("name") if isinstance(inner, dict) else None)


def _without_rate(config: object) -> Any:
    return {k: v for k, v in config.items() if k != "rate"} if isinstance(config, dict) else config


def _references(value: object, places: Mapping[str, int]) -> Any:
    """Return connections between layers, with positions in place of names."""
    if isinstance(value, list | tuple):
        return _reference(value, places) if _is_reference(value, places) else [_references(v, places) for v in value]
    if isinstance(value, dict) and "class_name" not in value:
        return {key: _references(v, places) for key, v in value.items() if v is not None and v is not False}
    return comparable(value, places)


def _is_reference(value: Any, places: Mapping[str, int]) -> bool:
    """Return whether a list is [layer, node, tensor], perhaps followed by other arguments of the call."""
    return (
        len(value) >= 3
        and isinstance(value[0], str)
        and value[0] in places
        and all(isinstance(v, int) for v in value[1:3])
    )


def _reference(value: Any, places: Mapping[str, int]) -> Any:
    if not value:
        return value
    name, *rest = value
    return [places.get(name, name), *(comparable(v, places) for v in rest)]
