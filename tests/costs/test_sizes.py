from hvdx.costs.sizes import entropy


def test_entropy_is_that_of_the_table():
    assert [round(entropy(p), 2) for p in (0.1, 1 / 16, 1e-2, 1e-3, 1e-4)] == [5.69, 6.40, 9.08, 12.41, 15.73]
    assert entropy(1.0) == 1.0
