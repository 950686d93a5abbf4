"""Student's t: how wide an interval of a few values is."""

from __future__ import annotations

# Student's t at 0.975, for 1 to 30 degrees of freedom.
_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip

NORMAL = 1.959964  # of the normal distribution


def student_t(freedom: int) -> float:
    """The 0.975 quantile for `freedom` degrees, >= 1; above 30 by its expansion, exact to four digits.

    >>> student_t(2), round(student_t(60), 3)
    (4.3027, 2.0)
    """
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    z = NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
