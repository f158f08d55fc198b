"""The notice on all results about slides or cells: this is research. One text, for pages, pictures and models."""

import re
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

NOTICE = (
    "A research tool, not a medical device: no diagnosis and no decision about a patient may rest on it, "
    "and a low score rules nothing out."
)
"""The notice on all results about slides or cells.

>>> NOTICE.partition(":")[0]
'A research tool, not a medical device'
"""
CELLS = {"cytology", "herlev", "sipakmed", "mendeley", "lbc", "cric", "hicervix", "smear", "smears", "pap", "cervical"}


def notice_of(config: Mapping[str, Any]) -> str:
    """The notice of a run if its recipe or data, as config.toml names them, are about cells; empty for others.

    >>> notice_of({"recipe": "images", "data": "/srv/Herlev-2005/all"}) == notice_of({"recipe": "cytology"}) == NOTICE
    True
    >>> notice_of({"recipe": "images", "data": "papers"})
    ''
    """
    text = f"{config.get('recipe', '')} {config.get('data', '')}".lower()
    if CELLS & {*re.split(r"[^a-z]+", text)}:
        return NOTICE
    return ""


def sign_picture(picture: "Image.Image") -> "Image.Image":
    """The picture with the notice below it."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    each = max(1.0, font.getlength(NOTICE) / len(NOTICE))
    lines = textwrap.wrap(NOTICE, max(12, int((picture.width - 12) / each)))
    signed = Image.new("RGB", (picture.width, picture.height + 14 * len(lines) + 8), "white")
    signed.paste(picture)
    pen = ImageDraw.Draw(signed)
    for i, text in enumerate(lines):
        pen.text((6, picture.height + 4 + 14 * i), text, fill="#80140a", font=font)
    return signed
