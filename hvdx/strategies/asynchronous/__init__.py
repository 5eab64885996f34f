"""Asynchronous exchange of threshold messages: all ranks apply all messages in one order, each at its own time."""
