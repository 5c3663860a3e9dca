"""Numbers as text, for what is printed."""


def bytes_as_text(nbytes: int, unit: str = "B") -> str:
    """Format a number of bytes, or of another unit, for humans: `812 B`, `12.3 kB`.

    A symbolic expression is not rounded.
    """
    if not isinstance(nbytes, int):  # a symbolic dimension
        return f"{nbytes} {unit}"
    prefixes = ("", "k", "M", "G", "T")
    power = 0 if nbytes < 10_000 else min(4, (len(str(nbytes)) - 2) // 3)
    return f"{nbytes / 1000**power:.4g} {prefixes[power]}{unit}"
