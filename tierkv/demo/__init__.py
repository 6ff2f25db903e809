"""`tierkv demo`: a real model restores its prefix from every tier instead of recomputing it."""

from tierkv.demo.run import DemoOptions, DemoResult, DemoRow, run_demo

__all__ = ["DemoOptions", "DemoResult", "DemoRow", "run_demo"]
