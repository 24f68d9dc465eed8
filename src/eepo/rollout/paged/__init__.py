"""The GPU engine: a paged KV cache, a scheduler and CUDA graphs."""
