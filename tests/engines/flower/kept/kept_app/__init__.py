"""A Flower app for tests: clients keep state, and all messages are recorded."""
