"""What two Keras configurations have to agree on for their weights to have a mean."""

import json
from collections.abc import Mapping
from typing import Any

from hvdx.errors import AverageError

# A model within a model is six levels; a configuration of a thousand layers has a megabyte.
_MOST_LEVELS = 200
MOST_BYTES = 1 << 24

# Keys that say how weights came about or are trained, and not what the network computes from them; and names, which
# Keras counts on from model to model, as in dense_1 and dense_5.
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


def parse_config(text: Any, where: str) -> tuple[Any, Any]:
    """Parse a configuration that a file holds.

    Args:
        text: JSON.
        where: the file and the place in it, for messages.

    Returns:
        The configuration, and what of it `comparable` leaves.

    Raises:
        AverageError: it is no JSON, or none that describes a model.

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
            f"{where}: expected JSON that describes a model, got what does not ({reason}). The file is damaged: copy "
            "or save it again."
        ) from None


def _check_levels(config: Any) -> None:
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


def comparable(config: Any, places: Mapping[str, int] | None = None) -> Any:
    """A configuration without what may be different in networks that are averaged.

    Layers are known by their places: their names may be different too.

    Args:
        config: as `keras.saving.serialize_keras_object` makes it, or Keras 2's `model.to_json`, parsed.
        places: of the layers, by name, in the model that it is a part of.

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
        # Newer versions of Keras write options that older ones do not have, and that are off: None or False.
        if key not in _IGNORED and not key.endswith(_IGNORED_ENDINGS) and value is not None and value is not False
    }


def _name(layer: Any) -> str | None:
    if not isinstance(layer, dict):
        return None
    inner = layer.get("config")
    return layer.get("name") or (inner.get("name") if isinstance(inner, dict) else None)


def _without_rate(config: Any) -> Any:
    return {k: v for k, v in config.items() if k != "rate"} if isinstance(config, dict) else config


def _references(value: Any, places: Mapping[str, int]) -> Any:
    """Connections between layers, with places for names."""
    if isinstance(value, list | tuple):
        return _reference(value, places) if _is_reference(value, places) else [_references(v, places) for v in value]
    if isinstance(value, dict) and "class_name" not in value:
        return {key: _references(v, places) for key, v in value.items() if v is not None and v is not False}
    return comparable(value, places)


def _is_reference(value: Any, places: Mapping[str, int]) -> bool:
    """Whether it is [layer, node, tensor], and perhaps what else the layer is called with."""
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
