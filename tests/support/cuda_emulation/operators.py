"""torch's CUDA operators, run in stream order by its CPU operators over the same memory.

Owns the callbacks that wait on emulated streams. install() replaces every CUDA operator that has
one for the CPU, except those that allocate, look at or copy memory: these stay torch's own, and
reach the emulated runtime. An operator is put on the current stream and the caller goes on, as
with a kernel; it holds addresses and no tensors, as a kernel does.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

RUNTIME = ctypes.CDLL(os.environ["TIERKV_EMULATED_CUDA"])
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
RUNTIME.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p, CALLBACK, ctypes.c_void_p]
RUNTIME.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
RUNTIME.emulated_pinned.argtypes = [ctypes.c_void_p]
RUNTIME.emulated_sleep.argtypes = [ctypes.c_void_p, ctypes.c_long]
RUNTIME.emulated_fail_after.argtypes = [ctypes.c_long]

KEPT = 256
"""Callbacks that have ended and are kept a little longer: one may still be returning."""
CYCLES_PER_US = 2000

OWN = (
    *("empty", "resize_", "_resize", "set_", "record_stream", "_pin_memory", "is_pinned"),
    *("as_strided", "view", "_reshape_alias", "alias", "detach", "new_", "lift", "is_set_to"),
    *("copy_", "_copy_from", "_local_scalar_dense", "_efficientzerotensor", "_fused_sdp_choice"),
    *("cudnn", "_cudnn", "_has_"),
)
"""Beginnings of names that stay torch's, or are replaced by hand."""
SHAPED_BY_DATA = ("nonzero", "masked_select", "equal", "_unique", "unique_", "index.Tensor")
"""The caller needs the result to go on."""
MIXED = ("index_put", "_index_put_impl", "index.Tensor")
"""Take indexes from the host, as on CUDA."""

_waiting: dict[int, Any] = {}
_ended: deque[int] = deque()
_library: torch.library.Library | None = None


def install() -> None:
    """Replace the operators of this process. Once."""
    global _library
    assert _library is None, "installed once"
    copy = torch.library.get_kernel("aten::copy_", "CUDA")
    _library = torch.library.Library("aten", "IMPL")
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if full.startswith("aten::") and _is_replaced(full, name):
            base, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            if not operator.is_view:
                _library.impl(name, _replacement(operator, name), "CUDA")
    _library.impl("copy_", _copy(copy), "CUDA")
    _library.impl("_local_scalar_dense", _item, "CUDA")
    _library.impl("_fused_rms_norm", _rms_norm, "CUDA")
    for choose in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{choose}_sdp")(False)
    torch.cuda._sleep = _sleep


def _is_replaced(full: str, name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        not name.startswith(OWN)
        and has(full, "CUDA")
        and has(full, "CPU")
        and not has(full, "CompositeImplicitAutograd")
    )


def _replacement(operator: Any, name: str) -> Callable[..., Any]:
    schema = operator._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    positions = {argument.name: at for at, argument in enumerate(schema.arguments)}

    def results(args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """Where the results go, allocated; None when only the data can tell."""
        if name.startswith(SHAPED_BY_DATA):
            return None
        targets = [kwargs.get(a.name, (*args, None)[positions[a.name]]) for a in written]
        if targets and not name.endswith("out"):
            return targets
        try:
            shapes = operator(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
        except RuntimeError:
            return None
        shapes = list(shapes) if isinstance(shapes, (tuple, list)) else [shapes]
        if not all(isinstance(shape, torch.Tensor) for shape in shapes):
            return None
        for target, shape in zip(targets, shapes, strict=False):
            if target.shape != shape.shape:
                target.resize_(shape.shape)
        return targets or [
            torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device="cuda") for s in shapes
        ]

    def run(*args: Any, **kwargs: Any) -> Any:
        if not name.startswith(MIXED):
            _refuse_host_tensors(name, (args, kwargs))
        found = results(args, kwargs)
        on_host = tree_map(_on_host, (args, kwargs))
        if found is None:
            _synchronize()
            result = operator(*on_host[0], **on_host[1])
            return tree_map(lambda x: x.to("cuda") if isinstance(x, torch.Tensor) else x, result)
        into = [] if written else [_alias(each) for each in found]

        def work() -> None:
            made = operator(*on_host[0], **on_host[1])
            made = list(made) if isinstance(made, (tuple, list)) else [made]
            for target, source in zip(into, made, strict=False):
                target.copy_(source)

        _put(work)
        if len(schema.returns) == 1:
            return found if "List" in str(schema.returns[0].type) else found[0]
        return tuple(found) if schema.returns else None

    return run


def _put(work: Callable[[], None]) -> None:
    """Run `work` on the current stream, after what is there."""
    pending = RUNTIME.cudaGetLastError()
    if pending:
        raise torch.AcceleratorError(f"CUDA error: {pending}, left by an earlier call")
    key = id(work)

    def call(_: object) -> None:
        worked = False
        try:
            with torch.inference_mode():
                work()
            worked = True
        finally:
            if not worked:
                # Nobody could be told: what follows on the stream would compute on rubbish.
                traceback.print_exc()
                os._exit(70)
        _ended.append(key)

    while len(_ended) > KEPT:
        del _waiting[_ended.popleft()]
    callback = CALLBACK(call)
    _waiting[key] = (callback, work)
    RUNTIME.cudaLaunchHostFunc(torch.cuda.current_stream().cuda_stream, callback, None)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes, which it borrows."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    raw = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _on_host(value: Any) -> Any:
    if _is_cuda(value):
        return _alias(value)
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not _is_cuda(value) and value.dim() == 0:
            return torch.empty((), dtype=value.dtype)
        strided = torch.empty_strided
        return strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _refuse_host_tensors(name: str, arguments: Any) -> None:
    for value in tree_flatten(arguments)[0]:
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got one on the CPU"
            )


def _synchronize() -> None:
    """Wait for the current stream without the GIL, which its operators need."""
    RUNTIME.cudaStreamSynchronize(torch.cuda.current_stream().cuda_stream)


def _copy(own: Any) -> Callable[..., torch.Tensor]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    by_operator = _replacement(torch.ops.aten.copy_.default, "copy_")

    def run(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if _is_cuda(self) and _is_cuda(src):
            plain = self.dtype == src.dtype and self.shape == src.shape
            if not (plain and self.is_contiguous() and src.is_contiguous()):
                return by_operator(self, src, non_blocking)
        elif not (non_blocking and _pinned(self) and _pinned(src)):
            _synchronize()
        return own.call_boxed(keys, self, src, non_blocking)

    return run


def _pinned(tensor: torch.Tensor) -> bool:
    return bool(RUNTIME.emulated_pinned(tensor.data_ptr()))


def _item(tensor: torch.Tensor) -> Any:
    _synchronize()
    return _alias(tensor).item()


def _rms_norm(
    rows: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA's fused operator, which the CPU does not have."""
    wide = rows.float()
    small = torch.finfo(rows.dtype).eps if eps is None else eps
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + small)
    normed = wide * scale
    return (normed if weight is None else normed * weight.float()).to(rows.dtype), scale


def _sleep(cycles: int) -> None:
    RUNTIME.emulated_sleep(torch.cuda.current_stream().cuda_stream, cycles // CYCLES_PER_US)
