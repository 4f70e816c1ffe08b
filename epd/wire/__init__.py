"""Conversions between wire messages and the library's dataclasses, shared by the services.

One file per noun; none imports torch. ``timings`` touches neither engine nor data plane.
"""
