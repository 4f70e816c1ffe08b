"""Conversions between wire messages and the library's dataclasses, shared by the services.

One file per noun; none imports torch. ``timings``, ``sampling``, ``top_logprobs`` and
``finish_reason`` touch neither engine nor data plane, so the router uses them.
"""
