"""From image files to embeddings in registered memory.

Reading order: ``encoder`` (the front object) → ``image_header`` → ``embedding_cache`` →
``preprocess`` → ``encode_batcher``.
"""
