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
    """A building block called where no partition, or the wrong one, is in force."""


class MeshError(DrjaxError, ValueError):
    """A mesh over which the partition cannot be sharded as requested."""


class PlanError(DrjaxError, ValueError):
    """A program, or a use of one, that has no plan."""


class PlanFileError(PlanError):
    """A plan that cannot be saved, or a file that holds no plan that can be loaded."""


class EngineError(DrjaxError, RuntimeError):
    """A plan that did not come to its end on an engine.

    Attributes:
      round: The round: `2`, or in the first body of a loop `2.scan.0.1`.
      stage: The name of the groups' stage.
      group: The index of the group that failed; None if it was not one group.
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
