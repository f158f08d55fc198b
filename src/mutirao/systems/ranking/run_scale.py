"""The scale of a ranking run: where it comes from, what it may not be asked for, and what a run leaves of it."""

from pathlib import Path
from typing import Any

from mutirao.core.agreement import AGREED, in_extras
from mutirao.core.arrays import Arrays
from mutirao.core.rounds import Run
from mutirao.datasets.labelled import digest_of_set
from mutirao.errors import ConfigError
from mutirao.experiments.disclosure import promises
from mutirao.experiments.party_agreement import read_given
from mutirao.io import load_arrays, write_whole
from mutirao.systems.ranking.feature_scale import SCALE, Scale, plain_scale, read_scale
from mutirao.systems.ranking.ranking_data import RankingData
from mutirao.systems.ranking.ranking_evaluation import write_queries

MEMORY = AGREED + SCALE  # where a run keeps what its clients have agreed on


def not_yet(arrays: Arrays) -> dict[str, float]:
    """How models are judged before there is a scale; the flow puts the real judge in its place."""
    raise ConfigError("no scale of features is agreed on yet, so that no model can be judged")


def digest_of_dealt(table: RankingData | None) -> dict[str, str]:
    """The set that is dealt to all, if there is one, by its digest."""
    return {} if table is None else {"data": digest_of_set(["ranking"], table.x, table.grades, table.queries)}


def own_scale(config: Any, source: Any) -> bytes:
    """The scale that a setting names, or one without moments, as it travels; empty if clients have to find it."""
    if given := read_given("scale", config.scale, read_scale):
        if (found := read_scale(given).transform) != config.transform:
            raise ConfigError(f"scale: {config.scale} has transform={found}, and transform={config.transform} is set")
        return given
    if config.moments:
        return b""
    tables = [] if config.sites else [source.holders[name].table for name in source.holders]
    features = config.features or max((table.features for table in tables), default=0)
    grades = config.grades or max((int(table.grades.max(initial=1)) for table in tables), default=0)
    if not (features and grades):
        raise ConfigError("moments=false: say features=N and grades=N, as the server has no file to see them from")
    return plain_scale(features, grades, config.transform).content()


def check_private(config: Any, own: bytes) -> None:
    """Refuse a promise that moments in the clear would break."""
    if (promised := promises(config)) and not own:
        raise ConfigError(
            f"{promised}: clients would tell counts, sums and squares of their features in the clear; name a scale "
            "agreed on beforehand, scale=FILE.json (every run leaves one), or set moments=false"
        )


def scale_of(client: Any, run: Run) -> Scale:
    """What the clients of a run have agreed on."""
    return read_scale(in_extras(MEMORY, run.memory) or client.own)


def judge_at_end(client: Any, source: Any, run: Run, arrays: Arrays) -> dict[str, float]:
    """What is said, once, of a model that validation data have chosen."""
    scale = scale_of(client, run)
    found: dict[str, float] = client.judge(arrays, source.judged(scale), scale)
    return found


def write_scale(client: Any, run: Run, path: Path) -> None:
    """Write `scale.json`, with which another run need not ask its clients."""
    write_whole(path, scale_of(client, run).content() + b"\n")


def write_judged(client: Any, source: Any, best: bool, run: Run, path: Path) -> None:
    """Write `queries.csv` of the model that the summary's final figures are of, where queries are here to judge by."""
    if source.judged is None:
        return
    scale = scale_of(client, run)
    arrays = load_arrays(path.parent / "checkpoints" / "best.safetensors")[0] if best else run.arrays
    judged = source.judged(scale)
    write_queries(client.score(arrays, judged, scale), judged, client.trainers.metrics(scale), path)


def write_ranker(client: Any, run: Run, path: Path) -> None:
    """Write `ranker.safetensors`: the model of the best round, or the last, with all it takes to score documents."""
    from mutirao.systems.ranking.ranker import JUDGING, SHAPE, Ranker

    best = path.parent / "checkpoints" / "best.safetensors"
    arrays, number = run.arrays, run.round
    if best.is_file():
        arrays, facts = load_arrays(best)
        number = int(facts["round"])
    settings = {key: getattr(client.trainers.config, key) for key in (*SHAPE, *JUDGING)}
    Ranker(scale_of(client, run), arrays, settings, number).save(path)
