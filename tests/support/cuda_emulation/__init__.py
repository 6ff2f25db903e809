"""A CUDA device that is emulated, for a real CUDA build of torch: docs/guides/gpu.md.

    python -m tests.support.cuda_emulation -m pytest -m gpu -p tests.support.cuda_emulation.plugin

`__main__` builds the two libraries and starts Python with them in front of the real ones. Needs a
CUDA 13 build of torch and cupy; no GPU and no driver.
"""
