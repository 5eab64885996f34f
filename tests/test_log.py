"""Messages: lines on stderr, or records of the logger "hvdx" for a program that has handlers."""

import ast
import contextlib
import io
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hvdx import log
from hvdx.log import ERROR, WARNING, Log

ROOT = Path(__file__).resolve().parent.parent
# Files that write to stderr themselves, and why.
WRITERS = {
    "hvdx/log.py": "the others write by it",
    "hvdx/cli/average.py": "a progress bar",
    "hvdx/cli/comparing/runner.py": "a progress line, which is written in parts",
    "hvdx/cli/comparing/guard.py": "a process without hvdx, which speaks for the command that it starts",
}
HELD = """
import logging, sys, threading, time
from hvdx.comm import failure, mpi

mpi.abort = lambda status: None
handler = logging.FileHandler(sys.argv[1])
logging.getLogger("hvdx").addHandler(handler)
held = threading.Event()

def hold():
    with logging._lock, handler.lock:
        held.set()
        time.sleep(60)

failure.install(1, 2)
threading.Thread(target=hold, daemon=True).start()
held.wait()
raise ValueError("no such image")
"""
AT_EXIT = """
import atexit, threading
from hvdx.log import ERROR, Log

say = Log("hvdx.test")
atexit.register(lambda: say.urgent(ERROR, "two"))
atexit.register(lambda: say.info("one"))
"""
WITH_CAPLOG = """
from hvdx.log import Log

def test_message(caplog, capfd):
    Log("hvdx.test").info("text")
    assert [(r.name, r.levelname, r.message) for r in caplog.records] == [("hvdx.test", "INFO", "text")]
    assert capfd.readouterr().err == ""
"""


