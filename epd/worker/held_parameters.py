"""How many parameters this process really holds, whoever loaded them."""

import gc

from torch import nn


def count_held_parameters() -> int:
    """Elements of every live parameter; tied ones count once. Walks the heap: for start-up only.

    Two halves of a model in two processes are told apart by this number, not by what the loader
    says it has read.
    """
    held = {
        parameter.data_ptr(): parameter.numel()
        for parameter in gc.get_objects()
        # By type: asking a foreign object for its __class__ may run code of its own.
        if issubclass(type(parameter), nn.Parameter) and not parameter.is_meta
    }
    return sum(held.values())
