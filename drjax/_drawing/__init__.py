"""Plans as pictures and as text: columns -> render, and text."""