class Records(logging.Handler):
    """Handler that collects records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def say():
    return Log("hvdx.test")


@pytest.fixture(autouse=True)
def _loggers_as_before():
    loggers = [logging.getLogger(name) for name in ("", "hvdx", "hvdx.test")]
    before = [(logger, [*logger.handlers], logger.level) for logger in loggers]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture
def records():
    handler = Records()
    logging.getLogger("hvdx").addHandler(handler)
    return handler.records


def python(*words):
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)


def test_lines_on_stderr(say, capfd):
    say.info("100 % of it")
    say.warning("text", head="\nhvdx: WARNING: ")
    say.error("text", head="")
    say.urgent(WARNING, "two\nlines")
    assert capfd.readouterr() == ("", "hvdx: 100 % of it\n\nhvdx: WARNING: text\ntext\nhvdx: two\nlines\n")


def test_traceback_precedes_the_line(say, capfd):
    try:
        raise ValueError("wrong")
    except ValueError as error:
        say.urgent(ERROR, "failed", (type(error), error, error.__traceback__))
    text = capfd.readouterr().err
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("\nValueError: wrong\nhvdx: failed\n")


@pytest.mark.parametrize("rank", [None, 3])
def test_records_of_a_handler(say, records, capfd, monkeypatch, rank):
    monkeypatch.setattr(log, "_rank", None)
    if rank is not None:
        log.set_rank(rank)
    say.info("fact")
    say.warning("warning", head="hvdx: WARNING: ")
    say.error("failure")
    say.urgent(ERROR, "end")
    found = [(r.levelname, r.getMessage(), r.rank, r.name) for r in records]
    assert found == [
        ("INFO", "fact", rank, "hvdx.test"),
        ("WARNING", "warning", rank, "hvdx.test"),
        ("ERROR", "failure", rank, "hvdx.test"),
        ("ERROR", "end", rank, "hvdx.test"),
    ]
    assert {(r.pathname, r.funcName) for r in records} == {(__file__, "test_records_of_a_handler")}
    assert capfd.readouterr().err == ""


def test_level_and_null_handler_silence(say, capfd):
    logging.getLogger("hvdx").setLevel(WARNING)
    say.info("fact")
    say.warning("warning")
    assert capfd.readouterr().err == "hvdx: warning\n"
    logging.getLogger("hvdx").addHandler(logging.NullHandler())
    say.error("failure")
    assert capfd.readouterr().err == ""


def test_filter_of_the_logger_without_a_handler(say, capfd):
    logger = logging.getLogger("hvdx.test")
    logger.addFilter(lambda record: "secret" not in record.getMessage())
    say.info("a secret")
    logger.filters.clear()
    assert capfd.readouterr().err == ""


def test_failure_is_written_even_if_its_level_is_off(say, capfd):
    logging.getLogger("hvdx").setLevel(ERROR + 1)
    say.urgent(WARNING, "stalled")
    say.urgent(ERROR, "failed")
    assert capfd.readouterr().err == "hvdx: failed\n"


@pytest.mark.parametrize(
    ("how", "line"), [({}, "hvdx: text\n"), ({"format": "%(levelname)s %(message)s"}, "INFO text\n")]
)
def test_basic_config_neither_loses_nor_doubles(say, capsys, how, line):
    logging.basicConfig(force=True, **how)
    say.info("text")
    assert capsys.readouterr().err == line


def test_basic_config_with_a_file(say, capsys, tmp_path):
    logging.basicConfig(force=True, filename=tmp_path / "log")
    say.info("text")
    assert (tmp_path / "log").read_text() == "INFO:hvdx.test:text\n"
    assert capsys.readouterr().err == ""


def test_look_is_the_same_after_a_warning_of_keras(say, capsys):
    absl = pytest.importorskip("absl.logging")
    with contextlib.redirect_stderr(io.StringIO()) as err:
        absl.warning("You are saving your model as an HDF5 file")  # makes a handler of the root logger
        assert len(logging.root.handlers) == 1
        say.info("one")
    assert err.getvalue().endswith("HDF5 file\nhvdx: one\n")
    err.close()
    say.info("two")
    assert capsys.readouterr().err == "hvdx: two\n"


def test_caplog_has_the_record(tmp_path):
    (tmp_path / "test_it.py").write_text(WITH_CAPLOG)
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", tmp_path, tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("stream", ["none", "closed", "interrupted"])
def test_stderr_that_cannot_be_written(say, monkeypatch, stream):
    class Interrupted(io.StringIO):
        def write(self, text):
            raise RuntimeError("reentrant call inside <_io.BufferedWriter>")

    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", {"none": None, "closed": closed, "interrupted": Interrupted()}[stream])
    say.info("text")
    say.urgent(ERROR, "text")


def test_buffer_that_a_hook_of_exceptions_has_put_in_place_of_stderr(say, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log.leave_buffer()
    say.error("last words")
    assert capfd.readouterr().err == "hvdx: last words\n"


def test_in_a_signal_handler(say, capfd):
    before = signal.signal(signal.SIGUSR1, lambda *_: say.warning("signal"))
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert capfd.readouterr().err == "hvdx: signal\n"


def test_urgent_while_a_thread_holds_the_handler(say, records, capfd):
    (handler,) = logging.getLogger("hvdx").handlers
    held, free = threading.Event(), threading.Event()

    def hold():
        with handler.lock:
            held.set()
            free.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    say.urgent(WARNING, "stalled")
    free.set()
    holder.join()
    assert capfd.readouterr().err == "hvdx: stalled\n"


def test_failing_rank_while_a_thread_holds_all_locks(tmp_path):
    done = python("-c", HELD, tmp_path / "log")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "hvdx: rank 1 of 2 on " in done.stderr
    assert done.stderr.endswith("failed; ending the job on all ranks: ValueError: no such image\n")


def test_at_exit():
    done = python("-c", AT_EXIT)
    assert (done.returncode, done.stderr) == (0, "hvdx: one\nhvdx: two\n")


def writes_to_stderr(text):
    """Return the lines of a source that name `sys.stderr`, or make a logger without the field of the rank."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        stream = isinstance(node, ast.Attribute) and node.attr in ("stderr", "__stderr__")
        named = stream and isinstance(node.value, ast.Name) and node.value.id == "sys"
        taken = isinstance(node, ast.ImportFrom) and node.module in ("sys", "logging")
        made = isinstance(node, ast.Import) and any(alias.name == "logging" for alias in node.names)
        if named or taken or made:
            lines.append(node.lineno)
    return lines


def test_no_other_file_writes_to_stderr():
    found = {str(p.relative_to(ROOT)): writes_to_stderr(p.read_text()) for p in (ROOT / "hvdx").rglob("*.py")}
    writers = {path: lines for path, lines in found.items() if lines}
    assert {path: lines for path, lines in writers.items() if path not in WRITERS} == {}
    assert writers.keys() == WRITERS.keys()


@pytest.mark.parametrize(
    "line", ["print(1, file=sys.stderr)", "sys.stderr.write('a')", "from sys import stderr", "import logging"]
)
def test_search_can_fail(line):
    assert writes_to_stderr(f"import sys\n{line}") == [2]
