"""`python -m paceline` runs the command `paceline`."""

from paceline.cli import main

main(prog_name="paceline")
