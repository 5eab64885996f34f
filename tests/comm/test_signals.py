"""Who hears a signal when those that listened are gone."""

import gc
import signal

import pytest

from hvdx.comm.signals import ENDINGS, Announcement


@pytest.fixture(autouse=True)
def handlers():
    gc.collect()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_all_that_listen_hear_it_and_the_last_gives_it_back():
    first, second = Announcement(), Announcement()
    assert first.listen()
    assert second.listen()
    signal.raise_signal(signal.SIGTERM)
    assert (first.heard, second.heard) == ("SIGTERM", "SIGTERM")
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.close()
    assert [signal.getsignal(number) for number in ENDINGS] == [signal.SIG_DFL, signal.SIG_DFL]


def test_listeners_that_were_dropped_leave_the_signal_to_the_handler_before():
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    dropped = Announcement()
    dropped.listen()
    del dropped
    gc.collect()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1, signal.SIGUSR1]
