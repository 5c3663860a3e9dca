"""Layers for trainers, exports to other systems. They may change between versions."""

from drjax.contrib import diloco as diloco
from drjax.contrib.federated_language import (
    export_federated_language as export_federated_language,
)
