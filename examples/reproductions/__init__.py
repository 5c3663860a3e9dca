"""The numbers of the papers: `python -m examples.reproductions.NAME`."""
