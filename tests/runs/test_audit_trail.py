"""The audit trail on a disk that is full: an event is written whole or the caller hears of it, and none is lost."""

import subprocess
import sys
from pathlib import Path

from mutirao.runs.audit_trail import check_chain

FULL = """
import resource, signal, sys
from pathlib import Path
from mutirao.runs.audit_trail import Audit
from mutirao.runs.csv_tables import CsvTable

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
trail, table = Audit(Path(sys.argv[1]) / "audit.jsonl"), CsvTable(Path(sys.argv[1]) / "rows.csv")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
written, refused = [], 0
for number in range(10):
    try:
        trail.append("sent", number=number, reply="x" * 80)
        written.append(number)
    except OSError:
        refused += 1
rows = 0
try:
    for rows in range(1000):
        table.append([{"round": rows, "text": "y" * 50}])
except OSError:
    refused += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
trail.append("sent", number=99)
print(*written, 99, refused, rows)
"""


def test_an_event_that_does_not_fit_is_an_error_and_leaves_the_trail_whole(tmp_path: Path) -> None:
    told = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    *written, refused, rows = (int(word) for word in told.stdout.split())
    events, problems = check_chain(tmp_path / "audit.jsonl")
    assert problems == []
    assert [e["number"] for e in events] == written
    assert 2 <= len(written) < 6
    assert refused == 10 - (len(written) - 1) + 1  # the events, and the row of the table
    assert rows > 5
