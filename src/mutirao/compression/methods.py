"""What every compression provides: the handler that encodes, the fleet that decodes, and conflicts with settings.

A client's handler encodes its update and keeps the error in the site's state; the server's fleet decodes replies before
anything else uses them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutirao.compression.codec import Codec, Malformed, split_into_arrays
from mutirao.core.arrays import Arrays, is_finite
from mutirao.core.fleet import (
    ARRAY,
    Answers,
    ClientId,
    Failure,
    Fleet,
    Reply,
    Request,
    Site,
    Wrapper,
    traffic,
)
from mutirao.core.handler_wrapper import HandlerWrapper
from mutirao.core.parts import AnyHandler
from mutirao.core.validation import set_aside
from mutirao.errors import ConfigError
from mutirao.randomness import rng

ERROR = "compress."  # prefix of the site's state: by array, the compression error of its updates so far


class EncodingHandler(HandlerWrapper):
    """A handler that encodes its answers to `train`."""

    def __init__(self, handler: AnyHandler, codec: Codec) -> None:
        super().__init__(handler)
        self.codec = codec

    def after(self, request: Request, site: Site, reply: Reply, note: Any) -> Reply:
        """The encoded reply."""
        return self.encode(request, reply, site)

    def encode(self, request: Request, reply: Reply, site: Site) -> Reply:
        """The reply with its update encoded; an invalid update is sent unchanged, for the server to refuse."""
        if request.do != "train" or not is_full_update(request.arrays, reply.arrays):
            return reply
        model = request.arrays
        names = self.codec.names(model)
        with np.errstate(over="ignore", invalid="ignore"):
            update = {name: np.asarray(reply.arrays[name] - model[name]) for name in names}
            for name in names:
                before = site.state.get(ERROR + name)
                if before is None or not self.codec.feedback:
                    continue
                # The error of another model, such as one with another head, has another shape and is dropped.
                if (before.shape, before.dtype) == (model[name].shape, model[name].dtype):
                    update[name] = np.asarray(update[name] + before)
        # Checked before anything is stored: a NaN would stay in the error of all later updates.
        if not names or not is_finite(update):
            return reply
        seed = int(request.config.get("seed", 0))
        number = int(request.config.get("round", 0))
        sent = self.codec.encode(update, names, rng(seed, number, "compress", site.id))
        if self.codec.feedback:
            # Decoded as the server decodes it, so that e' also has what rounding to the model's dtype loses.
            arrived = split_into_arrays(self.codec.decode(sent, model, names), model, names)
            site.state |= {ERROR + name: np.asarray(update[name] - arrived[name]) for name in names}
        unencoded = {name: value for name, value in reply.arrays.items() if name not in update}
        return Reply(unencoded | sent, reply.extras, reply.metrics, reply.n)


def is_full_update(model: Arrays, arrays: Arrays) -> bool:
    """Whether these arrays are a full update of the model: no sparse rows, nothing left out."""
    return arrays.keys() == model.keys() and all(
        isinstance(value, ARRAY) and value.shape == model[name].shape and value.dtype == model[name].dtype
        for name, value in arrays.items()
    )


class DecodingFleet(Wrapper):
    """Replies to `train` are decoded against the model of their request; bytes are counted as they travelled.

    An invalid encoding is a failure of its client alone. A client may also send its update uncompressed.
    """

    def __init__(self, fleet: Fleet, codec: Codec) -> None:
        super().__init__(fleet)
        self.codec = codec
        # The requests without an answer yet: in asynchronous runs answers come later.
        self._asked: dict[ClientId, Request] = {}

    def ask(self, requests: Mapping[ClientId, Request]) -> Answers:
        """The answers of the fleet, decoded."""
        self._asked |= requests
        answers = self.fleet.ask(requests)
        carried = traffic(requests, answers)
        faults: dict[ClientId, Failure] = {}
        replies: dict[ClientId, Reply] = {}
        for client, reply in answers.replies.items():
            made = decode_reply(self.codec, self._asked.pop(client), reply)
            if isinstance(made, Failure):
                faults[client] = made
            else:
                replies[client] = made
        return set_aside(Answers({**answers.replies, **replies}, answers.failures, carried), faults)


def decode_reply(codec: Codec, request: Request, reply: Reply) -> Reply | Failure:
    """The decoded reply: x + C(u), and integers as they were sent."""
    model = request.arrays
    names = codec.names(model)
    sent = {name: value for name, value in reply.arrays.items() if name in codec.keys}
    if request.do != "train" or not names or not sent:
        return reply
    rest = {name: value for name, value in reply.arrays.items() if name not in sent}
    if twice := sorted(rest.keys() & set(names)):
        return Failure("malformed", f"sent {twice[0][:80]!r} besides an encoding of it")
    try:
        moved = split_into_arrays(codec.decode(sent, model, names), model, names)
    except Malformed as error:
        return Failure(error.kind, str(error))
    with np.errstate(over="ignore"):
        ends: Arrays = {name: np.asarray(model[name] + moved[name]) for name in names}
    both = ends | rest
    ordered = {name: both[name] for name in model if name in both}  # in the order of the model
    return Reply(ordered | rest, reply.extras, reply.metrics, reply.n)


class Compression:
    """The base class: updates are sent uncompressed."""

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler that the client runs."""
        return handler

    def at_server(self, fleet: Fleet) -> Fleet:
        """The fleet that the server uses."""
        return fleet

    def check(self, config: Any) -> None:
        """Raise ConfigError, before the first round, for settings that it conflicts with."""


@dataclass(frozen=True)
class NoCompression(Compression):
    """No compression.

    >>> from mutirao.compression import compress_of
    >>> from mutirao.config import Common, resolve
    >>> compress_of(resolve(Common, {}))  # by default
    NoCompression()
    """


class CodecCompression(Codec, Compression):
    """Updates are sent encoded, and decoded before the server uses them."""

    def at_client(self, handler: AnyHandler) -> AnyHandler:
        """The handler with encoded updates."""
        return EncodingHandler(handler, self)

    def at_server(self, fleet: Fleet) -> Fleet:
        """The fleet with decoded replies."""
        return DecodingFleet(fleet, self)

    def check(self, config: Any) -> None:
        """Refuse secure sums, for which all numbers must be sent, and centralised training, which sends none."""
        if config.secure.name != "none":
            raise ConfigError(
                f"compress={self.name}: secure={config.secure.name} masks every number of an update, so all of "
                "them must be sent; use none (secure.bits makes masked numbers shorter)"
            )
        if config.centralised:
            raise ConfigError(f"compress={self.name}: centralised training sends no updates; use none")
