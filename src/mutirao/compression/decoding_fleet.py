"""A fleet around a fleet: encoded replies come out decoded, before anybody looks at them."""

from collections.abc import Mapping

import numpy as np

from mutirao.compression.codec import Codec, Malformed, split_into_arrays
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Answers, ClientId, Failure, Fleet, Reply, Request, Wrapper, traffic
from mutirao.core.validation import set_aside


class DecodingFleet(Wrapper):
    """Replies to `train` are decoded against the model of their request; bytes are counted as they travelled.

    An encoding that cannot be is its client's failure alone. A client may also send all of its update.
    """

    def __init__(self, fleet: Fleet, codec: Codec) -> None:
        super().__init__(fleet)
        self.codec = codec
        self._asked: dict[ClientId, Request] = {}  # what those were sent who have not answered: some come in later

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
    """The reply that an encoded one stands for: x + C(u), and whole numbers as they came."""
    model, names = request.arrays, codec.names(request.arrays)
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
    ordered = {name: both[name] for name in model if name in both}  # as the model has them
    return Reply(ordered | rest, reply.extras, reply.metrics, reply.n)
