"""The Megatron-Core engine: model, weights under Hugging Face names, sharded optimizer, and running it on a CPU."""
