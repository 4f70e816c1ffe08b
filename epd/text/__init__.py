"""Text in and out of tokens: chat template, tokenizer, incremental detokeniser, stop strings.

Reads the tokenizer files of a Hugging Face model folder without torch or transformers.
"""
