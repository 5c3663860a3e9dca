"""DiLoCo as a layer: any train step becomes local SGD, DiLoCo or Streaming DiLoCo."""

from drjax.contrib.diloco.checkpoint import Checkpoints as Checkpoints
from drjax.contrib.diloco.fragments import Fragments as Fragments
from drjax.contrib.diloco.fragments import fragments as fragments
from drjax.contrib.diloco.round import Round as Round
from drjax.contrib.diloco.train_state import State as State
