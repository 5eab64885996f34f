"""Codecs: formats of an update as bytes. Each codec has its own file; `catalogue` finds them by name."""

from hvdx.codec.base import Codec, State
from hvdx.codec.catalogue import CODECS, make, names
from hvdx.codec.floats import Bfloat16, Float16, Raw
from hvdx.codec.threshold import Threshold, ThresholdState

__all__ = ["CODECS", "Bfloat16", "Codec", "Float16", "Raw", "State", "Threshold", "ThresholdState", "make", "names"]
