"""The primitives that act on each element alone.

Input: the name of a primitive. Output: whether it is in `ELEMENTWISE`.
Invariants: which element a result depends on needs no parameter of the equation.
"""

# Primitives whose operands and results have the same shape, up to scalars. A pointwise
# primitive of a new JAX only needs its name here. `rematerialize_loops` takes all of
# them to be cheap.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma
    div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to
    max min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial
    population_count pow random_bits random_clone random_fold_in random_seed
    random_split real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor zeta""".split()
)
