"""Numbers for people."""


def percent(share: float, *, digits: int = 1) -> str:
    """E.g. 25.0%."""
    return f"{100 * share:.{digits}f}%"


def count(number: float) -> str:
    """E.g. 135.00M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:g}"


def byte_count(number: float) -> str:
    """E.g. 270.00 MB, in thousands."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:g} B"


def short(number: float) -> str:
    """Four digits that mean something, no exponent where none is needed."""
    if number == 0 or 1e-3 <= abs(number) < 1e6:
        return f"{number:.4g}" if abs(number) < 1e4 else f"{number:,.0f}"
    return f"{number:.3g}"
