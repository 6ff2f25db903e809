"""A pool of nodes that hold pages for each other: docs/adr/0010-the-pool.md."""
