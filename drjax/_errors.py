"""The exceptions that drjax raises, one family.

Every message has the same order: what was called, what it needs, what it got, and
how to fix it. Each class also derives from the built-in exception that fits, so
`except ValueError` and `except TypeError` work as in the rest of JAX.
"""


class DrjaxError(Exception):
    """Base of all errors raised by drjax."""


class DrjaxTypeError(DrjaxError, TypeError):
    """A value of the wrong type or kind: a leaf that is not an array, a generator."""


class DrjaxValueError(DrjaxError, ValueError):
    """A value that does not fit: a wrong leading axis, a partition of no groups."""


class ScopeError(DrjaxError, RuntimeError):
    """A building block without a partition in scope, or over one already mapped."""


class MeshError(DrjaxError, ValueError):
    """A mesh over which the partition cannot be sharded as requested."""


class PlanError(DrjaxError, ValueError):
    """A program that has no plan, or a plan that cannot be used as requested."""


class PlanFileError(PlanError):
    """A plan that cannot be saved, or a file that holds no plan that can be loaded."""


class EngineError(DrjaxError, RuntimeError):
    """A plan that an engine could not run to its end, or could not start.

    Args:
      message: The text of the error.
      round: The round that failed, by its number from 1, as text: `2`, or `2.scan.0.1`
        for round 1 in the first body of the loop `scan` of round 2. None if no round
        did.
      stage: The name of the local stage that failed; None if no stage did.
      group: The index of the group that failed; None if it was not one group.

    Attributes:
      round, stage, group: As given to the constructor.
    """

    def __init__(
        self,
        message: str,
        round: str | None = None,
        stage: str | None = None,
        group: int | None = None,
    ):
        super().__init__(message)
        self.round, self.stage, self.group = round, stage, group


class CanceledError(EngineError):
    """A call of an engine that was ended by `Runner.cancel`."""
