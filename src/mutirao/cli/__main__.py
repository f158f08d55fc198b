"""`python -m mutirao.cli` is `mutirao`."""

from mutirao.cli.main import main

main(prog_name="mutirao")
