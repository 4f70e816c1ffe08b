"""Training code of the tiny demonstration model ``shapes-vl``.

The model answers short questions about pictures of coloured shapes.  It is small enough to be
trained on a laptop processor, yet it has the real Qwen2-VL architecture, so every part of a
serving stack (image processing, vision encoder, mrope, grouped-query attention, KV cache, byte
level tokenizer, chat template) is exercised with answers whose correctness can be checked.
"""
