"""What every kind of compression offers to tasks and flows, and what it does not go with."""

from dataclasses import dataclass
from typing import Any

from mutirao.compression.codec import Codec
from mutirao.compression.decoding_fleet import DecodingFleet
from mutirao.compression.encoding_handler import EncodingHandler
from mutirao.core.fleet import Fleet
from mutirao.core.parts import AnyHandler
from mutirao.errors import ConfigError


class Compression:
    """As it is, updates travel whole."""

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler as the client runs it."""
        return handler

    def at_server(self, fleet: Fleet) -> Fleet:
        """The fleet as the server asks it."""
        return fleet

    def check(self, config: Any) -> None:
        """Refuse, before the first round, what it does not go with."""


@dataclass(frozen=True)
class NoCompression(Compression):
    """No compression: updates travel whole.

    >>> from mutirao.compression import compress_of
    >>> from mutirao.config import Common, resolve
    >>> compress_of(resolve(Common, {}))  # by default
    NoCompression()
    """


class CodecCompression(Codec, Compression):
    """Updates leave encoded, and are decoded before the server looks at them."""

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler whose updates leave encoded."""
        return EncodingHandler(handler, self)

    def at_server(self, fleet: Fleet) -> Fleet:
        """The fleet whose encoded replies come out decoded."""
        return DecodingFleet(fleet, self)

    def check(self, config: Any) -> None:
        """Refuse sums for which all numbers must travel, and a reference that sends nothing."""
        if config.secure.name != "none":
            raise ConfigError(
                f"compress={self.name}: secure={config.secure.name} masks every number of an update, so that all of "
                "them must travel; use none (secure.bits makes masked numbers shorter)"
            )
        if config.centralised:
            raise ConfigError(f"compress={self.name}: centralised training sends no updates; use none")
