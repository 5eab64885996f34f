"""TensorFlow SavedModels: folders with a program and a checkpoint of its variables."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdx.averaging.network import Network, Values
from hvdx.averaging.tensorflow_checkpoint import TensorFlowCheckpoint, tensorflow
from hvdx.errors import AverageError

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef
    from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef, SignatureDef, TensorInfo

_PROGRAMS = ("saved_model.pb", "saved_model.pbtxt")


class SavedModel(Network):
    """Folder with a SavedModel, from `model.export` or `tf.saved_model.save`.

    The variables are averaged. The program, with its constants, and the assets are copied from the first network.
    """

    format = "TensorFlow SavedModel"
    suffixes = ()

    def __init__(self, path: Path):
        self.path = path
        prefix = path / "variables" / "variables"
        if not Path(f"{prefix}.index").is_file():
            raise AverageError(f"{path}: {prefix}.index: is missing. A SavedModel without variables has no mean.")
        self._variables = TensorFlowCheckpoint(prefix)
        self.tensors = self._variables.tensors
        self.normalises = self._variables.normalises
        self.architecture = _signatures(path)

    @classmethod
    def recognises(cls, path: Path, head: bytes) -> bool:
        """Look for the program in the folder."""
        return path.is_dir() and any((path / name).is_file() for name in _PROGRAMS)

    @classmethod
    def open(cls, path: Path) -> Network:
        return cls(path)

    def write(self, out: Path, values: Values) -> None:
        # The fingerprint is left out, since it is also a hash of the variables.
        shutil.copytree(self.path, out, ignore=_except_variables(self.path))
        (out / "variables").mkdir()
        self._variables.write(out / "variables" / "variables", values)

    def close(self) -> None:
        self._variables.close()


def _except_variables(root: Path) -> Any:
    def ignored(folder: str, names: list[str]) -> list[str]:
        return ["variables", "fingerprint.pb"] if Path(folder) == root else []

    return ignored


def _signatures(path: Path) -> Any:
    """Return inputs, outputs and operations of the signatures."""
    tensorflow(path)
    from google.protobuf import message, text_format
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    try:
        if (path / _PROGRAMS[0]).is_file():
            saved.ParseFromString((path / _PROGRAMS[0]).read_bytes())
        else:
            text_format.Parse((path / _PROGRAMS[1]).read_text(), saved)
    except (message.DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        raise AverageError(f"{path}: {_PROGRAMS[0]}: it is damaged ({error}). Copy or save it again.") from None
    if not saved.meta_graphs:
        raise AverageError(f"{path}: {_PROGRAMS[0]}: expected a program, found none. Copy or save it again.")
    graph = saved.meta_graphs[0]
    return {name: _signature(graph, signature) for name, signature in sorted(graph.signature_def.items())}


def _signature(graph: "MetaGraphDef", signature: "SignatureDef") -> dict[str, object]:
    def described(tensors: "Mapping[str, TensorInfo]") -> list[list[object]]:
        # Without names, since Keras numbers the names of inputs across models.
        return sorted([info.dtype, [d.size for d in info.tensor_shape.dim]] for info in tensors.values())

    operations = sorted(_operations(graph.graph_def, [info.name for info in signature.outputs.values()]))
    return {
        "inputs": described(signature.inputs),
        "outputs": described(signature.outputs),
        "operations": dict.fromkeys(operations, True),
    }


def _operations(graph: "GraphDef", outputs: list[str]) -> set[str]:
    """Return the kinds of operations that compute the outputs, including those in called functions."""
    functions = {f.signature.name: f.node_def for f in graph.library.function}
    nodes = {node.name: node for node in graph.node}
    waiting = [nodes[name.split(":")[0]] for name in outputs if name.split(":")[0] in nodes]
    kinds: set[str] = set()
    called: set[str] = set()
    seen: set[str] = set()
    while waiting:
        node = waiting.pop()
        kinds.add(node.op)
        for source in node.input:
            name = source.lstrip("^").split(":")[0]
            if name in nodes and name not in seen:
                seen.add(name)
                waiting.append(nodes[name])
        for value in node.attr.values():
            for name in [value.func.name, *(f.name for f in value.list.func)]:
                if name in functions and name not in called:
                    called.add(name)
                    waiting.extend(functions[name])
    return kinds - {"Identity", "NoOp", "Const", "Placeholder"}
