"""The text of a round: windows of each group's own."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.common.text import Windows, load_articles, load_stdlib, sample_round
from experiments.config import Config, Round


def shapes(config: Round) -> Any:
    """Shapes and dtypes of a round's windows."""
    leading = (config.groups, config.steps, config.batch)
    of: Any = jax.ShapeDtypeStruct
    return Windows(of((*leading, config.length + 1), jnp.int32), of(leading, jnp.int32))


def rounds(config: Config) -> Iterator[Windows]:
    """The windows of each executed round.

    Raises:
      ValueError: There are fewer texts than groups, or the model has fewer tokens than
        a byte has values.
    """
    library = config.text == "standard library"
    texts = (load_stdlib() if library else load_articles(config.text)).train
    r = config.round
    if len(texts) < r.groups:
        raise ValueError(f"{r.groups} groups need more than {len(texts)} texts.")
    if config.model.vocab < 256:
        raise ValueError(f"Text is bytes: a vocabulary of {config.model.vocab} is few.")
    for number in range(config.execute):
        _, drawn = sample_round(
            texts, (0, number), r.groups, r.steps, r.batch, r.length
        )
        yield Windows(drawn.tokens.astype(np.int32), drawn.lengths)
