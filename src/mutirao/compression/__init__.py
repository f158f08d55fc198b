"""Less traffic: updates leave a client compressed, and what compression dropped is added to its next update."""

from collections.abc import Mapping
from typing import Any

from mutirao.compression.int8 import Int8
from mutirao.compression.methods import CodecCompression as CodecCompression
from mutirao.compression.methods import Compression as Compression
from mutirao.compression.methods import NoCompression as NoCompression
from mutirao.compression.topk import TopK
from mutirao.config import build
from mutirao.errors import ConfigError

NAMES = {"none": NoCompression, "topk": TopK, "int8": Int8}


def compress_of(config: Any) -> Compression:
    """The kind that a configuration asks for; ConfigError if it does not go with the rest."""
    compress: Compression = build("compress", config.compress)
    compress.check(config)
    return compress


def to_table(compress: Compression) -> dict[str, Any]:
    """A kind with its settings, as it travels between processes of one site."""
    name = next((name for name, kind in NAMES.items() if type(compress) is kind), None)
    if name is None:
        raise ConfigError(f"compress: a site's worker does not know {compress!r}; set MUTIRAO_WORKER=off there")
    return {"name": name, **vars(compress)}


def from_table(table: Mapping[str, Any]) -> Compression:
    """What `to_table` was given."""
    made: Compression = NAMES[table["name"]](**{k: v for k, v in table.items() if k != "name"})
    return made
