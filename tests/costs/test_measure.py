from hvdx.costs.measure import measure_memory, measure_network


def test_measurements_are_plausible():
    memory = measure_memory(100_000)
    message, transport = measure_network()
    assert 1e7 < memory < 1e13
    assert 1e-7 < message < 0.1
    assert transport > 1e6
