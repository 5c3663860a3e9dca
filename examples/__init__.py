"""Programs that use drjax as a user would: run them with `python -m examples.NAME`."""
