"""Equations of every primitive with a rule of unbatching, and their operands."""

import itertools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

N = 3
A = np.random.RandomState(0).uniform(0.1, 0.9, (N, 2, N)).astype(np.float32)
B = np.random.RandomState(1).uniform(1.1, 1.9, (N, 2, N)).astype(np.float32)
I = (np.arange(A.size).reshape(A.shape) % 7).astype(np.int32)
ONES = np.ones(A.shape, np.float32)
BOOLS = I % 2 == 0
COMPLEX = (A + 1j * B).astype(np.complex64)
KEYS = lambda: jax.random.split(jax.random.key(0), A.shape)
INDEX = np.array([[1], [0], [1]], np.int32)  # [indices, 1]
SQUARES = np.einsum("nij,nkj->nik", B, B) + np.eye(2, dtype=np.float32)
# An index into the first dimension, which each window covers, and one into the second.
WINDOWS = lax.GatherDimensionNumbers((1, 2), (1,), (0, 1))
WINDOW = lax.ScatterDimensionNumbers((0, 1), (1,), (0, 1))
# Primitives that not every supported JAX has.
NEWER = {
    "log2": (jnp.log2, (A,)),
    "one_minus_square": (jax.grad(lambda x: jnp.tanh(x).sum()), (A,)),
    "polynomial": (lambda *xs: lax.polynomial_p.bind(*xs), (A, B, A)),
}


def _lax(names: str, *args):
    return {name: [(getattr(lax, name), args)] for name in names.split()}


def _bound(primitive, *args, **params):
    return [(lambda *xs: primitive.bind(*xs, **params), args)]


def _each(fn):
    return jax.vmap(jax.vmap(jax.vmap(fn)))


def _over(name, dims, *rest, data=A):
    return lambda x: getattr(lax, name)(x, dims, *rest), (data,)


