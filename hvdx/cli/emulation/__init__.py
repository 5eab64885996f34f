"""The emulated hosts and links of `hvdx lab`."""
