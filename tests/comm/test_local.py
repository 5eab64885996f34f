"""Mailboxes of virtual ranks and of a world of one; tests/ranks tests those between processes."""

import threading

import numpy as np
import pytest

from hvdx.comm.local import LocalComm, virtual_world
from tests.checks import MAILBOX_CHECKS


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("check", MAILBOX_CHECKS.values(), ids=MAILBOX_CHECKS)
def test_virtual_ranks_pass(check, size):
    failures = []

    def work(comm):
        try:
            check(comm)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(comm,), daemon=True) for comm in virtual_world(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures, failures


@pytest.mark.parametrize("check", MAILBOX_CHECKS.values(), ids=MAILBOX_CHECKS)
def test_world_of_one_passes(check):
    check(LocalComm())


def test_servers_are_numbered_after_the_workers():
    worker, server = virtual_world(1, servers=1)
    inbox, outbox = server.mailbox(0), worker.mailbox(1)
    outbox.send(1, 0, [5])
    message = inbox.fetch()
    assert (message.sender, message.header[0], message.body) == (0, 5, None)
    inbox.send(0, 1, [6])
    assert outbox.fetch().sender == 1


def test_bodies_may_change_after_they_have_left():
    (comm,) = virtual_world(1)
    box, body = comm.mailbox(0), np.ones(3, np.uint8)
    box.send(0, 0, [], body)
    assert box.all_sent()
    body[:] = 9
    assert box.fetch().body.tolist() == [1, 1, 1]
