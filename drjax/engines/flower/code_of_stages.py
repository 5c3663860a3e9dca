"""The code of local stages, sent to each client once, and identified by its hash.

Input: a plan file, at the server; the fields of a request, at a client. Output: for
each local stage a plan file of its own, and the fields of a request that name or hold
it; at the client the code, or None: it asks for it.

Invariants: a client gets no server stage. Code is stored and run only if it has the
hash that names it. Sharp edges: the server assumes that a client has what it was sent;
one that was started again asks for it.
"""

import hashlib
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import jax

from drjax._errors import DrjaxTypeError
from drjax._plan.normal_form import rounds_of
from drjax._plan_file.group_stages import file_of_stage
from drjax._plan_file.load import plan_from_bytes
from drjax.engines.core.executable_plan import ExecutablePlan
from drjax.engines.core.messages import File
from drjax.engines.flower import untrusted_replies
from drjax.engines.flower.records import FIELDS
from drjax.engines.flower.untrusted_replies import BadReply, Message
from drjax.plan import Plan

_KEY, _KEYS, _CODE, _NEEDS = "stage", "stages", "code", "needs"


def files_of_stages(file: File) -> list[File]:
    """Return the file of each local stage, in the order of `rounds_of`.

    That of a stage without outputs, which never runs, is empty.
    """
    with jax.enable_x64(file.x64):
        # Clients allow no custom calls, so that a plan with them is refused here.
        plan = plan_from_bytes(Path(f"{file.key[:12]}.drjax"), file.data)
        files = [
            b"" if a_round.local.empty else file_of_stage(owner, a_round)
            for owner, a_round in rounds_of(plan)
        ]
    return [File(data, hashlib.sha256(data).hexdigest(), file.x64) for data in files]


def stage_hashes(plan: Plan) -> list[str]:
    """The hashes of the code that clients get of a plan, one for each local stage.

    Args:
      plan: The plan: as `load_plan` returned it, to have the hashes of the server that
        runs this file; other versions of JAX export other code.

    Returns:
      A list of hexadecimal SHA-256 hashes, in the order of the rounds, without
      repetitions: what `drjax.backends.flower.client` takes as `stages`.

    Raises:
      DrjaxTypeError: `plan` is no plan.
      PlanFileError: A stage cannot be exported, or makes custom calls.

    Example:
      >>> import drjax, jax.numpy as jnp
      >>> mean = drjax.program(clients=4)(drjax.reduce_mean)
      >>> plan = drjax.make_plan(mean)(jnp.arange(4.0))
      >>> len(drjax.backends.flower.stage_hashes(plan))
      1
    """
    if not isinstance(plan, Plan):
        raise DrjaxTypeError(
            f"stage_hashes needs a drjax.plan.Plan, got {type(plan).__name__}. Give it "
            "what drjax.load_plan returns."
        )
    files = files_of_stages(ExecutablePlan(plan).file)
    return [*dict.fromkeys(file.key for file in files if file.data)]


class SentCode:
    """The server's record of which client was sent which code."""

    def __init__(self, files: list[File]):
        self.files, self._sent = files, set()
        self._keys = [*dict.fromkeys(file.key for file in files)]

    def fields(self, node: int, stage: int, again: bool = False) -> dict[str, Any]:
        """Return the fields of a request to a node that name the code of a stage.

        They have the code, too, if the node was not sent it, or asks for it `again`.
        """
        file = self.files[stage]
        fields = {_KEY: file.key, _KEYS: self._keys}
        if again or (node, file.key) not in self._sent:
            self._sent.add((node, file.key))
            fields[_CODE] = file.data
        return fields


def asks(reply: Message) -> bool:
    """Return whether a reply, of any content, asks for the code of its request."""
    try:
        return not reply.has_error() and (
            untrusted_replies.content_of(reply, FIELDS, _NEEDS) is True
        )
    except BadReply:
        return False


NEEDED = {_NEEDS: True}  # the fields of a reply that asks for code


def received(
    fields: Mapping[str, Any],
    store: MutableMapping[str, Any],
    allowed: Collection[str] | None,
) -> tuple[str, bytes] | None:
    """Return a stage's hash and code, at a client; None if it must ask for the code.

    `fields` are those of the request. `store` has the code that the client was sent, by
    hash: new code is added, and that of other plans deleted. `allowed` are the hashes
    that its owner allows; None: all. A `ValueError` is raised for another stage, and
    for code that does not have the hash that names it.
    """
    key = fields[_KEY]
    if allowed is not None and key not in allowed:
        raise ValueError(
            f"the owner of this client does not allow the stage {key}: it is not in "
            "stages= of drjax.backends.flower.client"
        )
    for other in [*store]:
        if other not in fields[_KEYS]:
            del store[other]
    if _CODE in fields:
        code = bytes(fields[_CODE])
        if hashlib.sha256(code).hexdigest() != key:
            raise ValueError(f"the code that was sent is not that of the stage {key}")
        store[key] = code
    return (key, bytes(store[key])) if key in store else None
