"""Ranks: who this process is, and how it reaches the others. One communication library a file."""

from hvdx.comm.base import Channel, Comm, GraphComm, Letter, Postbox, Received
from hvdx.comm.local import LocalComm
from hvdx.comm.world import current, graph, graph_calls, start, stop

__all__ = [
    "Channel",
    "Comm",
    "GraphComm",
    "Letter",
    "LocalComm",
    "Postbox",
    "Received",
    "current",
    "graph",
    "graph_calls",
    "start",
    "stop",
]
