"""Who hears a signal when those that listened are gone."""

import gc
import multiprocessing
import os
import signal
import time

import pytest

from hvdx.comm.preemption import ENDINGS, PreemptionListener, acknowledge


@pytest.fixture(autouse=True)
def handlers():
    gc.collect()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDINGS}
    acknowledge()
    yield
    acknowledge()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_all_that_listen_hear_it_and_the_last_gives_it_back():
    first, second = PreemptionListener(), PreemptionListener()
    assert first.listen()
    assert second.listen()
    signal.raise_signal(signal.SIGTERM)
    assert (first.received, second.received) == ("SIGTERM", "SIGTERM")
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.close()
    assert [signal.getsignal(number) for number in ENDINGS] == [signal.SIG_DFL, signal.SIG_DFL]


def test_listeners_that_were_dropped_leave_the_signal_to_the_handler_before():
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    dropped = PreemptionListener()
    dropped.listen()
    del dropped
    gc.collect()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1, signal.SIGUSR1]


def test_who_listens_later_hears_what_came_until_it_is_obeyed():
    first = PreemptionListener()
    first.listen()
    signal.raise_signal(signal.SIGUSR1)
    first.close()
    second, third = PreemptionListener(), PreemptionListener()
    second.listen()
    assert second.received == "SIGUSR1"
    acknowledge()
    third.listen()
    assert third.received == ""
    second.close()
    third.close()


def test_forked_children_end_when_they_are_told_to():
    listener = PreemptionListener()
    listener.listen()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.3)
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert listener.received == "SIGTERM"
    listener.close()
