"""The fsdp2 and fsdp1 engines: sharding, tensor parallelism beside it, and weights read straight into shards."""
