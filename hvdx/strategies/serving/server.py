"""Loop of a server, which is a rank of its own or a thread of a worker: fetch messages, and send the answers."""

import sys
import threading
import time

from hvdx.comm import Mailbox
from hvdx.comm.waiting import time_limit
from hvdx.strategies.serving.messages import WORKER_BOX
from hvdx.strategies.serving.request_handler import RequestHandler
from hvdx.strategies.sessions import Polling

# Seconds between checks for workers that have waited long.
_WAIT_NOTICE_EVERY = 1.0


def serve(mailbox: Mailbox, handler: RequestHandler, stop: threading.Event | None = None) -> None:
    """Answer messages until all workers have disconnected, or died.

    Args:
        mailbox: mailbox of the server.
        handler: source of the answers.
        stop: event that ends the loop early.
    """
    polling, next_notices, limit = Polling(), 0.0, time_limit()
    while (handler.present or not mailbox.all_sent()) and not (stop is not None and stop.is_set()):
        message = mailbox.fetch()
        if message is None:
            if not handler.present and polling.idle > limit:
                return  # the workers have left, and will not receive the messages that are still in flight
            polling.sleep(mailbox.receiving)
            messages = []
        else:
            polling.found()
            messages = handler.handle(message)
        for worker in sorted(handler.present & mailbox.gone):
            messages = [*messages, *handler.leave(worker)]
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
