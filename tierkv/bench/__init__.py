"""Benchmarks behind `tierkv bench`: one module each, one result shape for all."""
