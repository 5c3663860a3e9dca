"""How much arithmetic equations do, roughly, to compare it with reading saved results.

Input: equations of a jaxpr. Output: numbers of simple operations on an element, such as
an addition.

A saved slice is written once and read again, which costs time, too: about as much as
`PER_BYTE` operations for each of its bytes, on CPUs and accelerators. What takes fewer
is cheap: to rematerialize it is no slower than to read it, and saves the memory.

Sharp edges: these are estimates. An equation that is not known here counts one
operation for each element of its results.
"""

import math
from collections.abc import Callable, Iterable

from drjax import _compat
from drjax._compat.types import Aval, ClosedJaxpr, Eqn, OpenJaxpr, Var
from drjax._jaxprs.walk import variables
from drjax.primitives import map_fn_p

PER_BYTE = 4

# Primitives that cost more than the memory of their result, even of small arrays.
COSTLY = frozenset(
    """cholesky conv_general_dilated dot_general eigh fft lu random_gamma
    reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
    select_and_scatter_add sort svd top_k triangular_solve""".split()
)

# Operations for each element of the results, where one is far from the truth.
_FOR_EACH_ELEMENT = {
    **dict.fromkeys(
        """acos acosh asin asinh atan atan2 atanh cbrt cos cosh exp exp2 expm1 log log1p
        logistic pow rsqrt sin sinh sqrt tan tanh""".split(),
        8,
    ),
    **dict.fromkeys("erf erf_inv erfc".split(), 16),
    **dict.fromkeys("random_bits random_fold_in random_split threefry2x32".split(), 64),
    **dict.fromkeys("rng_bit_generator draw_per_key".split(), 64),
    **dict.fromkeys(
        """bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma
        random_gamma random_gamma_grad regularized_incomplete_beta zeta""".split(),
        256,
    ),
    # They move or make elements, as reading does.
    **dict.fromkeys(
        "broadcast broadcast_in_dim iota partition_index reshape scatter".split(), 0
    ),
}
# Of these the arithmetic for each element of the largest array grows with its size.
_DECOMPOSITIONS = frozenset(
    "cholesky eig eigh lu qr schur svd triangular_solve".split()
)
_SORTS = frozenset("approx_top_k fft sort top_k".split())
_WINDOWS = frozenset(
    """reduce_window reduce_window_max reduce_window_min reduce_window_sum
    select_and_gather_add select_and_scatter select_and_scatter_add""".split()
)


def operations(eqn: Eqn) -> float:
    """Estimate the operations of an equation, on all groups if it is a `map_fn`."""
    name, params = eqn.primitive.name, eqn.params
    results = sum(map(_size, (v.aval for v in eqn.outvars)))
    largest = max(map(_size, (v.aval for v in eqn.invars)), default=0.0)
    if jaxprs := _compat.jaxprs_in(params):
        inner = [*map(_operations_of, jaxprs)]
        if name == "cond":
            return max(inner)
        groups = params["partition"].size if eqn.primitive is map_fn_p else 1
        return sum(inner) * groups * params.get("length", 1)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2 * results * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        features = params["dimension_numbers"].rhs_spec[0]
        kernel = eqn.invars[1].aval
        return 2 * results * _size(kernel) / max(1, kernel.shape[features])
    if name in _WINDOWS:
        window = params.get("window_dimensions", ())
        return max(results, largest) * math.prod(window)
    if name in _DECOMPOSITIONS:
        return largest * math.sqrt(largest)
    if name in _SORTS:
        return 8 * largest * math.log2(max(2, largest))
    each = _FOR_EACH_ELEMENT.get(name, 1)
    # A reduction reads more than it gives.
    return each * (max(results, largest) if name.startswith("reduce") else results)


@_compat.weakref_lru_cache(trace_context_in_key=False)
def _operations_of(jaxpr: ClosedJaxpr | OpenJaxpr) -> float:
    # Cached, as rounds one after another have the same loops.
    return sum(map(operations, _compat.open_jaxpr(jaxpr).eqns))


def bytes_of(variables: Iterable[Var]) -> float:
    """Add up the bytes of variables, with the slices of all groups."""
    return sum(_size(v.aval) * v.aval.dtype.itemsize for v in variables)


def is_cheap(
    var: Var,
    definition: Callable[[Var], Eqn | None],
    spare: float = 0,
    limit: int = 64,
) -> bool:
    """Whether to rematerialize a variable costs no more than to read it.

    `definition` returns the equation that computes a variable, None if that is not to
    be rematerialized. Of `spare` operations, which are few for the program, it may take
    all. A chain of more than `limit` equations is not cheap.
    """
    budget, seen, stack = max(PER_BYTE * bytes_of([var]), spare), set[int](), [var]
    while stack:
        eqn = definition(stack.pop())
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        budget -= operations(eqn)
        if budget < 0 or len(seen) > limit or _is_costly(eqn):
            return False
        stack += variables(eqn.invars)
    return True


def _is_costly(eqn: Eqn) -> bool:
    """Whether an equation, or one inside of it, costs more than its memory."""
    jaxprs = map(_compat.open_jaxpr, _compat.jaxprs_in(eqn.params))
    return eqn.primitive.name in COSTLY or any(
        _is_costly(inner) for jaxpr in jaxprs for inner in jaxpr.eqns
    )


def _size(aval: Aval) -> float:
    """Count the elements of an array; one for each symbolic dimension."""
    return math.prod(d if isinstance(d, int) else 1 for d in getattr(aval, "shape", ()))
