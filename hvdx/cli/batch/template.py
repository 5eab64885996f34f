"""Batch scripts from the templates in `jobs/templates`: how they are filled in, and how words become shell words."""

import re
import shlex
import string
from collections.abc import Mapping, Sequence
from importlib import resources

from hvdx.errors import ConfigError

#: What a placeholder may stand for: text, a number, several lines, or nothing.
Value = str | int | Sequence[str] | None

_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
# Inside double quotes these four mean something to the shell.
_SPECIAL = re.compile(r'[\\"`$]')


class Script(string.Template):
    """A shell script with placeholders `@{name}`, so that `$name`, `"$@"` and `$(...)` stay the shell's."""

    delimiter = "@"
    # Braces are needed, and no other @ is special: `--signal=B:USR1@300` needs no escape.
    pattern = r"@\{(?P<braced>[a-z_]+)\}|(?P<named>(?!))|(?P<escaped>(?!))|(?P<invalid>(?!))"  # type: ignore[assignment]


def template(name: str) -> str:
    """The text of a template that came with hvdx.

    Args:
        name: its file name.

    Example:
        >>> template("slurm.sh").splitlines()[0]
        '#!/bin/bash'
    """
    return (resources.files("hvdx.jobs") / "templates" / name).read_text()


def fill(text: str, values: Mapping[str, Value]) -> str:
    """Put values into a template.

    A line with a placeholder that has no value (None, or an empty list) is left out; a list repeats its line. Where
    lines were left out, one empty line is enough.

    Args:
        text: the template.
        values: one for each placeholder.

    Raises:
        KeyError: a placeholder that `values` does not have.

    Example:
        >>> fill("a=@{a}\\nb=@{b}\\nc=@{c}\\n", {"a": 1, "b": None, "c": ["2", "3"]})
        'a=1\\nc=2\\nc=3\\n'
    """
    lines: list[str] = []
    for line in text.splitlines():
        # Looked at here, not in the result: an empty line in a user's word is none of the template's.
        if line or (lines and lines[-1]):
            lines += _filled(line, values)
    return "\n".join(lines) + "\n"


def _filled(line: str, values: Mapping[str, Value]) -> list[str]:
    names = Script(line).get_identifiers()
    given = {name: values[name] for name in names}
    if any(value is None or value == [] or value == () for value in given.values()):
        return []
    repeated = next((n for n, v in given.items() if not isinstance(v, str | int)), None)
    if repeated is None:
        return [Script(line).substitute(given)]
    return [Script(line).substitute(given | {repeated: item}) for item in given[repeated]]  # type: ignore[union-attr]


def shell_words(words: Sequence[str]) -> str:
    """Words as a shell reads them back; `$NAME` and `${NAME}` are left for the shell of the job to expand.

    Args:
        words: a command and its arguments.

    Example:
        >>> print(shell_words(["python", "train.py", "--seed=$SLURM_ARRAY_TASK_ID", "a b", "$(date)"]))
        python train.py "--seed=$SLURM_ARRAY_TASK_ID" 'a b' '$(date)'
    """
    return " ".join(_expanding(word) if _VARIABLE.search(word) else shlex.quote(word) for word in words)


def _expanding(word: str) -> str:
    """A word in double quotes, in which variables are all that expands."""
    text, end = "", 0
    for variable in _VARIABLE.finditer(word):
        text += _escaped(word[end : variable.start()]) + variable.group()
        end = variable.end()
    return f'"{text}{_escaped(word[end:])}"'


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


def plain_word(what: str, text: str) -> str:
    """Let through what a batch system's directive can hold: one word, without quotes or signs of the shell.

    Args:
        what: the option, for the message.
        text: its value.

    Raises:
        ConfigError: it is something else.

    Example:
        >>> plain_word("--account", "project-7")
        'project-7'
    """
    if not re.fullmatch(r"[\w.,:%/@+=~^-]+", text):
        raise ConfigError(
            f"job: {what}: expected one word of letters, digits and . , : % / @ + = ~ ^ - _, got {text!r}. "
            "Do: edit the script by hand where it has to be something else."
        )
    return text


def plain_line(what: str, text: str) -> str:
    """Let through what stays one line of a script.

    Args:
        what: the option, for the message.
        text: the line.

    Raises:
        ConfigError: it is empty, or more than one line.

    Example:
        >>> plain_line("--env-setup", "module load cuda")
        'module load cuda'
    """
    if not text.strip() or len(text.splitlines()) != 1:
        raise ConfigError(f"job: {what}: expected one line, got {text!r}. Do: give the option once for each line.")
    return text
