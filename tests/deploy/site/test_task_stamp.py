"""The stamp of an order changes with whatever a worker is made of."""

from pathlib import Path

import pytest

from mutirao.deploy.site.task_stamp import TaskSpec, stamp


def test_the_stamp_tells_of_code_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code").mkdir()
    source, data = tmp_path / "own_code" / "__init__.py", tmp_path / "data"
    source.write_text("a = 1")
    data.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    order = TaskSpec("c1", "own_code:task_of", node_config={"data": str(data)})
    stamps = [stamp(order)]
    assert stamp(order) == stamps[0]
    source.write_text("a = 12")
    stamps.append(stamp(order))
    (data / "x.csv").write_text("1")
    stamps.append(stamp(order))
    assert len(set(stamps)) == 3
