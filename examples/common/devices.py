"""The devices an example runs on: several virtual ones on a plain CPU."""

import contextlib

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(devices: int, axis: str) -> Mesh:
    """Makes a mesh with one axis; call it before anything else uses a device.

    On a CPU the devices are virtual: they share its cores, and what they send each
    other is what real devices would send. Elsewhere they are the real ones, as many
    of them as there are. A process that used a device before keeps those it has.
    """
    with contextlib.suppress(RuntimeError):  # a process that has its devices already
        jax.config.update("jax_num_cpu_devices", devices)
    use = jax.devices()[:devices]
    return jax.make_mesh((len(use),), (axis,), axis_types=(AxisType.Auto,), devices=use)
