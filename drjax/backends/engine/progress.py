"""`Report` and `StageReport`, what a `Runner` says of its calls."""

from drjax.engines.core.progress import Report as Report
from drjax.engines.core.progress import StageReport as StageReport
