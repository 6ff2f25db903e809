"""Copies between the paged KV pool of a device and page payloads in host memory."""
