"""What several commands use: child processes, the MPI that is installed, the start of a rank, progress, SIGTERM."""
