"""The plan of a program: a list of steps, as `drjax.plan` has it.

value         the name and the type of an array that steps exchange
record        the base of all records
steps         what a step is: stages, exchanges, loops
exchanges     the exchanges, one class for each
loops         scan, while, cond, and plans over another partition
normal_form   the plan, and its view in rounds
methods       the methods of a plan that need the rest of the library
rules         a consumer's table of rules, one for each class of step
uses          definitions, uses, liveness and order
map_stages    a plan with each stage rewritten
exported      the facts that a plan needs of the exported functions of a stage
schedule_moves  which collectives move slices between devices, of a known index
wire          how numbers are encoded while they are communicated
ledger        what a plan communicates, and its bytes
"""
