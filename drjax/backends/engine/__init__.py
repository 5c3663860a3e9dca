"""The core that all engines share; see docs/engines.md for how to add one."""
