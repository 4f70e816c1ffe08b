"""The layers of a Llama-shaped model in native code, with the transformers module's weights."""

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from epd.engine.attention import PagedStep
from epd.engine.native.attention import NativeAttention, paged_kv
from epd.engine.native.library import NativeLibrary
from epd.engine.native.structs import LayerCall, LayerShape, LayerWeights, PagedKv


class NativeDecoder(nn.Module):
    """Stands in for ``body`` (all layers and the final norm): one native call for all layers, or
    two for each when somebody is to be told of single ones.

    Projections that read the same input become one matrix, laid out once. The module's own weights
    turn into views of it, so ``body`` stays usable, as the reference and for any step that another
    attention implementation runs, and memory holds each weight once.
    """

    def __init__(self, body: Any, shape: LayerShape, library: NativeLibrary) -> None:
        super().__init__()
        self.body = body
        self._library = library
        self._shape = shape
        self._fused: list[torch.Tensor] = []
        weights = [self._layer_weights(layer) for layer in body.layers]
        self._weights = (LayerWeights * len(weights))(*weights)
        self._scratch = torch.empty(0)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        paged_step: PagedStep,
    ) -> BaseModelOutputWithPast:
        """Like the body's own forward for one step, ``inputs_embeds`` [1, tokens, hidden]."""
        attention = paged_step.attention
        if not isinstance(attention, NativeAttention):
            output: BaseModelOutputWithPast = self.body(
                inputs_embeds=inputs_embeds,
                position_ids=position_ids,
                use_cache=use_cache,
                paged_step=paged_step,
            )
            return output
        hidden = inputs_embeds[0].clone(memory_format=torch.contiguous_format)
        cosine, sine = self.body.rotary_emb(hidden, position_ids)
        self._run_layers(hidden, cosine[0].contiguous(), sine[0].contiguous(), paged_step)
        return BaseModelOutputWithPast(last_hidden_state=self.body.norm(hidden)[None])

    def _run_layers(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, step: PagedStep
    ) -> None:
        functions = self._library.functions
        assert isinstance(step.attention, NativeAttention)
        sequences = ctypes.byref(step.attention.sequences)
        tokens = hidden.shape[0]
        needed = functions.epd_scratch_floats(self._shape, tokens)
        if needed > self._scratch.numel():
            self._scratch = torch.empty(needed)
        call = LayerCall(
            shape=ctypes.pointer(self._shape),
            hidden=hidden.data_ptr(),
            scratch=self._scratch.data_ptr(),
            tokens=tokens,
            threads=self._library.threads,
        )
        cosine_at, sine_at = cosine.data_ptr(), sine.data_ptr()
        count = len(self._weights)
        kv = (PagedKv * count)(*map(paged_kv, step.layers))
        if step.before_layer is None and step.layer_written is None:
            # Between calls this thread would wait for the interpreter's lock, twice a layer, while
            # an event loop with many streams holds it most of the time.
            functions.epd_layers(call, self._weights, kv, count, cosine_at, sine_at, sequences)
            return
        for layer in range(count):
            if step.before_layer is not None:
                step.before_layer(layer)
            call.weights = ctypes.pointer(self._weights[layer])
            functions.epd_attention_half(call, cosine_at, sine_at, kv[layer], sequences)
            if step.layer_written is not None:
                step.layer_written(layer)
            functions.epd_mlp_half(call)

    def _layer_weights(self, layer: Any) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return LayerWeights(
            input_norm=layer.input_layernorm.weight.data_ptr(),
            qkv=self._fuse(projections, "weight"),
            qkv_bias=self._fuse(projections, "bias"),
            output=attention.o_proj.weight.data_ptr(),
            output_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.data_ptr(),
            mlp_norm=layer.post_attention_layernorm.weight.data_ptr(),
            gate_up=self._fuse((mlp.gate_proj, mlp.up_proj), "weight"),
            down=mlp.down_proj.weight.data_ptr(),
        )

    def _fuse(self, projections: Iterable[nn.Linear], name: str) -> int | None:
        """Puts a parameter of several projections behind one another; address, None if absent."""
        parts = [getattr(projection, name) for projection in projections]
        if parts[0] is None:
            return None
        fused = torch.cat([part.detach() for part in parts])
        self._fused.append(fused)
        views = torch.split(fused, [len(part) for part in parts])
        for projection, view in zip(projections, views, strict=True):
            setattr(projection, name, nn.Parameter(view, requires_grad=False))
        return fused.data_ptr()


class NativeLinear(nn.Module):
    """A linear layer without bias that shares the weight of a torch one."""

    def __init__(self, linear: nn.Linear, library: NativeLibrary) -> None:
        super().__init__()
        self.weight = linear.weight
        self._library = library

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [rows, in] to [rows, out]."""
        return self._library.linear(x.contiguous(), self.weight)
