"""How a GGUF file stores matrices. Vectors and routers are fp32 in all of them."""

from enum import StrEnum


class Kind(StrEnum):
    """``q8_0``: 8 bits a weight and an fp16 scale for each 32 of a row; rows of other lengths are fp16."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
