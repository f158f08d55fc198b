"""The pictures that a study leaves in its folder."""

from pathlib import Path
from urllib.parse import quote

from mutirao.report.plots import draw_bands
from mutirao.runs.column_names import USUAL
from mutirao.studies.study import Study, results
from mutirao.systems.ranking.query_tests import write_query_tables
from mutirao.systems.ranking.wins_plot import draw_wins


def draw_study(study: Study, out: Path) -> list[Path]:
    """One picture a metric, the mean curve of each method with its 95% interval; and one of queries, if runs tell."""
    curves: dict[str, dict[str, list[list[tuple[int, float]]]]] = {}
    for cell, record in results(study, out):
        for metric in study.metrics or tuple(k for k in record.rows[-1] if k in USUAL):
            points = [(row["round"], row[metric]) for row in record.rows if metric in row]
            curves.setdefault(metric, {}).setdefault(cell.method, []).append(points)
    paths = []
    for metric, methods in curves.items():
        path = out / f"curves_{quote(metric.replace('@', '_at_'), safe=' ,')}.png"
        draw_bands(methods, metric, path)
        paths.append(path)
    return paths + draw_queries(study, out)


def draw_queries(study: Study, out: Path) -> list[Path]:
    """Write what queries tell, and draw who wins and loses against the baseline by the first metric they have."""
    lines = write_query_tables(study, out)
    if not lines:
        return []
    metric, path = lines[0].metric, out / "wins.png"
    draw_wins({x.method: x.ours - x.theirs for x in lines if x.metric == metric}, f"{metric}, difference", path)
    return [path]
