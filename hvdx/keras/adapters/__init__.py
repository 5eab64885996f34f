"""Adapters between an optimiser's step and a strategy's exchange."""
