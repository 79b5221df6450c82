"""The number formats for matrices in a GGUF file. Vectors and routers are always fp32."""

from enum import StrEnum


class GgufType(StrEnum):
    """A number format. ``q8_0``: 8 bits for each weight, and an fp16 scale for each 32 weights. Rows whose length is not divisible by 32 are fp16."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
