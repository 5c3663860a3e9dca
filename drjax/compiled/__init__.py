"""What the compiler made of a function: its collectives, their bytes, its memory.

    compiled function -> HLO text -> hlo.Module -> Collectives -> Report

report           `drjax.collectives`, and the records that it returns
hlo              a parser of HLO text, with the trip counts of loops
sent             the bytes that a device sends in a collective
replica_groups   the devices of a collective, and the mesh axes along which they lie
"""

from drjax.compiled.report import Collective as Collective
from drjax.compiled.report import Report as Report
from drjax.compiled.report import Total as Total
from drjax.compiled.report import WhileLoop as WhileLoop
from drjax.compiled.report import read_hlo as read_hlo
from drjax.compiled.report import totals as totals
from drjax.compiled.sent import sent_bytes as sent_bytes
