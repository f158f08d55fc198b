"""A handler around a handler: an update leaves encoded, and what that lost waits in the site's state."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from mutirao.compression.codec import Codec, split_into_arrays
from mutirao.core.arrays import Arrays, is_finite
from mutirao.core.fleet import ARRAY, ClientId, Failure, Reply, Request, Site, failure_of
from mutirao.core.parts import AnyHandler, Many, as_handler
from mutirao.randomness import rng

LOST = "compress."  # under which a site keeps, array by array, what its updates have lost so far


class EncodingHandler:
    """A handler whose answers to `train` are encoded; `many` clients at once if it could before."""

    def __init__(self, handler: AnyHandler, codec: Codec) -> None:
        self.handler, self.codec = as_handler(handler), codec
        self.provides, self.private = self.handler.provides, self.handler.private

    @property
    def many(self) -> Many | None:
        """For many clients at once, if the handler has such a way."""
        many = self.handler.many
        return None if many is None else functools.partial(self._many, many)

    def __call__(self, request: Request, site: Site) -> Reply:
        """The reply as it leaves."""
        reply: Reply = self.encode(request, self.handler(request, site), site)
        return reply

    def _many(
        self, many: Many, requests: Mapping[ClientId, Request], sites: Mapping[ClientId, Site]
    ) -> dict[ClientId, Reply | Failure]:
        out: dict[ClientId, Reply | Failure] = {}
        for client, reply in many(requests, sites).items():
            try:
                out[client] = self.encode(requests[client], reply, sites[client]) if client in requests else reply
            except Exception as error:  # it is this client's failure alone
                out[client] = failure_of(error)
        return out

    def encode(self, request: Request, reply: Any, site: Site) -> Any:
        """The reply with its update encoded; what is no sound update leaves as it is, and the server says so."""
        if not isinstance(reply, Reply) or request.do != "train" or not is_full_update(request.arrays, reply.arrays):
            return reply
        model, names = request.arrays, self.codec.names(request.arrays)
        with np.errstate(over="ignore", invalid="ignore"):
            update = {name: np.asarray(reply.arrays[name] - model[name]) for name in names}
            for name in names if self.codec.feedback else ():
                before = site.state.get(LOST + name)
                if before is not None and (before.shape, before.dtype) == (model[name].shape, model[name].dtype):
                    update[name] = np.asarray(update[name] + before)
        if not names or not is_finite(update):
            return reply
        seed, number = int(request.config.get("seed", 0)), int(request.config.get("round", 0))
        sent = self.codec.encode(update, names, rng(seed, number, "compress", site.id))
        if self.codec.feedback:
            arrived = split_into_arrays(self.codec.decode(sent, model, names), model, names)
            site.state |= {LOST + name: np.asarray(update[name] - arrived[name]) for name in names}
        whole = {name: value for name, value in reply.arrays.items() if name not in update}
        return Reply(whole | sent, reply.extras, reply.metrics, reply.n)


def is_full_update(model: Arrays, arrays: Arrays) -> bool:
    """Whether these are an update of the model, array by array: no rows of it, nothing left out."""
    return arrays.keys() == model.keys() and all(
        isinstance(value, ARRAY) and value.shape == model[name].shape and value.dtype == model[name].dtype
        for name, value in arrays.items()
    )
