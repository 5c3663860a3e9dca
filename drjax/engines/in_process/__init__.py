"""The engine of this process, without workers."""
