"""A few configurations that are always the same: what they are, what their labels say of the machine, and of rows."""
