"""Native CPU kernels for float32: paged attention and the decoder layer around it."""
