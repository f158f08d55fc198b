"""The pictures that a study leaves in its folder."""

from pathlib import Path
from urllib.parse import quote

from mutirao.drawing.plots import draw_bands
from mutirao.runs.schema import USUAL
from mutirao.studies.study import Study, results


def draw_study(study: Study, out: Path) -> list[Path]:
    """One picture a metric: the mean curve of each method with its 95% interval."""
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
    return paths
