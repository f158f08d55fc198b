"""Error feedback: nothing of an update is lost for good, and so the optimum is found where plain top-k runs away."""

from typing import Any

import numpy as np
import pytest

from mutirao.aggregation import FedAvg
from mutirao.compression import NAMES, CodecCompression, Int8, TopK
from mutirao.compression.methods import ERROR, EncodingHandler, decode_reply
from mutirao.core.arrays import Arrays
from mutirao.core.fleet import Reply, Request, Site
from mutirao.core.rounds import Run, train
from mutirao.randomness import rng
from mutirao.selection import everyone
from mutirao.simulation.local_fleet import LocalFleet

CODECS = [TopK(0.1), Int8(), Int8(rounding="stochastic"), TopK(0.3, feedback=False), Int8(feedback=False)]
MODEL: Arrays = {"w": np.ones((4, 5), np.float32), "b": np.ones((), np.float32), "seen": np.array([3, 4])}


def moving(request: Request, site: Site) -> Reply:
    """Random steps; the whole number counts on."""
    draw = rng(0, int(request.config["round"]), "step", site.id)
    arrays = {k: np.asarray(v + draw.normal(size=v.shape).astype(v.dtype)) for k, v in request.arrays.items()}
    return Reply(arrays | {"seen": request.arrays["seen"] + 1}, {"errors": np.ones(2)}, {"loss": 1.0}, 7)


def train_request(number: int, arrays: Arrays = MODEL) -> Request:
    return Request("train", arrays, {"seed": 5, "round": number})


@pytest.mark.parametrize("codec", CODECS[:3], ids=repr)
def test_what_was_sent_and_what_is_kept_are_all_updates_together(codec: CodecCompression) -> None:
    site, handler = Site("ana"), EncodingHandler(moving, codec)
    sent, wanted = ({k: np.zeros(MODEL[k].shape) for k in ("w", "b")} for _ in range(2))
    for number in range(1, 30):
        request = train_request(number)
        made = decode_reply(codec, request, handler(request, site))
        assert isinstance(made, Reply)
        for k in sent:
            sent[k] += made.arrays[k] - MODEL[k].astype(np.float64)
            wanted[k] += moving(request, site).arrays[k] - MODEL[k].astype(np.float64)
    assert site.state.keys() == {ERROR + "w", ERROR + "b"}
    for k in sent:
        assert np.abs(sent[k] + site.state[ERROR + k] - wanted[k]).max() < 1e-4
        assert site.state[ERROR + k].shape == MODEL[k].shape
    assert np.abs(site.state[ERROR + "w"]).max() > 1e-3  # something did wait


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_whole_numbers_figures_and_extras_travel_as_they_are(codec: CodecCompression) -> None:
    reply = EncodingHandler(moving, codec)(train_request(1), Site("ana"))
    assert reply.arrays.keys() == {"seen", *codec.keys}
    assert reply.arrays["seen"].tolist() == [4, 5]
    assert (reply.metrics, reply.n, reply.extras["errors"].tolist()) == ({"loss": 1.0}, 7, [1, 1])
    made = decode_reply(codec, train_request(1), reply)
    assert isinstance(made, Reply)
    assert {k: (v.shape, v.dtype) for k, v in made.arrays.items()} == {k: (v.shape, v.dtype) for k, v in MODEL.items()}


def test_without_feedback_a_site_keeps_nothing() -> None:
    site = Site("ana")
    EncodingHandler(moving, TopK(0.1, feedback=False))(train_request(1), site)
    assert site.state == {}


def test_what_is_kept_of_a_model_of_another_shape_is_not_added() -> None:
    site, codec = Site("ana", state={ERROR + "w": np.full((2, 2), 100, np.float32)}), TopK(1.0)
    request = train_request(1)
    made = decode_reply(codec, request, EncodingHandler(moving, codec)(request, site))
    assert isinstance(made, Reply)
    assert np.abs(made.arrays["w"] - moving(request, site).arrays["w"]).max() < 1e-6


