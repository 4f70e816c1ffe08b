"""The KServe v2 face of the router, for text-generation clients of Triton; off by default."""
