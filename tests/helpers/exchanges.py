"""The collectives of moves that a small program on CPU would not get.

A ragged all-to-all, which XLA has for TPUs only, is computed from an all-gather; and a
known move is an all-to-all, however few its slices are.
"""

import contextlib
from unittest import mock

import jax.numpy as jnp
from jax import lax

from drjax._plan import schedule_moves
from drjax._primitives import moves


def _ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What `lax.ragged_all_to_all` means."""
    every = (operand, input_offsets, send_sizes, output_offsets)
    slices, starts, sizes, targets = (lax.all_gather(x, axis_name) for x in every)
    own, place = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for sender in range(slices.shape[0]):
        first, size = targets[sender, own], sizes[sender, own]
        received = (place >= first) & (place < first + size)
        source = (place - first + starts[sender, own]).clip(0, operand.shape[0] - 1)
        received = lax.broadcast_in_dim(received, output.shape, (0,))
        output = jnp.where(received, slices[sender][source], output)
    return output


@contextlib.contextmanager
def exchanges_of_large_programs(on: bool = True):
    """Trace and lower programs inside, of which no other has the same functions."""
    if not on:
        yield
        return
    schedule_moves.schedule.cache_clear()
    with (
        mock.patch.object(lax, "ragged_all_to_all", _ragged_all_to_all),
        mock.patch.object(moves, "_RAGGED_PLATFORMS", ("cpu",)),
        mock.patch.object(moves, "_RAGGED_UNIT", 1),
        mock.patch.object(schedule_moves, "_MESSAGES_OF_ALL_TO_ALL", 0),
    ):
        yield
    schedule_moves.schedule.cache_clear()
