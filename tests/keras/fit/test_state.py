"""Options that name the variables of a rank."""

import numpy as np
import pytest
import tensorflow as tf

from hvdx.errors import ConfigError
from hvdx.keras.fit.state import Declared


@pytest.mark.parametrize("option", [tf.Variable([1.0, 2.0]), np.ones(3), "queue", [1]])
def test_other_things_than_variables_and_layers_are_named(option):
    with pytest.raises(ConfigError, match="Distribute: local: expected variables or layers of Keras"):
        Declared(option, None)
