"""Classifies a trial's exception: which memory ran out, or whether the device failed. Start reading at `classify`.

Torch-free: the trial classifies its exception, and the worker checks what the trial reports of its device.
"""

from __future__ import annotations

from conf.errors import CommandError

# Messages that mean "no memory" where the exception's type does not say so.
_DEVICE_OOM_MARKS = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA_ERROR_OUT_OF_MEMORY",
)
# What cuBLAS and cuDNN say on a full card, and for other reasons too: out of memory only where little is left.
_FULL_CARD_MARKS = ("CUBLAS_STATUS_NOT_INITIALIZED", "unable to find an engine to execute this computation")
_FULL_CARD_FREE_MIB = 512.0
# The device's fault and not the trial's: another attempt, perhaps on another device, may succeed.
_DEVICE_FAULT_MARKS = (
    "No CUDA GPUs are available",
    "uncorrectable ECC",
    "unspecified launch failure",
    "CUDA driver initialization failed",
    "device is busy or unavailable",
    "GPU is lost",
    "system not yet initialized",
)
_DEVICE_FAULT_TYPES = ("RuntimeError", "AcceleratorError", "DeferredCudaCallError")  # in which torch raises them
_HOST_OOM_MARKS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def classify(
    error: BaseException, host_is_device: bool, free_device_mib: float | None = None
) -> tuple[str, str | None]:
    """Return (status, oom_kind) of an exception: `oom` if memory ran out, `invalid` for an unbuildable config."""
    text = message_of(error)
    if isinstance(error, MemoryError) or any(mark in text for mark in _HOST_OOM_MARKS):
        return "oom", "device" if host_is_device else "host"
    if type(error).__name__ in ("OutOfMemoryError", "SimulatedOutOfMemoryError") or (
        isinstance(error, RuntimeError) and any(mark in text for mark in _DEVICE_OOM_MARKS)
    ):
        return "oom", "device"
    card_is_full = free_device_mib is not None and free_device_mib < _FULL_CARD_FREE_MIB
    if card_is_full and any(mark in text for mark in _FULL_CARD_MARKS):
        return "oom", "device"
    if isinstance(error, CommandError):
        return "invalid", None
    return "crashed", None


def message_of(error: BaseException) -> str:
    """Return the exception's message; empty if its own methods fail."""
    try:
        return str(error)
    except BaseException:  # a class of the model's own, with a __str__ of its own
        return ""


def is_device_fault(backend: str, error_type: str, error: str) -> bool:
    """Return whether a traceback ends in an exception with which torch reports a broken GPU, if the trial had one."""
    if backend != "cuda" or error_type not in _DEVICE_FAULT_TYPES:
        return False
    message = error.rpartition(f"{error_type}: ")[2]
    return any(mark in message for mark in _DEVICE_FAULT_MARKS)
