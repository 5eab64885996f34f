"""Lines of a record: decoding, and a check of the fields that reports compute with."""

import json
from collections.abc import Callable
from typing import Any

# Larger numbers are damage: sums and squares of them would leave float64.
_LARGEST = 1e100


def decode(line: str, last_step: float) -> tuple[str, dict[str, Any], str]:
    """Decode and check one line.

    Args:
        line: text of the line.
        last_step: last step of the fit in the lines before.

    Returns:
        The kind of the line, its other fields, and what is wrong with it: "" for nothing.

    Example:
        >>> decode('{"kind":"end","time":"soon"}', 0)
        ('end', {'time': 'soon'}, "time: expected a number, got 'soon'")
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return "", {}, f"expected a JSON object, got {_brief(line)}"
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        return "", {}, f"expected an object with a kind, got {_brief(values)}"
    kind = values.pop("kind")
    if kind == "steps":
        return kind, values, _problem_of_steps(values, last_step)
    return kind, values, next(filter(None, (_problem(values, *rule) for rule in _RULES.get(kind, ()))), "")


def is_cut_off(line: str) -> bool:
    """Return whether a line that cannot be decoded is the beginning of one that a kill cut off."""
    begin = '{"kind":'
    return begin.startswith(line) or (line.startswith(begin) and not line.endswith("}"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value) and value >= 0


def _is_metrics(value: object) -> bool:
    return isinstance(value, dict) and all(number is None or _is_number(number) for number in value.values())


def _are_spans(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(span, list) and len(span) == 3 and isinstance(span[0], str) and all(map(_is_number, span[1:]))
        for span in value
    )


# For each kind: field, True if the line must have it, test of the value, and what is expected.
_RULES: dict[str, list[tuple[str, bool, Callable[[Any], bool], str]]] = {
    "fit": [
        ("schema", False, _is_whole, "a whole number"),
        ("size", False, lambda v: _is_whole(v) and v >= 1, "a whole number of 1 or more"),
        ("time", False, _is_number, "a number"),
        ("id", False, lambda v: isinstance(v, str | int), "a name"),
        ("begin", False, lambda v: isinstance(v, list) and len(v) == 2 and all(map(_is_whole, v)), "two whole numbers"),
    ],
    "epoch": [
        ("epoch", True, _is_whole, "a whole number"),
        ("step", True, _is_number, "a number"),
        ("time", True, _is_number, "a number"),
        ("logs", False, _is_metrics, "numbers by name"),
        ("begin", False, _is_number, "a number"),
        ("spans", False, _are_spans, "names, each with two numbers"),
    ],
    "death": [
        *((name, True, _is_number, "a number") for name in ("time", "left", "seconds")),
        ("ranks", True, lambda v: isinstance(v, list) and bool(v) and all(map(_is_whole, v)), "ranks"),
    ],
    "clock": [(name, True, _is_number, "a number") for name in ("time", "offset", "error")],
    "end": [
        ("time", True, _is_number, "a number"),
        ("counters", False, lambda v: isinstance(v, dict), "numbers by name"),
    ],
}


def _problem(values: dict[str, Any], name: str, required: bool, valid: Callable[[Any], bool], expected: str) -> str:
    if name not in values:
        return f"expected a field {name}, got none" if required else ""
    return "" if valid(values[name]) else f"{name}: expected {expected}, got {_brief(values[name])}"


def _problem_of_steps(values: dict[str, Any], last_step: float) -> str:
    steps = values.get("step")
    if not isinstance(steps, list) or not steps or not all(map(_is_number, steps)):
        return f"step: expected a list of numbers, got {_brief(steps)}"
    if any(b <= a for a, b in zip([last_step, *steps], steps, strict=False)):
        return f"step: expected numbers that grow from {last_step:g}, got {_brief(steps)}"
    for name, column in values.items():
        # A column may hold null, for NaN.
        valid = isinstance(column, list) and all(v is None or _is_number(v) for v in column)
        if not valid or (name in ("time", "seconds") and None in column):
            return f"{name}: expected a list of numbers, got {_brief(column)}"
        if len(column) != len(steps):
            return f"{name}: expected {len(steps)} numbers, one for each step, got {len(column)}"
    return ""


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
