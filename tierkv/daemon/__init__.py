"""The sidecar: one process a node that holds pages for all workers."""
