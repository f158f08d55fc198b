import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from mutirao.datasets import digits

RUN = """
import sys
from mutirao.cli import main
main(["run", "quickstart", "--set", "rounds=1", "--progress", "quiet", "--out", "run"], standalone_mode=False)
unused = "sklearn scipy pandas pyarrow flwr torchvision torch._dynamo torch._inductor sympy"
print([name for name in unused.split() if name in sys.modules], file=sys.stderr)
"""


def test_the_file_is_what_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    table = digits.read_digits_table()
    x, y = load_digits(return_X_y=True)
    np.testing.assert_array_equal(table[:, :-1], x)
    np.testing.assert_array_equal(table[:, -1], y)
    monkeypatch.setattr(digits, "FILE", Path("not", "there", "any", "more.csv.gz"))
    elsewhere = digits.read_digits_table()
    assert elsewhere.dtype == table.dtype
    np.testing.assert_array_equal(elsewhere, table)


@pytest.mark.slow
def test_a_run_imports_no_package_that_it_does_not_use(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stderr.strip() == "[]"
