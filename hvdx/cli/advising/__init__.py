"""Parts of `hvdx advise`."""
