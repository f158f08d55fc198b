"""The pictures that a study leaves in its folder."""

from pathlib import Path
from urllib.parse import quote

from mutirao.config import load_name
from mutirao.report.plots import draw_bands
from mutirao.runs.column_names import USUAL
from mutirao.studies.study import Study, results

# What a system draws of a study beside that, as `package.module:function(study, out)`; it draws nothing of others'
# runs.
SYSTEM_PLOTS = ("mutirao.systems.ranking.report:draw_queries",)


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
    for draw in SYSTEM_PLOTS:
        paths += load_name(draw)(study, out)
    return paths
