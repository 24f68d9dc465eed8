"""The trained model: scoring, batching, loading, optimizers and memory estimates."""
