"""The command line: parse, call, print, exit code. No logic, and nothing heavy before a command needs it."""

from kbench.cli.app import app, main

__all__ = ["app", "main"]
