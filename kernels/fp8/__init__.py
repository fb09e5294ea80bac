"""FP8 kernels over flat buckets: quantize and pack, unpack, dequantize, checksum.

Every operation runs on the bucket's device: Triton on CUDA, vectorised torch on CPU, both bit-equal to
the naive twin in `fp8bridge.kernels.reference`. Offsets and shapes in, bytes out: nothing here knows
tensor names, servers or configurations. Triton is imported only when a CUDA tensor arrives.
"""

from .checksum import ChecksumTable, checksum
from .dequantize import dequantize
from .mxfp8 import dequantize_mxfp8, quantize_mxfp8
from .pack import BoundPack, PackItem, PackTable, quantize, quantize_pack
from .rules import BLOCKS, RULES, WHOLE
from .scan import Scan
from .unpack import BoundUnpack, UnpackItem, UnpackTable, unpack_scatter

__all__ = [
    "BLOCKS",
    "RULES",
    "WHOLE",
    "BoundPack",
    "BoundUnpack",
    "ChecksumTable",
    "PackItem",
    "PackTable",
    "Scan",
    "UnpackItem",
    "UnpackTable",
    "checksum",
    "dequantize",
    "dequantize_mxfp8",
    "quantize",
    "quantize_mxfp8",
    "quantize_pack",
    "unpack_scatter",
]
