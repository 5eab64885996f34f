"""Ranks: who this process is, and how it reaches the others. One communication library a file."""

from hvdx.comm.base import Comm
from hvdx.comm.local import LocalComm
from hvdx.comm.world import current, start, stop

__all__ = ["Comm", "LocalComm", "current", "start", "stop"]
