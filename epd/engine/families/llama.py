"""Llama: text only, also with tied embeddings (SmolLM2)."""

import torch
from transformers import LlamaModel

from epd.engine.attention import register_attention
from epd.engine.families.base import LanguageModules, ModelFamily
from epd.engine.loading import WeightFiles


class LlamaFamily(ModelFamily):
    """``LlamaForCausalLM`` folders."""

    name = "llama"

    def load_language(self, dtype: torch.dtype, device: torch.device) -> LanguageModules:
        config = self.text_config
        config._attn_implementation = register_attention()
        weights = WeightFiles(self.folder, dtype, device)
        body = weights.load(lambda: LlamaModel(config), "model.")
        tied = body.embed_tokens.weight if config.tie_word_embeddings else None
        return LanguageModules(body.embed_tokens, body, weights.load_head("lm_head.weight", tied))
