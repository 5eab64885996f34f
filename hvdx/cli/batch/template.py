"""Templates of batch scripts, from `jobs/templates`: filling in values, and quoting for the shell."""

import re
import shlex
import string
from collections.abc import Mapping, Sequence
from importlib import resources

from hvdx.errors import ConfigError

#: Value of a placeholder: text, a number, several lines, or nothing.
Value = str | int | Sequence[str] | None

_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
# The characters that are special to the shell inside double quotes.
_SPECIAL = re.compile(r'[\\"`$]')


class Script(string.Template):
    """A shell script with placeholders `@{name}`; `$name`, `"$@"` and `$(...)` are left for the shell."""

    delimiter = "@"
    # Only @ with braces is special, so that `--signal=B:USR1@300` needs no escape.
    pattern = r"@\{(?P<braced>[a-z_]+)\}|(?P<named>(?!))|(?P<escaped>(?!))|(?P<invalid>(?!))"  # type: ignore[assignment]


def template(name: str) -> str:
    """Return the text of the template with this file name.

    Example:
        >>> template("slurm.sh").splitlines()[0]
        '#!/bin/bash'
    """
    return (resources.files("hvdx.jobs") / "templates" / name).read_text()


def fill(text: str, values: Mapping[str, Value]) -> str:
    """Fill values into a template.

    A line is left out if one of its placeholders is None or an empty list. A list repeats its line. Several empty lines
    in a row become one.

    Raises:
        KeyError: if `values` lacks a placeholder.

    Example:
        >>> fill("a=@{a}\\nb=@{b}\\nc=@{c}\\n", {"a": 1, "b": None, "c": ["2", "3"]})
        'a=1\\nc=2\\nc=3\\n'
    """
    lines: list[str] = []
    for line in text.splitlines():
        # Drop empty lines here and not in the result, because a user's word may contain empty lines.
        if line or (lines and lines[-1]):
            lines += _filled(line, values)
    return "\n".join(lines) + "\n"


def _filled(line: str, values: Mapping[str, Value]) -> list[str]:
    names = Script(line).get_identifiers()
    settings = {name: values[name] for name in names}
    if any(value is None or value == [] or value == () for value in settings.values()):
        return []
    repeated = next((n for n, v in settings.items() if not isinstance(v, str | int)), None)
    if repeated is None:
        return [Script(line).substitute(settings)]
    return [Script(line).substitute(settings | {repeated: item}) for item in settings[repeated]]  # type: ignore[union-attr]


def shell_words(words: Sequence[str]) -> str:
    """Quote the words of a command for a shell, which still expands `$NAME` and `${NAME}` in them.

    Example:
        >>> print(shell_words(["python", "train.py", "--seed=$SLURM_ARRAY_TASK_ID", "a b", "$(date)"]))
        python train.py "--seed=$SLURM_ARRAY_TASK_ID" 'a b' '$(date)'
    """
    return " ".join(_expanding(word) if _VARIABLE.search(word) else shlex.quote(word) for word in words)


def _expanding(word: str) -> str:
    """Put a word in double quotes, in which the shell expands only variables."""
    text, end = "", 0
    for variable in _VARIABLE.finditer(word):
        text += _escaped(word[end : variable.start()]) + variable.group()
        end = variable.end()
    return f'"{text}{_escaped(word[end:])}"'


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


def plain_word(what: str, text: str) -> str:
    """Return the value `text` of the option `what` if a directive can hold it: one word without shell characters.

    Raises:
        ConfigError: if it is not such a word.

    Example:
        >>> plain_word("--account", "project-7")
        'project-7'
    """
    if not re.fullmatch(r"[\w.,:%/@+=~^-]+", text):
        raise ConfigError(
            f"job: {what}: expected one word of letters, digits and . , : % / @ + = ~ ^ - _, got {text!r}. "
            "Do: use such a word, and edit the script by hand if it needs another value."
        )
    return text


def plain_line(what: str, text: str) -> str:
    """Return the value `text` of the option `what` if it is one line of a script.

    Raises:
        ConfigError: if it is empty, or more than one line.

    Example:
        >>> plain_line("--env-setup", "module load cuda")
        'module load cuda'
    """
    if not text.strip() or len(text.splitlines()) != 1:
        raise ConfigError(f"job: {what}: expected one line, got {text!r}. Do: give the option once for each line.")
    return text
