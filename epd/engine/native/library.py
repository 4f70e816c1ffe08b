"""The compiled kernels as Python calls. ctypes releases the GIL for the length of each call."""

import ctypes
from pathlib import Path

import torch

from epd.engine.native import structs
from epd.engine.native.build import NativeBuildError, library_path

_P = ctypes.c_void_p
_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_F32 = ctypes.c_float
_KV = ctypes.POINTER(structs.PagedKv)
_SEQUENCES = ctypes.POINTER(structs.Sequences)
_CALL = ctypes.POINTER(structs.LayerCall)

_SIGNATURES = {
    "epd_lanes": ([], _I32),
    "epd_write_kv": ([_P, _P, _KV, _P, _I32], None),
    "epd_paged_attention": ([_P, _P, _I32, _KV, _SEQUENCES, _F32, _I32], None),
    "epd_linear": ([_P, _I32, _P, _I32, _I64, _P, _I32], None),
    "epd_scratch_floats": ([ctypes.POINTER(structs.LayerShape), _I64], _I64),
    "epd_attention_half": ([_CALL, _P, _P, _KV, _SEQUENCES], None),
    "epd_mlp_half": ([_CALL], None),
    "epd_layers": (
        [_CALL, ctypes.POINTER(structs.LayerWeights), _KV, _I32, _P, _P, _SEQUENCES],
        None,
    ),
}


class NativeLibrary:
    """Kernels for float32 tensors in host memory, ``threads`` OpenMP threads each.

    ``functions`` are the C functions of ``src/api.cpp``; the methods wrap those that take whole
    tensors. Tensors are contiguous float32 on the CPU: callers check that, once.

    ``path`` is the library to load, None the one for this CPU.

    Raises:
        NativeBuildError: the library is neither there nor can it be compiled or loaded.
    """

    def __init__(self, threads: int, path: Path | None = None) -> None:
        self.path = path = path or library_path()
        try:
            _share_openmp()
            self.functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeBuildError(f"{path.name} cannot be loaded: {error}") from error
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.argtypes, function.restype = arguments, result
        self.threads = threads
        #: head_dim must be a multiple of this.
        self.lanes: int = self.functions.epd_lanes()

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x`` [rows, in] times ``weight`` [out, in] transposed."""
        output = torch.empty(x.shape[0], weight.shape[0])
        self.functions.epd_linear(
            x.data_ptr(),
            x.shape[0],
            weight.data_ptr(),
            weight.shape[0],
            weight.shape[1],
            output.data_ptr(),
            self.threads,
        )
        return output


def _share_openmp() -> None:
    """Lets the kernels find the OpenMP runtime that torch brings and has loaded already.

    One runtime means one pool of threads; two would spin against each other for the same cores.
    """
    package = Path(torch.__file__).parent
    bundled = [*package.glob("lib/libgomp*"), *package.parent.glob("torch.libs/libgomp*")]
    ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", ctypes.RTLD_GLOBAL)
