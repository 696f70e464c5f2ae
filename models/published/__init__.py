"""Published decoders: reading and writing of config.json, and names of tensors, for the families' files."""
