"""Lines of a record: their schema, the writer, and the checks of a reader.

A record is one JSON Lines file for each rank, in one folder for each run. Each line of `rank-R.jsonl` is one object
with a `kind`. A line is written by one call, so that a killed job leaves a record that is whole up to the last write:

    fit       begins a fit: the schema's version, the rank, and the environment; ranks of one fit have the same "id"
    clock     the offset between the clock of this rank and that of rank 0
    steps     some steps, one list for each column; times are seconds since the fit began
    strategy  the strategy that `Auto` chose; the reader adds it to the header as "chosen"
    death     ranks that died, and the others trained on
    division  rows of each rank in a step from some step on, by their speeds
    epoch     the end of an epoch, with its metrics
    end       the end of the fit; absent if the job died

docs/records.md lists the fields.
"""

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdx.errors import ConfigError

#: Version of the schema. A reader refuses a later one.
SCHEMA = 1
#: Parts of a step that an exchange on the host measures; the rest of a step is "other".
PARTS = ("computing", "encoding", "waiting", "exchanging", "decoding")
#: Columns of a line of steps, with one value for each call of the training function (`steps_per_execution` steps):
#: steps and seconds since the fit began, seconds of the call, its parts, its bytes, density of the last step, mean
#: staleness.
COLUMNS = ("step", "time", "seconds", *PARTS, "sent", "received", "density", "staleness")


class Writer:
    """Writer of one rank's record. Each line is appended by a single write.

    Args:
        folder: folder of the run; it is created if it does not exist.

    Raises:
        ConfigError: if the file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int):
        self.path = Path(folder) / f"rank-{rank}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # O_NOFOLLOW: in a folder that others may write to, the name could be a link to any file of this user.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._file: int | None = os.open(self.path, flags, 0o666)
            self._torn = self._ends_in_torn_line(self._file)
        except OSError as error:
            raise ConfigError(
                f"the record: expected a folder that can be written, got {folder}: {error.strerror}. "
                "Set HVDX_RECORD (or Distribute(record=...)) to another folder."
            ) from error

    @staticmethod
    def _ends_in_torn_line(file: int) -> bool:
        size = os.fstat(file).st_size
        return bool(size) and os.pread(file, 1, size - 1) != b"\n"

    def write(self, kind: str, **values: object) -> None:
        """Append one line with some fields; NaN and infinity are written as null.

        Raises:
            OSError: if the line cannot be written, for example on a full disk.
        """
        if self._file is None:
            return
        line = json.dumps({"kind": kind, **_finite(values)}, separators=(",", ":"), default=_plain) + "\n"
        # A process that was killed, or whose disk was full, may have left half a line, which would swallow this one.
        data = (b"\n" if self._torn else b"") + line.encode()
        self._torn = False
        if os.write(self._file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. Later lines are ignored."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _finite(value: object) -> Any:
    """Return a value with None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, np.ndarray) and np.isfinite(value).all():
        return value.tolist()
    if isinstance(value, np.ndarray):
        return _finite(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value


def _plain(value: object) -> Any:
    return value.item() if isinstance(value, np.generic) else str(value)


# Larger numbers are damage: sums and squares of them would leave float64.
_LARGEST = 1e100


def decode(line: str, last_step: float) -> tuple[str, dict[str, Any], str]:
    """Decode and check one line.

    Args:
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


def _are_whole(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_whole, value))


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and _are_whole(value)


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
        ("begin", False, _is_pair, "two whole numbers"),
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
        ("ranks", True, _are_whole, "ranks"),
    ],
    "division": [
        ("position", True, _is_pair, "two whole numbers"),
        ("rows", True, _are_whole, "rows of each rank"),
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
