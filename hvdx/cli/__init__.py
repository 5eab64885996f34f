"""The `hvdx` command, one sub-command a file."""
