"""Middle floor: the prefix cache (no torch) and the inference engine that uses it."""
