"""Compression of updates with error feedback: what is lost is added to the client's next update."""

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
    """The compression of a configuration; ConfigError if it conflicts with other settings."""
    compress: Compression = build("compress", config.compress)
    compress.check(config)
    return compress


def to_table(compress: Compression) -> dict[str, Any]:
    """A compression with its settings, as it is sent between processes of one site."""
    name = next((name for name, kind in NAMES.items() if type(compress) is kind), None)
    if name is None:
        raise ConfigError(f"compress: a site's worker does not support {compress!r}; set MUTIRAO_WORKER=off there")
    return {"name": name, **vars(compress)}


def from_table(table: Mapping[str, Any]) -> Compression:
    """The compression from the table of `to_table`."""
    made: Compression = NAMES[table["name"]](**{k: v for k, v in table.items() if k != "name"})
    return made
