"""Results, states and traffic of fifty steps under every strategy are those of the fixture, bit for bit."""

# Tests: hvdx/strategies/step.py, hvdx/strategies/threshold/encoder.py, hvdx/strategies/threshold/routes.py
# Tests: hvdx/strategies/threshold/session_mailbox.py

import json

import pytest

from hvdx.strategies.threshold.session_mailbox import SessionMailbox
from tests.strategies.bits import FIXTURE, cases

ROWS = json.loads(FIXTURE.read_text())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", cases(2))
def test_fifty_steps_have_the_bits_of_the_fixture(name, size, monkeypatch):
    # Without its thread, a rank takes in messages only when it waits, so that their order is the same in each run.
    monkeypatch.setattr(SessionMailbox, "start", lambda self, session: None)
    assert cases(size)[name]() == ROWS[f"{name}, {size} ranks"]
