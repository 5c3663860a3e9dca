"""Plans as text and as pictures.

`text` (print), `columns` (texts of a picture), `positions` (positions), `draw`
(matplotlib).
"""
