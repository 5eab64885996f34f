"""PyTorch files made by hand, with content that torch.save does not write."""

import io
import pickle
import zipfile


def archive(path, pickled, storages=None, byteorder=b"little", compress=zipfile.ZIP_STORED):
    """Write a PyTorch file with the given pickle; return its path."""
    with zipfile.ZipFile(path, "w", compress) as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/byteorder", byteorder)
        for key, content in (storages or {}).items():
            file.writestr(f"a/data/{key}", content)
    return path


class Calls:
    """Object whose pickle is a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class Name:
    """Object whose pickle is a name in a module."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __reduce__(self):
        return f"{self.module} {self.name}"


class Pickler(pickle._Pickler):
    """Pickler for names in modules that need not be installed, and for references to storages."""

    def save_global(self, obj, name=None):
        if isinstance(obj, Name):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        else:
            super().save_global(obj, name)

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Name):
            self.save_global(obj)
        elif isinstance(obj, Calls) and isinstance(obj.call[0], Name):
            self.save_global(obj.call[0])
            self.save(obj.call[1])
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)

    def persistent_id(self, obj):
        return obj.pid if isinstance(obj, Stored) else None


class Stored:
    def __init__(self, *pid):
        self.pid = pid


def pickled(value):
    out = io.BytesIO()
    Pickler(out, 2).dump(value)
    return out.getvalue()


FLOATS = Name("torch", "FloatStorage")
REBUILD = Name("torch._utils", "_rebuild_tensor_v2")


def tensor(key="0", count=6, offset=0, shape=(2, 3), stride=(3, 1), kind=FLOATS, rest=(False, None)):
    return Calls(REBUILD, Stored("storage", kind, key, "cpu", count), offset, shape, stride, *rest)
