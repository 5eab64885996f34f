import numpy as np
import pytest

from hvdx.comm.interfaces import Channel, Received
from hvdx.costs.link import probe


class Slow(Channel):
    """Channel that reports the time that a network of this speed would take."""

    def __init__(self, size, latency, bandwidth):
        self.rank, self.size = 0, size
        self.latency, self.bandwidth = latency, bandwidth
        self.carried = 0

    def exchange(self, header, message=None):
        bytes_in = 0 if message is None else (self.size - 1) * message.size
        self.carried += bytes_in
        headers = np.tile(np.array(header, np.int64), (self.size, 1))
        messages = [] if message is None else [message] * self.size
        return Received(headers, messages, 0.0, self.latency + bytes_in / self.bandwidth)


@pytest.mark.parametrize("size", [2, 4, 32])
@pytest.mark.parametrize("bandwidth", [1e6, 12.5e6, 125e6, 5e9])
def test_probe_finds_latency_and_bandwidth(size, bandwidth):
    channel = Slow(size, 2e-4, bandwidth)
    found = probe(channel)
    assert found.latency == pytest.approx(2e-4, rel=0.01)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert channel.carried / bandwidth < 1 + size / 16, "the probe takes too long"
