"""What the examples share: text, model, devices and plots."""
