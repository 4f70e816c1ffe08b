"""The structs of ``src/api.cpp`` in ctypes; field order and types are the contract."""

import ctypes

_P = ctypes.c_void_p
_I32 = ctypes.c_int32
_I64 = ctypes.c_int64


class PagedKv(ctypes.Structure):
    """One layer's KV: [block, 2, kv_head, slot, head_dim]."""

    _fields_ = (("data", _P), ("kv_heads", _I32), ("block_size", _I32), ("head_dim", _I32))


class Sequences(ctypes.Structure):
    """A step's sequences; the arrays stay the caller's."""

    _fields_ = (
        ("block_tables", _P),
        ("query_starts", _P),
        ("context_lens", _P),
        ("slots", _P),
        ("table_stride", _I64),
        ("count", _I32),
    )


class LayerWeights(ctypes.Structure):
    """Addresses of one decoder layer's weights; a missing bias is None."""

    _fields_ = tuple(
        (name, _P)
        for name in (
            "input_norm",
            "qkv",
            "qkv_bias",
            "output",
            "output_bias",
            "mlp_norm",
            "gate_up",
            "down",
        )
    )


class LayerShape(ctypes.Structure):
    """Sizes that all layers share."""

    _fields_ = (
        ("hidden", _I32),
        ("intermediate", _I32),
        ("heads", _I32),
        ("kv_heads", _I32),
        ("head_dim", _I32),
        ("norm_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class LayerCall(ctypes.Structure):
    """What both halves of a layer work on."""

    _fields_ = (
        ("weights", ctypes.POINTER(LayerWeights)),
        ("shape", ctypes.POINTER(LayerShape)),
        ("hidden", _P),
        ("scratch", _P),
        ("tokens", _I32),
        ("threads", _I32),
    )
