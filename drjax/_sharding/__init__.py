"""How a partition maps to a mesh: the only folder that inspects meshes."""
