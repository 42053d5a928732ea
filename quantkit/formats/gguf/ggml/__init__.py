"""ggml's quantized block types: packing, unpacking, and scale refitting."""
