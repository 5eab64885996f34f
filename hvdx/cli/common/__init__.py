"""Helpers that several commands share: child processes, the installed MPI, the start of a rank, progress, SIGTERM."""
