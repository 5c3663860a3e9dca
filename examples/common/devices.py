"""The devices an example runs on: several virtual ones on a plain CPU."""

import jax
from jax.sharding import AxisType, Mesh


def make_mesh(devices: int, axis: str) -> Mesh:
    """Makes a mesh with one axis; call it before anything else uses a device.

    On a CPU the devices are virtual: they share its cores, and what they send each
    other is what real devices would send. Elsewhere they are the real ones, as many
    of them as there are.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    result = min(devices, jax.device_count())
    return jax.make_mesh((result,), (axis,), axis_types=(AxisType.Auto,))
