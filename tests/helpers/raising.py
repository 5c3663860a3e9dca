"""How the tests of errors call what must fail."""

import re

import jax
import numpy as np
import pytest

import drjax

three = drjax.program(clients=3)
eight = drjax.program(clients=8)
X3, X8 = np.arange(3.0, dtype=np.float32), np.arange(8.0, dtype=np.float32)
KEYS3 = lambda: jax.random.split(jax.random.key(0), 3)


def raises(error, text, fn, *args, **kwargs):
    """`fn(*args, **kwargs)` raises `error` with `text` in its message."""
    with pytest.raises(error, match=re.escape(text)) as caught:
        fn(*args, **kwargs)
    assert isinstance(caught.value, drjax.DrjaxError)
    return str(caught.value)
