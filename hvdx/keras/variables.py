"""Class of the variables of Keras."""

from typing import Any

import keras

#: Class of the variables that layers and optimisers make. `keras.Variable` derives from it; in Keras 3.6, variables of
#: layers are not instances of `keras.Variable`.
KerasVariable: Any = keras.Variable.__mro__[1]
