"""Reports to `hvdx run --max-restarts` or `--survive`, which supervises the job and may run on another host.

A report is a line on standard error, which every launcher carries to the supervisor; the supervisor removes it from the
output. Its format is that of JSON text sequences (RFC 7464): a record separator, JSON, a line break.
"""

import contextlib
import json
import os
from collections.abc import Mapping

#: Environment variable: name of the supervised run and number of its attempt, as in "3f2a9c01:2".
VARIABLE = "HVDX_ATTEMPT"
#: Environment variable: folders in which earlier attempts have saved checkpoints, as a list in JSON.
SAVED_VARIABLE = "HVDX_SAVED"
_SEPARATOR, _END = b"\x1e", b"\n"
# Bytes after which a separator without an end is no report.
_LONGEST = 4096


def attempt(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Return the name of the supervised run and the number of its attempt; ("", "") for other jobs.

    Args:
        environ: environment variables; those of this process by default.

    Example:
        >>> attempt({"HVDX_ATTEMPT": "3f2a9c01:2"})
        ('3f2a9c01', '2')
    """
    name, _, number = (os.environ if environ is None else environ).get(VARIABLE, "").partition(":")
    return name, number


def has_saved(folder: str | os.PathLike[str]) -> bool:
    """Return whether an earlier attempt of this job has saved checkpoints in a folder."""
    return os.path.abspath(folder) in json.loads(os.environ.get(SAVED_VARIABLE) or "[]")


def report(kind: str, **values: object) -> None:
    """Write a report, if this job is supervised; do nothing if standard error is closed.

    Args:
        kind: "training" or "saved"; under `--survive` also "moves", again and again, "gave up", after a wait for
            another rank, "unwritten", after the death of rank 0 in the last callbacks of a fit, "over" and "left", of
            any rank, "server", and "spare", of one without work.
        values: values for JSON.
    """
    if os.environ.get(VARIABLE):
        # Not by `sys.stderr`, which a script may replace. One call, so that the launcher passes the line on whole.
        with contextlib.suppress(OSError):
            os.write(2, _SEPARATOR + json.dumps({"kind": kind, **values}).encode() + _END)


def split(data: bytes) -> tuple[bytes, list[dict[str, object]], bytes]:
    """Separate the reports from an output.

    Args:
        data: the rest that the last call returned, and new output.

    Returns:
        The output without reports, the reports, and the begin of a report that is not complete.

    Example:
        >>> split(b'loss 0.3\\x1e{"kind": "training"}\\n, loss 0.2\\x1e{"ki')
        (b'loss 0.3, loss 0.2', [{'kind': 'training'}], b'\\x1e{"ki')
    """
    shown = b""
    reports: list[dict[str, object]] = []
    while _SEPARATOR in data:
        before, _, data = data.partition(_SEPARATOR)
        line, end, after = data.partition(_END)
        shown += before
        if not end and len(line) < _LONGEST:
            return shown, reports, _SEPARATOR + data
        try:
            reports.append({"kind": "", **json.loads(line)})
        except (ValueError, TypeError):  # another program's separator
            shown += _SEPARATOR + line + end
        data = after
    return shown + data, reports, b""
