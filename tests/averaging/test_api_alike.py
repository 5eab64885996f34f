"""Errors about networks that differ."""

import numpy as np
import pytest

from hvdx.averaging.api import check_alike
from hvdx.errors import AverageError
from tests.averaging.arrays import Arrays

BASE = {"kernel": np.zeros((2, 3), "f4"), "bias": np.zeros(3, "f4")}


def refused(*networks):
    with pytest.raises(AverageError) as caught:
        check_alike(networks)
    return str(caught.value)


def test_alike_networks_pass():
    check_alike([Arrays(**BASE, architecture={"a": [1, {"b": 2}]}) for _ in range(3)])
    check_alike([Arrays(**BASE), Arrays(**BASE, architecture={"a": 1})])
    check_alike([Arrays(**BASE), Arrays(**{name: array.astype(">f4") for name, array in BASE.items()})])
    check_alike([Arrays(kernel=BASE["kernel"], bias=BASE["bias"]), Arrays(bias=BASE["bias"], kernel=BASE["kernel"])])


def test_missing_tensor_is_named_with_the_file_that_lacks_it():
    less = Arrays("b.arrays", kernel=BASE["kernel"])
    assert refused(Arrays(**BASE), less).startswith("b.arrays: bias: is in a.arrays, and missing here.")
    assert refused(less, Arrays("c.arrays", **BASE)).startswith("b.arrays: bias: is in c.arrays, and missing here.")


def test_renamed_tensor_is_guessed():
    text = refused(Arrays(**BASE), Arrays("b.arrays", kernel=BASE["kernel"], beta=BASE["bias"]))
    assert text.startswith("b.arrays: bias: is in a.arrays, and missing here. Is beta its name here?")


def test_third_network_is_compared_as_well():
    text = refused(Arrays(**BASE), Arrays(**BASE), Arrays("c.arrays", kernel=np.zeros((2, 4), "f4"), bias=BASE["bias"]))
    assert text.startswith("c.arrays: kernel: expected the shape [2, 3], as in a.arrays, got [2, 4].")


def test_other_dtype_is_named():
    text = refused(Arrays(**BASE), Arrays("b.arrays", kernel=BASE["kernel"], bias=BASE["bias"].astype("f2")))
    assert text.startswith("b.arrays: bias: expected float32, as in a.arrays, got float16. Save both in one dtype.")


def test_same_number_of_elements_is_not_the_same_shape():
    assert "expected the shape [2, 3]" in refused(Arrays(w=np.zeros((2, 3))), Arrays(w=np.zeros((3, 2))))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"layers": [{"units": 5}], "name": "m"}, "layers[0].units: expected 4, as in a.arrays, got 5."),
        ({"layers": [{"units": 4}, {}], "name": "m"}, "the length of layers: expected 1, as in a.arrays, got 2."),
        ({"layers": [{"units": 4}]}, "name: expected 'm', as in a.arrays, got None."),
        ({"layers": [{"units": 4}], "name": "m", "new": True}, "new: expected None, as in a.arrays, got True."),
        ({"layers": {}, "name": "m"}, "layers: expected [{'units': 4}], as in a.arrays, got {}."),
    ],
)
def test_other_architecture_is_named_where_it_differs(other, words):
    first = Arrays(**BASE, architecture={"layers": [{"units": 4}], "name": "m"})
    assert words in refused(first, Arrays("b.arrays", **BASE, architecture=other))


def test_other_format_is_named():
    other = Arrays("b.other", **BASE)
    other.format = "other"
    assert refused(Arrays(**BASE), other).startswith("b.other: expected arrays, the format of a.arrays, got other.")
