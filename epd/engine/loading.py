"""Reads part of a model folder: the tensors of one module, and nothing else."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import nn

from epd.errors import InvalidRequestError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class WeightFiles:
    """The safetensors of a model folder, one file or sharded. Reading is by tensor name.

    Raises:
        InvalidRequestError: the folder holds no safetensors.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._file_of: dict[str, str] = {}
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            self._file_of.update(json.loads(index.read_text())["weight_map"])
        else:
            for path in sorted(folder.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), path.name))
        if not self._file_of:
            raise InvalidRequestError(f"{folder} holds no safetensors", field="model")

    def present_prefix(self, prefixes: Sequence[str], name: str) -> str:
        """The first of ``prefixes`` under which ``name`` is stored.

        Raises:
            InvalidRequestError: none is.
        """
        for prefix in prefixes:
            if prefix + name in self._file_of:
                return prefix
        raise InvalidRequestError(f"{self._folder} holds no {prefixes[0]}{name}", field="model")

    def load(self, make_module: Callable[[], ModuleT], prefix: str) -> ModuleT:
        """Makes a module and fills it with the tensors stored under ``prefix``.

        The module takes no memory before that, so at no time is there more than what it keeps.

        Raises:
            InvalidRequestError: a tensor is missing or has another shape.
        """
        with torch.device("meta"):
            module = make_module()
        wanted = module.state_dict()
        state = self._read({name: prefix + name for name in wanted})
        for name, tensor in state.items():
            if tensor.shape != wanted[name].shape:
                raise InvalidRequestError(
                    f"{prefix}{name} is {list(tensor.shape)}, expected {list(wanted[name].shape)}",
                    field="model",
                )
        module.load_state_dict(state, assign=True)
        self._rebuild_computed_buffers(module)
        return module.requires_grad_(False).eval()

    def load_head(self, name: str, tied: torch.Tensor | None) -> nn.Linear:
        """The output projection: the embedding itself when ``tied``, else read from disk."""
        weight = tied if tied is not None else self._read({name: name})[name]
        head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        head.load_state_dict({"weight": weight}, assign=True)
        return head.requires_grad_(False)

    def _read(self, stored_name_of: dict[str, str]) -> dict[str, torch.Tensor]:
        missing = sorted(set(stored_name_of.values()) - self._file_of.keys())
        if missing:
            raise InvalidRequestError(
                f"{self._folder} lacks {len(missing)} tensors, the first is {missing[0]}",
                field="model",
            )
        by_file: dict[str, list[str]] = {}
        for name, stored in stored_name_of.items():
            by_file.setdefault(self._file_of[stored], []).append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file_name, names in by_file.items():
            with safe_open(self._folder / file_name, framework="pt") as file:
                for name in names:
                    # A copy: the file is mapped, and its pages must not stay ours.
                    tensors[name] = file.get_tensor(stored_name_of[name]).to(
                        device=self._device, dtype=self._dtype, copy=True
                    )
        return tensors

    def _rebuild_computed_buffers(self, module: nn.Module) -> None:
        """Buffers that are in no file (rope frequencies) are computed by their module's start."""
        for name, child in list(module.named_modules()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                parent = module.get_submodule(name.rpartition(".")[0])
                fresh = type(child)(config=child.config).to(self._device)
                setattr(parent, name.rpartition(".")[2], fresh)
