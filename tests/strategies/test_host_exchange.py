"""What exchanges on the host share: the compute timer, the check for NaN, and the reports of skipped steps."""

import numpy as np
import pytest

from hvdx.errors import HvdxError
from hvdx.strategies import StepInput, TensorSpec
from hvdx.strategies.host_exchange import ELSEWHERE, FINE, MAX_SKIPPED_STEPS, NOT_FINITE, HostExchange, Outgoing
from hvdx.strategies.telemetry import Telemetry

SPECS = [TensorSpec("a", (2,), 4), TensorSpec("b", (), 4)]
TENSORS = [np.ones(2, np.float32), np.ones((), np.float32)]


class Same(HostExchange):
    """Exchange that returns its input, and keeps it; a step that is not finite is skipped."""

    def combine(self, given):
        self.given = given
        if not given.finite:
            self._skipped(True, lambda again: f"skipped{again}", lambda: "diverged")
        return given.tensors


@pytest.fixture
def exchange():
    return Same(SPECS, Telemetry())


def test_computing_is_the_time_between_two_steps_of_a_run(exchange, monkeypatch):
    # Begin and end of each step; the first one of a run reads the clock only at its end.
    times = iter([10.0, 13.0, 14.0, 100.0, 102.0, 103.0])
    monkeypatch.setattr(exchange, "_now", lambda: next(times))
    measured = []
    for step in range(4):
        if step == 2:
            exchange.restart_timer()
        exchange.take(StepInput(TENSORS))
        measured.append(exchange.given.computing)
    assert measured == [None, 3.0, None, 2.0]
    assert exchange.telemetry.computing == 5.0


def test_preparing_an_exchange_and_writing_its_result_are_cost_and_not_computing(exchange, monkeypatch):
    times = iter([10.0, 12.0, 15.0, 16.0])
    monkeypatch.setattr(exchange, "_now", lambda: next(times))
    exchange.applied()  # before the first step there is no result
    exchange.take(StepInput(TENSORS))
    exchange.applied()
    assert (exchange._cost, exchange.telemetry.decoding) == (2.0, 2.0)
    exchange.take(StepInput(TENSORS, preparing=0.5))
    assert exchange.given.computing == exchange.telemetry.computing == 2.5
    assert (exchange._cost, exchange.telemetry.encoding) == (2.5, 0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_prepared_step_knows_whether_it_is_finite(exchange, bad):
    assert exchange.prepare(StepInput(TENSORS)).status == FINE
    assert exchange.prepare(StepInput(TENSORS, finite=False)).status == NOT_FINITE
    prepared = exchange.prepare(StepInput([TENSORS[0], np.float32(bad)]))
    assert prepared.status == NOT_FINITE
    exchange.deliver(prepared)
    assert not exchange.given.finite


def test_rank_is_blamed_only_where_it_is_at_fault(exchange):
    prepared = Outgoing(StepInput(TENSORS), FINE)
    assert [prepared.skipped(blamed).status for blamed in (True, False)] == [NOT_FINITE, ELSEWHERE]


def test_reports_of_skipped_steps_become_rare_and_end_in_an_error(exchange, capfd):
    for _ in range(MAX_SKIPPED_STEPS - 1):
        exchange.take(StepInput(TENSORS, finite=False))
    said = capfd.readouterr().err.splitlines()
    assert said == ["hvdx: skipped"] + [f"hvdx: skipped, {2**i} in a row" for i in range(1, 7)]
    with pytest.raises(HvdxError, match="diverged"):
        exchange.take(StepInput(TENSORS, finite=False))
    assert exchange.telemetry.skipped == MAX_SKIPPED_STEPS


def test_input_of_some_tensors_has_their_samples():
    given = StepInput(TENSORS, finite=False, sample=[np.zeros(3), np.zeros(1)], computing=2.0)
    part = given.subset([1])
    assert [t.shape for t in part.tensors] == [()]
    assert [s.size for s in part.sample] == [1]
    assert (part.finite, part.computing) == (False, 2.0)
    assert StepInput(TENSORS).subset([0]).sample is None
