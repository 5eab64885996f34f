"""Strategies, one per file. None of them imports Keras."""

from hvdx.strategies.all_reduce import AllReduce
from hvdx.strategies.auto import Auto
from hvdx.strategies.contract import Exchange, StepClient, Strategy, TensorSpec, agree_on_strategy, views
from hvdx.strategies.host_exchange import Encoded, HostExchange, Outgoing, StepInput
from hvdx.strategies.parameter_averaging import ParameterAveraging
from hvdx.strategies.parameter_server import ParameterServer
from hvdx.strategies.registry import join, leave, names, options, parse, resolve
from hvdx.strategies.step import Arrived, Encoder, MessageExchange, Route
from hvdx.strategies.telemetry import Telemetry
from hvdx.strategies.threshold import Threshold

__all__ = [
    "AllReduce",
    "Arrived",
    "Auto",
    "Encoded",
    "Encoder",
    "Exchange",
    "HostExchange",
    "MessageExchange",
    "Outgoing",
    "ParameterAveraging",
    "ParameterServer",
    "Route",
    "StepClient",
    "StepInput",
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
