"""Many numbers out of a text at once."""

from io import BytesIO

import numpy as np
import numpy.typing as npt


def read_numbers(text: bytes, count: int) -> npt.NDArray[np.float64] | None:
    """So many decimal numbers, a line each; None if there are more or fewer, or if one is only a sign or a point.

    SciPy's reader of Matrix Market files is the fastest there is among what we depend on. It looks no further than to
    the end of a number and forgets the sign of -0, so who calls makes sure of the rest.
    """
    from scipy.io import mmread

    if not count:  # which SciPy divides by
        return np.zeros(0)
    try:
        found = mmread(BytesIO(b"%%%%MatrixMarket matrix array real general\n%d 1\n" % count + text))
    except ValueError:
        return None
    return np.asarray(found, np.float64).reshape(-1)
