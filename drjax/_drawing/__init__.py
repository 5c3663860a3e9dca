"""Plans as text and as pictures.

* `print_plan`: the text that `print(plan)` prints.
* `columns`: the texts in a picture of a plan, column by column.
* `positions`: where each of them is in the picture.
* `draw`: the picture, by matplotlib.
"""
