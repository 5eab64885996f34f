"""Preemption signals with several listeners, after the last listener, and in forked children."""

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


def test_all_listeners_receive_a_signal_and_the_last_restores_the_handlers():
    first, second = PreemptionListener(), PreemptionListener()
    assert first.listen()
    assert second.listen()
    signal.raise_signal(signal.SIGTERM)
    assert (first.received, second.received) == ("SIGTERM", "SIGTERM")
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.close()
    assert [signal.getsignal(number) for number in ENDINGS] == [signal.SIG_DFL, signal.SIG_DFL]


def test_signal_reaches_the_previous_handler_after_listeners_are_dropped():
    handled = []
    signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    dropped = PreemptionListener()
    dropped.listen()
    del dropped
    gc.collect()
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert handled == [signal.SIGUSR1, signal.SIGUSR1]


def test_later_listener_receives_a_signal_until_it_is_acknowledged():
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


def test_forked_children_end_on_sigterm():
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
