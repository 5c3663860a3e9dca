"""From a traced program to its plan; `make.py` is where to start reading."""
