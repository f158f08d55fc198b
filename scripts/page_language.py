"""A page in Portuguese tells the browser so: screen readers then speak it as Portuguese. A hook of mkdocs."""

from typing import Any


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Set the language of a page whose source ends in `.pt.md`."""
    if not page.file.src_uri.endswith(".pt.md"):
        return output
    return output.replace('<html lang="en"', '<html lang="pt-BR"', 1)
