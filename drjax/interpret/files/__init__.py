"""The plan file: `save.py` writes it, `load.py` reads it, `manifest.py` describes it."""
