"""The checks of `hvdx doctor`."""
