"""The devices an example runs on: several virtual ones on a plain CPU."""

import contextlib
import math

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(devices: int, *axes: str) -> Mesh:
    """Makes a mesh with one or two axes; call it before anything else uses a device.

    On a CPU the devices are virtual: they share its cores, and what they send each
    other is what real devices would send. Elsewhere they are the real ones, as many
    of them as there are. A process that used a device before keeps those it has. The
    first of two axes has two devices, if their number is even.
    """
    with contextlib.suppress(RuntimeError):  # a process that has its devices already
        jax.config.update("jax_num_cpu_devices", devices)
    use = jax.devices()[:devices]
    outer = (2 - len(use) % 2,) * (len(axes) - 1)
    shape = *outer, len(use) // math.prod(outer)
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(shape, axes, axis_types=types, devices=use)
