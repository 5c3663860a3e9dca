"""What observers of calls are told: the option `observers` of engines."""

from drjax.engines.core.events import BlockDone as BlockDone
from drjax.engines.core.events import CallEnded as CallEnded
from drjax.engines.core.events import CallStarted as CallStarted
from drjax.engines.core.events import Event as Event
from drjax.engines.core.events import GroupFailed as GroupFailed
from drjax.engines.core.events import Retried as Retried
from drjax.engines.core.events import StageEnded as StageEnded
from drjax.engines.core.events import StageStarted as StageStarted
from drjax.engines.core.events import WorkersChanged as WorkersChanged