CASES: dict[str, list] = {
    **_lax(
        """abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh
        digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p
        logistic neg round rsqrt sign sin sinh sqrt square tan tanh""",
        A,
    ),
    **_lax("acosh", B),
    **_lax("add atan2 div eq ge gt le lt max min mul ne nextafter pow rem sub", A, B),
    **_lax("igamma igammac complex", A, B),
    **_lax("zeta", B, A),
    "polygamma": [(lax.polygamma, (ONES, B))],
    "regularized_incomplete_beta": [(lax.betainc, (A, B, A))],
    **_lax("conj imag real", COMPLEX),
    "and": [(lax.bitwise_and, (I, I[::-1]))],
    "or": [(lax.bitwise_or, (I, I[::-1]))],
    "xor": [(lax.bitwise_xor, (I, I[::-1]))],
    "not": [(lax.bitwise_not, (I,))],
    **_lax("clz population_count", I),
    **_lax("shift_left shift_right_arithmetic shift_right_logical", I, I[::-1]),
    "clamp": [(lax.clamp, (A / 2, A, B)), (lambda x: lax.clamp(0.2, x, 0.5), (A,))],
    "convert_element_type": [(lambda x: lax.convert_element_type(x, np.int32), (B,))],
    "copy": [(jnp.copy, (A,))],
    "copy_p": [(jnp.copy, (A,))],
    "add_any": _bound(ad.add_jaxvals_p, A, B),
    "integer_pow": [(lambda x: lax.integer_pow(x, 3), (A,))],
    "mulhi": [(lax.mulhi, (I, I[::-1]))],
    "igamma_grad_a": [(lax.igamma_grad_a, (A, B))],
    **{
        name: [case]
        for name, case in NEWER.items()
        if hasattr(lax, f"{name}_p")
    },
    "name": [(lambda x: checkpoint_name(x, "a"), (A,))],
    "random_clone": [(jax.random.clone, (KEYS,))],
    "random_fold_in": [(_each(jax.random.fold_in), (KEYS, I))],
    # Groups along an axis that the keys lack would draw from equal keys.
    "random_gamma": [
        (_each(jax.random.gamma), (KEYS, A)),
        (jax.vmap(jax.random.gamma), (lambda: KEYS()[:, 0, 0], A)),
        (jax.random.gamma, (lambda: KEYS()[0, 0, 0], A)),
    ],
    "random_seed": [(_each(jax.random.key), (I,))],
    "random_split": [(_each(jax.random.split), (KEYS,))],
    "bitcast_convert_type": [
        (lambda x, t=t: lax.bitcast_convert_type(x, t), (data,))
        for data, t in ((A, np.int32), (A, np.uint8),
                        (I[..., None].view(np.uint8), np.float32))
    ],
    "random_bits": [(lambda k: jax.vmap(jax.vmap(jax.vmap(jax.random.bits)))(k),
                     (KEYS,))],
    "reduce_precision": [(lambda x: lax.reduce_precision(x, 5, 5), (A,))],
    "select_n": [
        (lax.select_n, (BOOLS, A, B)),
        (lambda x, y: lax.select_n(jnp.bool_(True) & (x[0, 0, 0] > 0), x, y), (A, B)),
    ],
    "broadcast_in_dim": [
        (lambda x: lax.broadcast_in_dim(x, (5, N, 2, 4, N), (1, 2, 4)), (A,)),
    ],
    "reshape": [
        (lambda x: x.reshape(N, 2 * N), (A,)),
        (lambda x: x.reshape(2 * N, N), (A,)),
        (lambda x: x.reshape(N, 1, 2, N, 1), (A,)),
        (lambda x: x.reshape(-1), (A,)),
    ],
    "squeeze": [(lambda x: lax.squeeze(x, (0, 3)), (A[None, :, :, None],))],
    "transpose": [
        (lambda x, p=p: lax.transpose(x, p), (A,))
        for p in itertools.permutations(range(3))
        if p != (0, 1, 2)
    ],
    "rev": [(lambda x, d=d: lax.rev(x, d), (A,)) for d in ((0,), (1, 2), (2, 0))],
    "slice": [
        (lambda x: x[:, 1:], (A,)),
        (lambda x: x[1:, :, ::2], (A,)),
        (lambda x: lax.slice(x, (0, 0, 0), (N, 1, N)), (A,)),
    ],
    "tile": [(lambda x, r=r: jnp.tile(x, r), (A,)) for r in ((1, 2, 3), (2, 1, 1))],
    "conv_general_dilated": [
        (lambda x, k: lax.conv(x, k, (1,), "SAME"), (A, B[:, :, :2])),
        (lambda x, k: lax.conv_general_dilated(
            x, k, (2,), "VALID", feature_group_count=2), (A, B[:2, :1, :2])),
        (lambda x, k: lax.conv_general_dilated(
            x, k, (1,), "SAME", dimension_numbers=("HCN", "HIO", "HNC")),
         (A, B[:, :, :2])),
        (lambda x, k: lax.conv_general_dilated(
            x, k, (1,), "SAME", batch_group_count=N), (A, B)),
    ],
    "fft": [
        (jnp.fft.fft, (A,)), (jnp.fft.rfft, (A,)), (jnp.fft.irfft, (COMPLEX,)),
        (jnp.fft.fft2, (A,)), (lambda x: jnp.fft.fft(x, axis=0), (A,)),
    ],
    **{
        f"reduce_window_{name}": [
            (lambda x, w=w, i=i, f=f: lax.reduce_window(x, i, f, w, (1, 1, 1), "SAME"),
             (A,))
            for w in ((1, 2, 2), (2, 1, 1), (1, 1, 2))
        ]
        for name, i, f in (("sum", 0.0, lax.add), ("max", -np.inf, lax.max),
                           ("min", np.inf, lax.min))
    },
    **{
        name: [
            (transform(lambda x, w=w: lax.reduce_window(
                x, -np.inf, lax.max, w, (1, 1, 1), "SAME")), (A,))
            for w in ((1, 2, 2), (2, 1, 1))
        ]
        for name, transform in (
            ("select_and_scatter_add", lambda f: jax.grad(lambda x: (f(x) * B).sum())),
            ("select_and_gather_add", lambda f: lambda x: jax.jvp(f, (x,), (x,))),
        )
    },
    "cholesky": [(lax.linalg.cholesky, (SQUARES,))],
    "eigh": [(lax.linalg.eigh, (SQUARES,))],
    "lu": [(lax.linalg.lu, (SQUARES,))],
    "svd": [(lax.linalg.svd, (SQUARES,))],
    "qr": [(lax.linalg.qr, (SQUARES,))],
    "eig": [(lax.linalg.eig, (SQUARES,))],
    "hessenberg": [(lax.linalg.hessenberg, (SQUARES,))],
    "schur": [(lax.linalg.schur, (SQUARES,))],
    "tridiagonal": [(lax.linalg.tridiagonal, (SQUARES,))],
    "householder_product": [(lax.linalg.householder_product, (SQUARES, A[..., 0]))],
    "lu_pivots_to_permutation": [
        (lambda i: lax.linalg.lu_pivots_to_permutation(i, N), (I[..., 0] % N,))
    ],
    "tridiagonal_solve": [
        (lax.linalg.tridiagonal_solve,
         (A[..., 0], A[..., 1] + 9, A[..., 2], SQUARES))
    ],
    "triangular_solve": [(lax.linalg.triangular_solve, (SQUARES, SQUARES))],
    "random_unwrap": [(jax.random.key_data, (KEYS,))],
    "random_wrap": [(jax.random.wrap_key_data, (np.ones((N, 3, 2), np.uint32),))],
    "rearrange": [(lambda x, d=d: jnp.roll(x, 1, axis=d), (A,)) for d in range(3)],
    "split": [(lambda x, d=d: lax.split(x, (1, x.shape[d] - 1), d), (A,))
              for d in range(3)],
    "top_k": [(lambda x: lax.top_k(x, 2), (A,))],
    "unstack": [(lambda x, d=d: jnp.unstack(x, axis=d), (A,)) for d in range(3)],
    "stack": [(lambda x, y, d=d: jnp.stack([x, y], d), (A, B)) for d in range(4)],
    "sort": [
        (lambda x, y, d=d: lax.sort((x, y), dimension=d), (A, B)) for d in range(3)
    ],
    "dynamic_slice": [
        (lambda x, i: lax.dynamic_slice(x, (1, i, 2), (N, 1, N)), (A, np.int32(1))),
        (lambda x, i: lax.dynamic_slice(x, (i, i, i), (2, 2, 1)), (A, np.int32(1))),
    ],
    "dynamic_update_slice": [
        (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i, i)),
         (A, B[:, :1], np.int32(1))),
        (lambda x, y, i: lax.dynamic_update_slice(x, y, (i, i, i)),
         (A, B[:2, :, :1], np.int32(1))),
    ],
    "gather": [
        (lambda x, i: x[:, i[:, 0]], (A, INDEX)),
        (lambda x, i: x[i[:, 0]], (A, INDEX)),
        (lambda x, i: x[..., i[:, 0]], (A, INDEX)),
        (lambda x, i: x[:, i[:, 0], i[:, 0]], (A, INDEX)),
        (lambda x, i: x[np.arange(N), i[:, 0]], (A, INDEX)),
        (lambda x, i: x[np.arange(N), :, i[:, 0]], (A, INDEX)),
        (lambda x, i: x[np.arange(N), i[:, 0], i[:, 0]], (A, INDEX)),
        (lambda x, i: jnp.take_along_axis(x, i, axis=1), (A, I % 2)),
        (lambda x, i: jnp.take_along_axis(x, i, axis=0), (A, I % 2)),
        (lambda x, i: jax.vmap(lambda r, j: r[:, j])(x, i), (A, INDEX)),
        (lambda x, i: jax.vmap(lambda r, j: r[j], (2, 0), 1)(x, i), (A, INDEX)),
        (lambda x, i: jax.vmap(
            lambda j: lax.dynamic_slice(x, (j, j, 0), (N, 1, 2)))(i[:2, 0]),
         (A, INDEX)),
        *((lambda x, i, mode=mode: lax.gather(
            x, jnp.tile(i, 2), WINDOWS, (N, 1, 2), mode=mode), (A, INDEX))
          for mode in ("fill", "clip")),
    ],
    **{
        f"scatter{suffix}": [
            (lambda x, i, y, m=m: getattr(x.at[:, i[:, 0]], m)(y[:, [0, 1, 0]]),
             (A, INDEX, B)),
            (lambda x, i, y, m=m: getattr(x.at[i[:2, 0]], m)(y[:2]), (A, INDEX, B)),
            (lambda x, i, y, m=m: getattr(x.at[:, i[0, 0]], m)(y[:, 0]), (A, INDEX, B)),
            (lambda x, i, y, m=m: getattr(x.at[np.arange(N), i[:, 0]], m)(y[:, 0]),
             (A, INDEX, B)),
            (lambda x, i, y, m=m: jax.vmap(
                lambda r, j, s: getattr(r.at[j], m, )(s[:1]))(x, i, y), (A, INDEX, B)),
            (lambda x, i, y, m=m: jax.vmap(
                lambda r, j, s: getattr(r.at[j], m)(s[:1]), (2, 0, 0), 1)(
                    x, i, y.transpose(2, 0, 1)), (A, INDEX, B)),
            *((lambda x, i, y, m=m, mode=mode: getattr(lax, f"scatter_{m}".replace(
                "_set", "").replace("multiply", "mul").replace("subtract", "sub"))(
                    x, jnp.tile(i[0], 2), y[:, 0], WINDOW, mode=mode), (A, INDEX, B))
              for mode in ("fill", "clip")),
        ]
        for suffix, m in {"": "set", "-add": "add", "-sub": "subtract",
                          "-mul": "multiply", "-min": "min", "-max": "max"}.items()
    },
    "pad": [
        (lambda x: lax.pad(x, np.float32(7), ((0, 0, 0), (1, 2, 1), (0, 0, 0))), (A,)),
        (lambda x: lax.pad(x, np.float32(7), ((0, 1, 0), (0, 0, 0), (0, 0, 1))), (A,)),
    ],
    "concatenate": [
        (lambda x, y, d=d: lax.concatenate([x, y], d), (A, B)) for d in range(3)
    ],
    "dot_general": [
        (lambda x, y: jnp.einsum("aib,aib->aib", x, y), (A, B)),
        (lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))), (A, B)),
        (lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((0, 2), (2, 0)))), (A, B)),
        (lambda x, y: lax.dot_general(x, y, (((0, 2), (2, 0)), ((), ()))), (A, B)),
        (lambda x, y: lax.dot_general(x, y, (((2,), (0,)), ((), ()))), (A, B)),
        (lambda x, y: lax.dot_general(x, y, (((2,), (0,)), ((1,), (1,)))), (A, B)),
    ],
    **{
        name: [_over(name, d) for d in range(3)]
        for name in "cumsum cumprod cummax cummin cumlogsumexp".split()
    },
    **{
        name: [_over(name, d, np.int32) for d in range(3)]
        for name in ("argmax", "argmin")
    },
    **{
        f"reduce_{name}": [
            _over(f"reduce_{name}", d, data=data) for d in ((0,), (1,), (0, 2), (1, 2))
        ]
        for name, data in [
            *((name, A) for name in ("max", "min", "prod", "sum")),
            ("xor", I), ("and", BOOLS), ("or", BOOLS),
        ]
    },
}  # fmt: skip
# Primitives that this JAX does not have or makes only while it lowers.
INTERNAL = {
    "fence",
    "eq_to",
    "le_to",
    "lt_to",
    "stop_gradient",
    "copy_p",
    "stack",
    "unstack",
}
INTERNAL |= set(NEWER) - set(CASES)
