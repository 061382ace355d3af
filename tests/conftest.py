"""Tests are the same every time: hypothesis draws the same examples, and no clock limits them."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
