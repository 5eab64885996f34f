"""Communicators: the rank of this process and its connections to the other ranks, a file for each library."""

from hvdx.comm.interfaces import Channel, Comm, GraphComm, Mailbox, Message, Received
from hvdx.comm.local import LocalComm
from hvdx.comm.world import current, graph, graph_calls, graph_of_peers, set_split, start, stop

__all__ = [
    "Channel",
    "Comm",
    "GraphComm",
    "LocalComm",
    "Mailbox",
    "Message",
    "Received",
    "current",
    "graph",
    "graph_calls",
    "graph_of_peers",
    "set_split",
    "start",
    "stop",
]
