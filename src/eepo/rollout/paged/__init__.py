"""The paged engine for GPUs: a paged KV cache, a scheduler and CUDA graphs."""
