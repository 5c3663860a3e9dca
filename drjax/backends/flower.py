"""The Flower backend: the public names of `drjax.engines.flower`."""

from drjax.engines.flower.adapter import Clients as Clients
from drjax.engines.flower.adapter import client as client
from drjax.engines.flower.adapter import compile as compile
from drjax.engines.flower.code_of_stages import stage_hashes as stage_hashes
