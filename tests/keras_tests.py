"""Keras' own tests of trainers and callbacks, with `Distribute()` in every `fit`: what differs from plain Keras.

    python -m tests.keras_tests --ranks 2

Keras' wheel contains these tests. They run without hvdx, on one process with it, and on several ranks. If
the ranks go apart in a test, the launch ends and another one goes on with the next test.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdx import comm as world
from tests.launch import ROOT, run
from tests.outcomes import of_all_ranks

_TRAINERS = ("trainer", "compile_utils", "epoch_iterator")
_CALLBACKS = (
    *("backup_and_restore", "callback", "csv_logger", "early_stopping", "lambda_callback", "learning_rate_scheduler"),
    *("model_checkpoint", "monitor_callback", "reduce_lr_on_plateau", "swap_ema_weights", "terminate_on_nan"),
)
FILES = (
    *(f"keras.src.trainers.{name}_test" for name in _TRAINERS),
    *(f"keras.src.callbacks.{name}_test" for name in _CALLBACKS),
)
# Seconds for one launch, and for a collective that the other ranks do not reach.
LIMIT, WAIT = 1800, 20
# Environment variables for the plugin: the file of results, and whether `fit` gets the callback.
_RESULTS, _INJECT = "HVDX_KERAS_TESTS_RESULTS", "HVDX_KERAS_TESTS_INJECT"


def pytest_configure(config: pytest.Config) -> None:
    """Register Keras' markers, and give `fit` the callback."""
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", marker)
    # A module imports it for the tests of another backend.
    sys.modules.setdefault("jax", types.ModuleType("jax"))
    if os.environ.get(_INJECT) != "1":
        return
    import keras

    import hvdx
    import hvdx.keras

    hvdx.init()
    plain = keras.Model.fit

    @functools.wraps(plain)
    def fit(self: keras.Model, *args: Any, callbacks: Any = None, **named: Any) -> Any:
        given = [] if callbacks is None else callbacks if isinstance(callbacks, list) else [callbacks]
        return plain(self, *args, callbacks=[*given, hvdx.keras.Distribute()], **named)

    keras.Model.fit = fit


def pytest_runtest_setup(item: pytest.Item) -> None:
    _write({"test": item.nodeid, "outcome": "began"})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write the outcome of all ranks; end the launch if they are in different tests."""
    report = yield
    if report.when != "call" and report.passed:
        return report
    said = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"[:800]
    everyone = of_all_ranks(item, report, said)
    worst = next((other for other in everyone if other[1] == "failed"), everyone[0])
    _write({"test": item.nodeid, "outcome": worst[1], "said": worst[2]})
    return report


def _write(line: dict[str, str]) -> None:
    """Append a line to the file of results, on rank 0."""
    joined = world.current()
    if joined is None or joined.rank == 0:
        with open(os.environ[_RESULTS], "a") as file:
            file.write(json.dumps(line) + "\n")


def outcomes(ranks: int, inject: bool, files: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the outcome of each test and what its error said.

    Args:
        ranks: number of ranks.
        inject: whether `fit` gets the callback.
        files: modules of tests.
    """
    found: dict[str, tuple[str, str]] = {}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            results, skipped = Path(folder) / "results", Path(folder) / "skipped"
            skipped.write_text("\n".join(["-q", *(f"--deselect={test}" for test in found)]))
            environment = {_RESULTS: str(results), _INJECT: str(int(inject)), "HVDX_TIMEOUT": str(WAIT)}
            options = ["-q", "--color=no", "-p", "no:cacheprovider", "-p", "tests.keras_tests"]
            arguments = ["-m", "pytest", *options, "-c", os.devnull, "--rootdir", str(ROOT), f"@{skipped}", "--pyargs"]
            done = run(ranks, [*arguments, *files], LIMIT, environment)
            lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        began = next((line["test"] for line in reversed(lines) if line["outcome"] == "began"), None)
        new = {line["test"]: (line["outcome"], line["said"]) for line in lines if line["outcome"] != "began"}
        apart = began is not None and began not in new
        if apart:
            new[began] = ("apart", _last_words(done.out))
        found |= new
        print(f"{ranks} ranks: {len(found)} tests; the launch ended with {done.code}", file=sys.stderr, flush=True)
        if not new and done.code not in (0, 5):
            raise SystemExit(done.out[-3000:])
        if not new or (done.code in (0, 1) and not apart):
            return found


def _last_words(out: str) -> str:
    lines = [line for line in out.splitlines() if "hvdx" in line or "Error" in line]
    return " | ".join(lines[-3:])[:800]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each test whose outcome differs from that of plain Keras, with its error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=FILES, metavar="MODULE", help="modules of tests (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all outcomes to FILE")
    options = parser.parse_args(arguments)
    plain = outcomes(1, False, options.only)
    runs = {"1 process": outcomes(1, True, options.only)}
    if options.ranks > 1:
        runs[f"{options.ranks} ranks"] = outcomes(options.ranks, True, options.only)
    for name, found in runs.items():
        differs = {test: got for test, got in found.items() if got[0] != plain.get(test, ("",))[0]}
        passed = sum(got[0] == "passed" for got in found.values())
        of = sum(got[0] == "passed" for got in plain.values())
        print(f"\n{name}: {passed} of {of} pass; {len(differs)} differ")
        for test, (outcome, said) in differs.items():
            print(f"  {outcome}  {test.split('site-packages/')[-1]}\n      {said}")
    if options.json:
        options.json.write_text(json.dumps({"plain": plain, **runs}, indent=1))


if __name__ == "__main__":
    main()
