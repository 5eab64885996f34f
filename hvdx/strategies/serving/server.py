"""Loop of a server, which is a rank of its own or a thread of a worker: fetch messages, and send the answers."""

import sys
import threading
import time

from hvdx.comm import Mailbox
from hvdx.comm.waiting import Backoff, time_limit
from hvdx.strategies.serving.messages import WORKER_BOX
from hvdx.strategies.serving.request_handler import RequestHandler

#: Longest sleep between polls of a mailbox, in seconds: while a part of a message is in flight, and otherwise.
BUSY_SLEEP, IDLE_SLEEP = 1e-4, 1e-3
# Seconds without a message after which a server polls less often, and the sleep between its polls from then on. Each
# poll of a server thread interrupts the worker's Python code; with more polls, tracing a model took many times longer.
_NAP_AFTER, _NAP = 0.5, 0.02
# Seconds between checks for workers that have waited long.
_WAIT_NOTICE_EVERY = 1.0


def serve(mailbox: Mailbox, handler: RequestHandler, stop: threading.Event | None = None) -> None:
    """Answer messages until all workers have disconnected.

    Args:
        mailbox: mailbox of the server.
        handler: source of the answers.
        stop: event that ends the loop early.
    """
    backoff, next_notices, last, limit = Backoff(), 0.0, time.monotonic(), time_limit()
    while (handler.present or not mailbox.left()) and not (stop is not None and stop.is_set()):
        message = mailbox.fetch()
        if message is None:
            if not handler.present and time.monotonic() - last > limit:
                return  # the workers have left, and will not receive the messages that are still in flight
            if time.monotonic() - last > _NAP_AFTER and not mailbox.coming:
                time.sleep(_NAP)
            backoff.sleep(BUSY_SLEEP if mailbox.coming else IDLE_SLEEP)
            messages = []
        else:
            backoff.renew()
            last = time.monotonic()
            messages = handler.handle(message)
        if time.monotonic() > next_notices:
            messages = [*messages, *handler.wait_notices()]
            next_notices = time.monotonic() + _WAIT_NOTICE_EVERY
        for to, header, body in messages:
            mailbox.send(to, WORKER_BOX, header, body)


def serve_in_thread(mailbox: Mailbox, handler: RequestHandler, stop: threading.Event) -> None:
    """Run `serve` as the target of a thread; an error ends the job."""
    try:
        serve(mailbox, handler, stop)
    except BaseException as error:
        # hvdx' exception hook ends the job: otherwise the other ranks would wait for this server.
        sys.excepthook(type(error), error, error.__traceback__)
        raise
