"""How many bytes a device sends in a collective: one convention for the whole project.

Input: the kind of a collective, the bytes of its whole value, and the number of devices
that communicate. Output: bytes that each device sends, in the algorithms that send the
fewest: rings (Thakur et al. 2005, "Optimization of collective communication operations
in MPICH", section 4; docs/explanation/cost_model.md). Sharp edge: it is not what a link
transfers, which depends on the topology.
"""

from drjax._errors import DrjaxValueError

KINDS = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "send",
)


def sent_bytes(kind: str, size: int, devices: int) -> int:
    """Bytes that each of m devices sends in a collective, for a whole value of b bytes.

    | kind | whole value | bytes sent |
    | --- | --- | --- |
    | `all-reduce` | its result | 2 (m - 1) / m b |
    | `reduce-scatter` | its operand | (m - 1) / m b |
    | `all-gather` | its result | (m - 1) / m b |
    | `all-to-all` | its operand | (m - 1) / m b |
    | `ragged-all-to-all` | the smaller of operand and result | (m - 1) / m b |
    | `collective-permute`, `collective-broadcast`, `send` | its operand | b |

    Args:
      kind: The kind, one of those in the table.
      size: b, the bytes of the whole value on one device.
      devices: m, how many devices communicate with each other.

    Returns:
      The bytes, an integer: a fraction is rounded up.

    Raises:
      DrjaxValueError: The kind is not in the table.

    Example:
      >>> from drjax.compiled import sent_bytes
      >>> sent_bytes("all-reduce", 1000, 4), sent_bytes("reduce-scatter", 1000, 4)
      (1500, 750)

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
    communication operations in MPICH", section 4.
    """
    if kind not in KINDS:
        raise DrjaxValueError(f"sent_bytes needs a kind of {KINDS}, got {kind!r}.")
    if kind in ("collective-permute", "collective-broadcast", "send"):
        return size if devices > 1 else 0
    times = 2 if kind == "all-reduce" else 1
    return -(-times * (devices - 1) * size // devices)
