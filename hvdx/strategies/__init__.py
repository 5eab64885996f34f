"""Strategies, one per file. None of them imports Keras."""

from hvdx.strategies.all_reduce import AllReduce
from hvdx.strategies.auto import Auto
from hvdx.strategies.base import Exchange, StepClient, Strategy, TensorSpec, agree_on_strategy, views
from hvdx.strategies.joining import join, leave
from hvdx.strategies.parameter_averaging import ParameterAveraging
from hvdx.strategies.parameter_server import ParameterServer
from hvdx.strategies.registry import names, options, parse, resolve
from hvdx.strategies.step import HostExchange, MessageExchange
from hvdx.strategies.telemetry import Telemetry
from hvdx.strategies.threshold import Threshold

__all__ = [
    "AllReduce",
    "Auto",
    "Exchange",
    "HostExchange",
    "MessageExchange",
    "ParameterAveraging",
    "ParameterServer",
    "StepClient",
    "Strategy",
    "Telemetry",
    "TensorSpec",
    "Threshold",
    "agree_on_strategy",
    "join",
    "leave",
    "names",
    "options",
    "parse",
    "resolve",
    "views",
]
