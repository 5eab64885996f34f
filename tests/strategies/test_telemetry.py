"""Totals of the counters of several exchanges."""

import pytest

from hvdx.strategies.telemetry import ServerTelemetry, StalenessHistogram, StaleTelemetry, Telemetry, merged


@pytest.mark.parametrize("kind", [ServerTelemetry, StaleTelemetry])
def test_merged_leaves_out_an_optimizer_that_took_no_step(kind):
    """A model with two optimisers of its own has a third, the default one of `compile()`, which no step uses."""
    used = [kind(steps=3, sent=n, elements=n, staleness=StalenessHistogram({1: n})) for n in (2, 5)]
    total = merged([Telemetry(), *used])
    assert isinstance(total, kind)
    assert (total.steps, total.sent, dict(total.staleness)) == (3, 7, {1: 7})
