"""Random models, meshes and rule tables, each compared with one device."""
