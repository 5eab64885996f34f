"""Signals by which a batch system announces the end of a job, and the exit code that asks it for another turn."""

import signal

#: Exit code of a training that saved and wants to go on later: "temporary failure, try again" of sysexits.h.
REQUEUE_CODE = 75
#: What announces the end: SIGUSR1 is what job scripts ask for, SIGTERM is what comes before a kill.
ENDINGS = (signal.SIGUSR1, signal.SIGTERM)
