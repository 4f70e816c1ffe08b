"""Runs the services as processes of one machine, for ``epd up``, the demo and the tests."""
