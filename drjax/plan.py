"""The plan: a program's normal form, as data.

A `Plan` is a list of steps: stages, which compute, exchanges, which communicate, and
loops, which run plans of their own. `drjax.make_plan` builds plans, and backends run
them.
"""

from drjax._plan.exchanges import Broadcast as Broadcast
from drjax._plan.exchanges import Fold as Fold
from drjax._plan.exchanges import Gather as Gather
from drjax._plan.exchanges import Move as Move
from drjax._plan.exchanges import Permute as Permute
from drjax._plan.exchanges import PutAdd as PutAdd
from drjax._plan.exchanges import Reduce as Reduce
from drjax._plan.exchanges import Scatter as Scatter
from drjax._plan.exchanges import Take as Take
from drjax._plan.exported import Exported as Exported
from drjax._plan.ledger import Ledger as Ledger
from drjax._plan.ledger import Message as Message
from drjax._plan.loops import Columns as Columns
from drjax._plan.loops import Cond as Cond
from drjax._plan.loops import Program as Program
from drjax._plan.loops import Scan as Scan
from drjax._plan.loops import While as While
from drjax._plan.normal_form import Plan as Plan
from drjax._plan.normal_form import Round as Round
from drjax._plan.rules import Rules as Rules
from drjax._plan.steps import Exchange as Exchange
from drjax._plan.steps import Loop as Loop
from drjax._plan.steps import Stage as Stage
from drjax._plan.steps import Step as Step
from drjax._plan.value import Value as Value
from drjax._plan.wire import Wire as Wire