def answer(do: str, arrays: Arrays) -> Reply:
    def handler(request: Request, site: Site) -> Reply:
        return Reply(arrays, n=1)

    return EncodingHandler(handler, TopK(0.1))(Request(do, MODEL, {}), Site("ana"))


ODD: dict[str, tuple[str, Arrays]] = {
    "an answer to something else": ("warm", MODEL),
    "nothing": ("train", {}),
    "rows": ("train", MODEL | {"w": MODEL["w"][:1], "w@rows": np.array([0])}),
    "NaN": ("train", MODEL | {"b": np.asarray(np.nan, np.float32)}),
    "another type": ("train", MODEL | {"b": np.asarray(1.0)}),
    "another shape": ("train", MODEL | {"w": MODEL["w"].T}),
    "less than the model": ("train", {"w": MODEL["w"]}),
}


@pytest.mark.parametrize(("do", "arrays"), ODD.values(), ids=ODD.keys())
def test_what_is_no_sound_update_leaves_as_it_is(do: str, arrays: Arrays) -> None:
    left = answer(do, arrays).arrays
    assert left.keys() == arrays.keys()
    assert all(left[k] is arrays[k] for k in arrays)


def test_models_without_numbers_of_floating_point_travel_whole() -> None:
    for model in ({"seen": np.array([1])}, {"w": np.zeros((0, 3), np.float32)}):
        reply = EncodingHandler(lambda request, site: Reply(request.arrays, n=1), Int8())(
            train_request(1, model), Site("a")
        )
        assert reply.arrays.keys() == model.keys()
        assert decode_reply(Int8(), train_request(1, model), reply) is reply


def test_many_clients_at_once_send_what_each_would_alone() -> None:
    class Both:
        def __call__(self, request: Request, site: Site) -> Reply:
            return moving(request, site)

        def many(self, requests: Any, sites: Any) -> Any:
            return {c: moving(requests[c], sites[c]) for c in requests}

    for codec in CODECS:
        found = []
        for handler in (EncodingHandler(Both(), codec), EncodingHandler(moving, codec)):
            fleet = LocalFleet(handler, {"ana": 0, "bia": 1, "caio": 2})
            for number in (1, 2):
                answers = fleet.ask({c: train_request(number) for c in fleet.clients()})
            found.append({c: {k: v.tobytes() for k, v in r.arrays.items()} for c, r in answers.replies.items()})
        assert found[0] == found[1]
    assert EncodingHandler(moving, TopK()).many is None


# f_k(x) = <a_k, x>^2 + |x|^2 / 4: of the three gradients at (t, t, t) the largest numbers all point the same, wrong way
# (Beznosikov, Horvath, Richtarik and Safaryan, 2020, example 1). The optimum is 0.
SLOPES = {"ana": [-3.0, 2, 2], "bia": [2.0, -3, 2], "caio": [2.0, 2, -3]}


def slide(request: Request, site: Site) -> Reply:
    x, a = request.arrays["x"], np.array(site.data)
    return Reply({"x": x - 0.01 * (2 * a * (a @ x) + x / 2)}, n=1)


def distance_after(codec: Any, rounds: int) -> float:
    run = Run({"x": np.ones(3)})
    fleet = codec.at_server(LocalFleet(codec.at_client(slide), SLOPES))
    list(train(run, fleet, rounds=rounds, select=everyone, aggregate=FedAvg()))
    return float(np.linalg.norm(run.arrays["x"]))


@pytest.mark.slow
def test_where_plain_top_k_runs_away_feedback_finds_the_optimum() -> None:
    assert distance_after(TopK(1 / 3, feedback=False), 300) > 100
    assert distance_after(TopK(1 / 3), 1800) < 1e-3
    assert distance_after(NAMES["none"](), 1800) < 1e-3
    assert distance_after(Int8(), 1800) < 1e-3
