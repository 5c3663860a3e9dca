"""Recognize errors of JAX by their texts, where they have no class of their own.

Input: an error that JAX raised. Output: what it is about. Sharp edge: a version of JAX
that words an error otherwise is not recognized; the tests meet each of these errors.
"""

import re


def unbound_axis(error: Exception) -> str | None:
    """Return the axis name that an error of JAX reports as unbound, or None.

    JAX raises a `NameError` of this text where a collective over an unknown axis name
    is traced.
    """
    # The name is any text, and some of JAX's errors end with advice.
    pattern = r"unbound axis name: (.+?)(\. To fix this, please call .*)?$"
    match = re.search(pattern, str(error), re.DOTALL)
    return None if match is None else match[1]


def is_about_a_mesh(error: Exception) -> bool:
    """Return whether an error of JAX is about a mesh: there is none, or the wrong one.

    It is judged by the text of the error, as JAX has no class for such errors.
    """
    # Programs may have meshes of other sorts, so one of JAX's terms is needed, too.
    if isinstance(error, AssertionError):  # two cotangents: one type has axes
        return re.search(r"ShapedArray\(\S*@", str(error)) is not None
    terms = r"Mesh|context|[Ss]hard|PartitionSpec|\b(axis|axes)|Explicit|Auto|Manual"
    return "mesh" in str(error) and re.search(terms, str(error)) is not None
