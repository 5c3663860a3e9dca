"""The plan file; docs/plan_files.md says what is in it."""
