"""The scaling section of the DrJAX paper, reproduced: see README.md."""
