"""A run or a study on one self-contained page: readable offline, on a phone, on paper, in a mail."""

from pathlib import Path

from mutirao.core.files import write_whole


def write_report(folder: Path) -> Path:
    """Write `report.html` from what the folder of a run or study holds."""
    write_whole(folder / "report.html", render(folder), durable=False)
    return folder / "report.html"


def render(folder: Path) -> str:
    """The page of a run or study."""
    if (folder / "study.json").is_file() or (folder / "table.json").is_file():
        from mutirao.report.study import page_of as study_page

        return study_page(folder).html()
    from mutirao.report.record import Record
    from mutirao.report.run import page_of as run_page

    return run_page(Record.of(folder)).html()
