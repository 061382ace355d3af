"""`python -m kbench`."""

from kbench.cli import main

main()
