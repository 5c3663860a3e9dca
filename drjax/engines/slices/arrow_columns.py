"""Columns of Arrow tables as numpy arrays, without a Python object for each number.

Input: a column, an Arrow array. Output: its values, one for each row.

Sharp edges: columns with nulls, and of ragged lists, are slow.
"""

import math
from typing import Any, TypeAlias

import numpy as np

from drjax._extras import needed

# Of pyarrow, which users may lack. A plain column has values and lists, nested to any
# depth: no dictionaries, no extension types.
Column: TypeAlias = Any  # a `pyarrow.Array`
DataType: TypeAlias = Any


def plain(column: Column) -> Column:
    """Convert a column to plain values and lists: no dictionaries, no extensions.

    Categories are decoded. Extension types are read as their storage: the arrays of
    Hugging Face are lists, and so are tensors, whose shape is restored.
    """
    kind, arrow = column.type, needed("pyarrow", "ray", "Reading Parquet files")
    if arrow.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if isinstance(kind, arrow.BaseExtensionType):
        storage = plain(column.storage)
        if isinstance(kind, arrow.FixedShapeTensorType):
            order = kind.permutation or range(len(kind.shape))
            if [*order] != [*range(len(kind.shape))]:
                raise ValueError(f"a tensor column with permuted dimensions {order}")
            return _in_lists(storage, [*kind.shape][1:])
        return storage
    if not hasattr(kind, "value_field") or not hasattr(kind, "value_type"):
        return column
    values = plain(column.values)
    if hasattr(kind, "list_size"):
        values = _of_its_lists(column, values)
        return type(column).from_arrays(values, kind.list_size, **_nulls(column))
    return type(column).from_arrays(column.offsets, values, **_nulls(column))


def _of_its_lists(column: Column, values: Column) -> Column:
    """Slice the values of lists of one size as their column is a slice of another."""
    size = column.type.list_size
    first = column.offset * size
    return values[first : first + len(column) * size]


def _nulls(column: Column) -> dict[str, Any]:
    return {"mask": column.is_null()} if column.null_count else {}


def _in_lists(column: Column, sizes: list[int]) -> Column:
    """Split the lists of a column into lists of lists, of these sizes."""
    if not sizes:
        return column
    arrow = needed("pyarrow", "ray", "Reading Parquet files")
    inner = _of_its_lists(column, column.values)
    for extent in reversed(sizes):
        inner = arrow.FixedSizeListArray.from_arrays(inner, extent)
    outer = column.type.list_size // math.prod(sizes)
    return arrow.FixedSizeListArray.from_arrays(inner, outer, **_nulls(column))


def to_numpy(column: Column) -> np.ndarray:
    """Convert a column of an Arrow table to one array, of objects if rows differ."""
    whole = column.combine_chunks()
    whole = whole.chunk(0) if hasattr(whole, "chunk") and whole.num_chunks else whole
    values = cells(plain(whole))
    return values if isinstance(values, np.ndarray) else np.array(values, object)


def cells(column: Column) -> np.ndarray | list[np.ndarray]:
    """Convert a plain column of an Arrow table to numpy: one value for each row.

    The values are an array `[rows, ...]`; or a list with one array for each row, if
    lists differ in length or the column has nulls.
    """
    part = column
    while hasattr(part.type, "value_type"):
        # Ragged lists have no shape: each is an array of its own.
        # `flatten` leaves null lists out: values after them would move up by a row.
        if part.null_count or _is_ragged(part):
            return _one_by_one(column)
        part = part.flatten()
    return _one_by_one(column) if part.null_count else _array(column)


def _is_ragged(lists: Column) -> bool:
    if hasattr(lists.type, "list_size"):  # their type says it
        return False
    return len(lists.value_lengths().unique()) > 1


def _one_by_one(column: Column) -> list[np.ndarray]:
    """Convert a column of an Arrow table to a list: one numpy array for each row.

    A value with nulls, and one whose lists differ in length, is an array of dtype
    object, which fits no plan.
    """
    arrow_type = column.type
    while hasattr(arrow_type, "value_type"):
        arrow_type = arrow_type.value_type
    # Slow, but only where lists differ in length or have nulls.
    return [_row_to_numpy(value, arrow_type) for value in column.to_pylist()]


def _row_to_numpy(value: object, arrow_type: DataType) -> np.ndarray:
    """Convert one row's value of an Arrow column, as of `to_pylist`, to numpy.

    If the value is None, has a None, or has lists that differ in length, the array has
    dtype object, which fits no plan, so that this group alone fails. `arrow_type` is
    that of the innermost values.
    """
    try:
        x = np.asarray(value)
    except ValueError:
        # Its lists differ in length. This group alone must fail: an error would be
        # that of all rows of the row group.
        return np.array(None, object)
    # Python numbers have no width: numpy reads them as int64 and float64.
    return x if x.dtype == object else x.astype(arrow_type.to_pandas_dtype())


def _array(column: Column) -> np.ndarray:
    """Convert a column of an Arrow table to one numpy array `[rows, ...]`.

    It creates no Python object for each number. The column is plain, without nulls, and
    all lists of one depth have the same length.
    """
    rows = count = len(column)
    shape = []
    while hasattr(column.type, "value_type"):  # lists, of one length
        column = column.flatten()
        shape.append(len(column) // max(1, count))
        count = len(column)
    # Arrow stores bools as bits, which numpy cannot view without a copy.
    flat = column.to_numpy(zero_copy_only=False)
    # Not from the length of `flat`: of empty lists it is 0, however many there are.
    return flat.reshape(rows, *shape)
