"""Benchmarks: ``python -m bench NAME``. Ratios of interleaved arms, never lone absolute numbers."""
