"""What is assumed of GPU kernels and of CUDA's libraries: one home for the trace, its pricing and the fast path.

Start reading at the note below. Imports no torch. A change moves features: see `featurize.version`.
"""

from __future__ import annotations

# Every constant here is of kernels, not of a model or a GPU: rates, SM count, L2 cache and the warps that an SM holds
# come from the device's description. They were fitted together, once, to run means of SM activity, occupancy and FP32
# pipe of MLPs and CNNs (fp32, A100), rounded, and kept within a range judged plausible for such kernels. The fast
# path's sketch times layers by them; the full path only takes a product's tile from here
# (`featurize.kernel_model.activity`), as its times are learned. Block shapes are those of cuBLAS's, cuDNN's and
# PyTorch's usual kernels, not looked up per call.

KERNEL_LATENCY_US = 2.0  # of a kernel's run in which it neither computes nor streams: block start, first loads, drain
KERNEL_GAP_US = 2.0  # between two queued kernels, the SMs empty
BANDWIDTH_EFFICIENCY = 0.78  # of the data sheet's, by streaming kernels
L2_SPEEDUP = 4.0  # L2's rate over DRAM's, for tensors that the kernel before has left there
SM_BANDWIDTH_SHARES = 2.5  # one SM draws at most this many times its fair share of the bandwidth

# Output tiles of one thread block: side, side, warps; and the share of the peak that a full wave of them reaches. Small
# tiles reread their operands more often and hide less latency. fp32 products run on the FP32 pipe.
TILES = ((128, 128, 8), (128, 64, 4), (64, 64, 4), (64, 32, 4))
FP32_EFFICIENCY = (0.92, 0.92, 0.80, 0.45)
TENSOR_EFFICIENCY = (0.70, 0.70, 0.50, 0.50)
TENSOR_WARPS = 4  # of one block on the tensor cores
# Registers bound what an SM holds of such blocks: 20 and 10 warps.
FP32_WARPS_LIMIT, TENSOR_WARPS_LIMIT = 20, 10
SPLIT_DEPTH = 256  # a product's inner dimension is split over idle SMs down to this
SPLIT_US = 1.0  # what adding up the parts takes
ATTENTION_ROWS = 64  # queries of one head that one block takes
ATTENTION_EFFICIENCY = 0.50
INSTRUCTIONS_PER_ELEMENT = 15  # FP32 pipe slots of a pointwise kernel: its own, conversions, index arithmetic

HOST_PER_LISTED_TENSOR = 0.1  # launches' worth of host time per tensor in a for-each operator's lists
# Of one launch of a multi-tensor kernel (ATen/native/cuda/MultiTensorApply.cuh): blocks, and elements of a block.
FOREACH_BLOCKS, FOREACH_CHUNK = 320, 65536

# MiB that a process takes more, outside the allocator, once cuDNN has loaded its convolutions: the gap between measured
# MLPs and CNNs on one machine (A100, cuDNN 9.1).
CUDNN_MIB = 270
SCALED_PRODUCT = "aten::_scaled_mm"  # of 8-bit floats, whatever type its result has
